"""StateCache: the states of linear-attention layers, one slot a row."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks import KeyPadding, Mask


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
        lengths: tokens so far, int32 [B].
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
        sizes |= {} if conv is None else dict(zip(("conv's channels", "conv's width"), conv, strict=True))
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive int")
        lead = () if layers is None else (layers,)
        state = jnp.zeros((*lead, batch, heads, head_dim, value_head_dim or head_dim), dtype)
        taps = None if conv is None else jnp.zeros((*lead, batch, conv[1] - 1, conv[0]), conv_dtype)
        return cls(state, taps, jnp.zeros(batch, jnp.int32))

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
        """One layer of several, with their lengths."""
        self._check_layers(layer)
        state, conv = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), (self.state, self.conv)
        )
        return dataclasses.replace(self, state=state, conv=conv)

    def with_layer(self, layer: int | jax.Array, one: StateCache) -> Self:
        """This cache with a layer replaced; its lengths are those of ``one``."""
        self._check_layers(layer)
        state, conv = jax.tree.map(
            lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), layer, 0),
            (self.state, self.conv), (one.state, one.conv),
        )  # fmt: skip
        return dataclasses.replace(self, state=state, conv=conv, lengths=one.lengths)

    def advanced(self, state: jax.Array, counts: jax.Array) -> Self:
        """This layer after ``counts`` [B] more tokens, with their state [B, Hv, D, Dv]."""
        return dataclasses.replace(self, state=state.astype(self.state.dtype), lengths=self.lengths + counts)

    def with_conv(self, conv: jax.Array) -> Self:
        """This layer with other last tokens of its convolution, [B, W - 1, C]."""
        return dataclasses.replace(self, conv=conv)

    def take_rows(self, rows: Any) -> Self:
        """The rows of these indices, integers [n], in this order; one may be taken several times, as for beams."""
        rows = jnp.asarray(rows)
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows has shape {rows.shape} and dtype {rows.dtype}, but must be integers [n]")
        axis = self.state.ndim - 4
        state, conv = jax.tree.map(lambda x: jnp.take(x, rows, axis=axis, mode="clip"), (self.state, self.conv))
        return dataclasses.replace(self, state=state, conv=conv, lengths=jnp.take(self.lengths, rows, mode="clip"))

    def reset(self, rows: Any) -> Self:
        """Empty states for rows where ``rows``, bool [B], is True."""
        rows = jnp.asarray(rows)
        if rows.shape != self.lengths.shape or rows.dtype != jnp.bool_:
            raise ValueError(
                f"rows has shape {rows.shape} and dtype {rows.dtype}, but must be bool {self.lengths.shape}"
            )

        state = jnp.where(rows[:, None, None, None], 0, self.state)
        conv = None if self.conv is None else jnp.where(rows[:, None, None], 0, self.conv)
        return dataclasses.replace(self, state=state, conv=conv, lengths=jnp.where(rows, 0, self.lengths))

    def _check_layers(self, layer: int | jax.Array) -> None:
        if self.layers is None:
            raise ValueError("the cache has one layer, without an axis of layers: use it as it is")
        if isinstance(layer, int) and not 0 <= layer < self.layers:
            raise ValueError(f"layer={layer} must be from 0 to {self.layers - 1}")


def step_mask(query_lengths: Any, mask: Mask | None, B: int, T: int) -> tuple[Mask | None, jax.Array]:
    """The mask of a step whose rows have ``query_lengths`` tokens, and the tokens that each row counts, int32 [B]."""
    if query_lengths is None:
        return mask, jnp.full(B, T, jnp.int32)
    counts = jnp.asarray(query_lengths)
    if counts.shape != (B,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"query_lengths has shape {counts.shape} and dtype {counts.dtype}, but must be integers [B]={(B,)}"
        )
    if not isinstance(counts, jax.core.Tracer) and B and not (0 <= int(counts.min()) <= int(counts.max()) <= T):
        raise ValueError(f"query_lengths={counts.tolist()} must be from 0 to T={T}")
    counts = jnp.clip(counts, 0, T).astype(jnp.int32)
    real = KeyPadding(jnp.arange(T) < counts[:, None])
    return (real if mask is None else mask & real), counts
