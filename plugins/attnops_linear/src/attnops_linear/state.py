"""StateCache: the states of linear-attention layers, one slot a row."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.exported import serialised
from attnops.masks import KeyPadding, Mask
from attnops_linear.masks import is_known


@serialised()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateCache:
    """The states of linear-attention layers and the last tokens of their convolutions, one slot a row.

    A pytree of static shapes. All methods return a new cache; where its buffers are donated they are updated in place.
    A state can't be truncated. To draft tokens, keep the cache from before them, don't donate it, and step again from
    it with ``query_lengths`` set to the numbers of accepted tokens.

    Attributes:
        state: [B, Hv, D, Dv] of one layer, [layers, B, Hv, D, Dv] of several.
        conv: the last W - 1 tokens before a convolution of width W, [B, W - 1, C] or [layers, B, W - 1, C]; None
            without one.
        lengths: tokens so far, int32 [B] or [layers, B].
    """

    state: jax.Array
    conv: jax.Array | None
    lengths: jax.Array

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        conv: tuple[int, int] | None = None,
        layers: int | None = None,
        dtype: Any = jnp.float32,
        conv_dtype: Any = jnp.float32,
    ) -> StateCache:
        """Empty states; 4 · layers · B · Hv · D · Dv bytes in float32.

        Args:
            batch: B, rows.
            heads: Hv.
            head_dim: D.
            value_head_dim: Dv. None: D.
            conv: channels C and width W of the layer's `CausalConv1d`. None: none.
            layers: the number of layers. None: one, without an axis of layers.
            dtype: of the states, float32 or bfloat16. bfloat16 loses what a step adds to a large state.
            conv_dtype: of the tokens before the convolution.

        Raises:
            ValueError: a size is not a positive int, or a dtype is none of these.
        """
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"dtype={jnp.dtype(dtype).name}, but states must be float32 or bfloat16")
        sizes = {"batch": batch, "heads": heads, "head_dim": head_dim}
        sizes |= {} if value_head_dim is None else {"value_head_dim": value_head_dim}
        sizes |= {} if layers is None else {"layers": layers}
        if conv is not None and (not isinstance(conv, tuple) or len(conv) != 2):
            raise ValueError(f"conv={conv!r} must be a tuple (channels, width)")
        if conv is not None and not jnp.issubdtype(conv_dtype, jnp.floating):
            raise ValueError(f"conv_dtype={jnp.dtype(conv_dtype).name} must be a dtype of floating-point numbers")
        sizes |= {} if conv is None else dict(zip(("conv's channels", "conv's width"), conv, strict=True))
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive int")
        lead = () if layers is None else (layers,)
        state = jnp.zeros((*lead, batch, heads, head_dim, value_head_dim or head_dim), dtype)
        taps = None if conv is None else jnp.zeros((*lead, batch, conv[1] - 1, conv[0]), conv_dtype)
        return cls(state, taps, jnp.zeros((*lead, batch), jnp.int32))

    @property
    def layers(self) -> int | None:
        """The number of layers; None for one without an axis of layers."""
        return self.state.shape[0] if self.state.ndim == 5 else None

    def check_layer(self) -> None:
        """Raise a `ValueError` unless this is one layer."""
        if self.layers is not None:
            raise ValueError(
                f"the cache has {self.layers} layers, but a call takes one: step with cache.layer(i), and put it back "
                f"with cache.with_layer(i, ...)"
            )

    def layer(self, layer: int | jax.Array) -> Self:
        """One layer of several."""
        self._check_layers(layer)
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), self)

    def with_layer(self, layer: int | jax.Array, one: StateCache) -> Self:
        """This cache with one layer replaced by what became of ``self.layer(layer)``."""
        self._check_layers(layer)
        wanted, given = ([x.shape for x in jax.tree.leaves(cache)] for cache in (self, one))
        if given != [shape[1:] for shape in wanted]:
            raise ValueError(
                f"the layer's arrays have shapes {given}, but must have {[shape[1:] for shape in wanted]}, those of "
                f"cache.layer(i)"
            )
        return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), layer, 0), self, one)

    def advanced(self, state: jax.Array, counts: jax.Array) -> Self:
        """This layer after ``counts`` [B] more tokens, with their state [B, Hv, D, Dv]."""
        return dataclasses.replace(self, state=state.astype(self.state.dtype), lengths=self.lengths + counts)

    def with_conv(self, conv: jax.Array) -> Self:
        """This layer with other last tokens of its convolution, [B, W - 1, C]."""
        return dataclasses.replace(self, conv=conv)

    def take_rows(self, rows: Any) -> Self:
        """The rows of these indices, integers [n], in this order; one may be taken several times, as for beams.

        Indices are checked if known when tracing; else one that is no row gives an empty row.
        """
        batch, rows = self.lengths.shape[-1], as_array(rows)
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows has shape {rows.shape} and dtype {rows.dtype}, but must be integers [n]")
        if is_known(rows) and rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
            raise ValueError(f"rows={rows.tolist()} must be rows of the cache, 0 to {batch - 1}")
        rows = jnp.where((rows >= 0) & (rows < batch), rows, batch)
        axis = self.lengths.ndim - 1
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=axis, mode="fill", fill_value=0), self)

    def put(self, rows: Any, taken: StateCache) -> Self:
        """The cache with rows that `take_rows` took, from a cache of any batch, in place of its own.

        Args:
            rows: the rows that are replaced, integers [n], all different; one that is no row, such as −1, does nothing.
            taken: n rows of the same sizes and dtypes.

        Raises:
            ValueError: other rows, or rows of other sizes or dtypes.
        """
        n, axis = taken.lengths.shape[-1], self.lengths.ndim - 1
        rows, batch = as_array(rows), self.lengths.shape[-1]
        if rows.shape != (n,) or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows has shape {rows.shape} and dtype {rows.dtype}, but must be integers [n]={(n,)}")
        if is_known(rows) and len(set(used := rows[rows >= 0].tolist())) < len(used):
            raise ValueError(f"rows={rows.tolist()} has a row twice, but each is replaced once")
        own, given = ([(x.shape[:axis] + x.shape[axis + 1 :], x.dtype.name) for x in jax.tree.leaves(cache)]
                      for cache in (self, taken))  # fmt: skip
        if own != given:
            raise ValueError(f"the rows have arrays {given} without the axis of rows, but the cache has {own}")
        rows = jnp.where((rows >= 0) & (rows < batch), rows, batch)
        place = (slice(None),) * axis
        return jax.tree.map(lambda x, new: x.at[(*place, rows)].set(new, mode="drop"), self, taken)

    def reset(self, rows: Any) -> Self:
        """Empty states for rows where ``rows``, bool [B], is True."""
        rows = jnp.asarray(rows)
        wanted = self.lengths.shape[-1:]
        if rows.shape != wanted or rows.dtype != jnp.bool_:
            raise ValueError(f"rows has shape {rows.shape} and dtype {rows.dtype}, but must be bool {wanted}")
        state = jnp.where(rows[:, None, None, None], 0, self.state)
        conv = None if self.conv is None else jnp.where(rows[:, None, None], 0, self.conv)
        return dataclasses.replace(self, state=state, conv=conv, lengths=jnp.where(rows, 0, self.lengths))

    def _check_layers(self, layer: Any) -> None:
        if self.layers is None:
            raise ValueError("the cache has one layer, without an axis of layers: use it as it is")
        index = as_array(layer)
        if index.shape or not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(f"layer={layer!r} must be an integer")
        if is_known(index) and not 0 <= int(index) < self.layers:
            raise ValueError(f"layer={int(index)} must be from 0 to {self.layers - 1}")


def as_array(values: Any) -> Any:
    """Numbers as an array: a JAX array if one is traced, else with all bits that numpy gives them."""
    traced = any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))
    return jnp.asarray(values) if traced else np.asarray(values)


def check_cache(cache: Any) -> None:
    """Raise a `ValueError` unless it is one layer of a `StateCache`."""
    if not isinstance(cache, StateCache):
        raise ValueError(f"cache is a {type(cache).__name__}, but must be a StateCache")
    cache.check_layer()


def step_mask(query_lengths: Any, mask: Mask | None, B: int, T: int) -> tuple[Mask | None, jax.Array]:
    """The mask of a step whose rows have ``query_lengths`` tokens, and the tokens that each row counts, int32 [B]."""
    if query_lengths is None:
        return mask, jnp.full((B,), T, jnp.int32)
    counts = as_array(query_lengths)
    if counts.shape != (B,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"query_lengths has shape {counts.shape} and dtype {counts.dtype}, but must be integers [B]={(B,)}"
        )
    if is_known(counts) and B and not (0 <= int(counts.min()) <= int(counts.max()) <= T):
        raise ValueError(f"query_lengths={counts.tolist()} must be from 0 to T={T}")
    counts = jnp.asarray(counts.clip(0, T)).astype(jnp.int32)
    real = KeyPadding(jnp.arange(T) < counts[:, None])
    return (real if mask is None else mask & real), counts
