"""The arrays that hold the tokens of a cache, in blocks; what is common to all storages.

A block is a row of a `DenseCache`, the ring of a row, or a page. Heads come before tokens in a block, so that a tile of
one head is contiguous. Key and value of a token are in two arrays, or joined in one: then a page is one transfer, and
a TPU's lanes are full where D alone would not fill them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.exported import serialised
from attnops_caches.bits import from_bits, to_bits
from attnops_caches.codec import Quantized

if TYPE_CHECKING:
    from attnops.typing import DType


class Pieces(NamedTuple):
    """Runs of new tokens, each in consecutive slots of one block; int32 arrays [N].

    Attributes:
        row: the row of the new tokens.
        first: the first of the row's new tokens.
        size: how many; 0 for none.
        block: the block that they are written to.
        slot: the slot of the first.
    """

    row: jax.Array
    first: jax.Array
    size: jax.Array
    block: jax.Array
    slot: jax.Array


@serialised(
    dtype=(lambda x: jnp.dtype(x).name, jnp.dtype),
    codec=(lambda x: x and dataclasses.asdict(x), lambda x: x and Quantized(**x)),
    head_dims=(list, tuple),
)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
    """Keys and values of tokens in blocks of n slots.

    Attributes:
        key: [blocks, K, n, D], in the codec's dtype; narrow floats as bits, see `attnops_caches.bits`. Of joined or
            padded tokens [blocks, K, n, W]: the key first, then zeros, and the value last if it is joined.
        value: [blocks, K, n, Dv]; None where it is joined, and for latent content, whose value is a part of the key.
        key_scale: float32 [], [K] or [blocks, K, n], by the codec; None without one.
        value_scale: the same of the values; None of latent content.
        dtype: of keys and values as they are appended and read.
        codec: None: tokens are stored as they are.
        latent: the value is the first so many features of the key; None where values are stored.
        head_dims: D of keys and Dv of values.
        first: of one layer in the arrays of all layers, [L, blocks, K, n, D], its first block, int32 []; None where all
            blocks are its own.
        blocks: of one layer in the arrays of all layers, how many; None where all blocks are its own.
    """

    key: jax.Array
    value: jax.Array | None
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    dtype: DType = dataclasses.field(metadata={"static": True})
    codec: Quantized | None = dataclasses.field(metadata={"static": True})
    latent: int | None = dataclasses.field(metadata={"static": True})
    head_dims: tuple[int, int] = dataclasses.field(metadata={"static": True})
    first: jax.Array | None = None
    blocks: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def has_token_scales(self) -> bool:
        """Whether each token of each head has scales of its own."""
        return self.codec is not None and self.codec.scales == "token_head"

    @property
    def is_joined(self) -> bool:
        """Whether the value of a token follows its key in one array."""
        return self.value is None and self.latent is None

    @property
    def slots(self) -> int:
        """n, the slots of a block."""
        return self.key.shape[-2]

    @property
    def own_blocks(self) -> int:
        """How many blocks there are, of one layer."""
        return self.key.shape[-4] if self.blocks is None else self.blocks

    @property
    def base(self) -> jax.Array | int:
        """The index of the first block."""
        return 0 if self.first is None else self.first

    def own(self, x: jax.Array) -> jax.Array:
        """Of an array of blocks, this layer's: a copy if it has those of other layers too."""
        if self.first is None:
            return x
        if self.key.ndim == 4:
            return lax.dynamic_slice_in_dim(x, self.first, self.own_blocks)
        return lax.dynamic_index_in_dim(x, self.first // self.own_blocks, keepdims=False)

    def layer(self, layer: jax.typing.ArrayLike) -> Store:
        """One layer of a store with a layer axis: the arrays stay those of all layers, with the axis, see `flat`."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        given = {} if self.has_token_scales else {name: x for name, x in scales.items() if x is not None}
        changes: dict[str, Any] = {
            name: lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in given.items()
        }
        first = jnp.asarray(layer, jnp.int32) * self.own_blocks
        return dataclasses.replace(self, **changes, first=first, blocks=self.own_blocks)

    def flat(self) -> Store:
        """One layer as it is read: with the blocks of all layers one after the other. Any other store as it is.

        What is written must keep the layer axis: XLA's CPU backend copies a loop's array that is reshaped where K is 1.
        """
        if self.first is None or self.key.ndim == 4:
            return self
        flat: dict[str, Any] = {name: x.reshape(-1, *x.shape[2:]) for name, x in self._blocks().items()}
        return dataclasses.replace(self, **flat)

    def local(self) -> Store:
        """A device's part of this store, whose counts are of the whole store."""
        if self.first is None:
            return self
        own = self.key.shape[-4]
        return dataclasses.replace(self, first=self.first // self.own_blocks * own, blocks=own)

    def with_layer(self, one: Store) -> Store:
        """This store with a layer axis, with the arrays of one of its layers."""
        return dataclasses.replace(self, **one._blocks())  # type: ignore[arg-type]

    def _blocks(self) -> dict[str, jax.Array]:
        """The arrays of blocks."""
        names = ("key", "value", *(("key_scale", "value_scale") if self.has_token_scales else ()))
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def stored_dtype(self) -> DType:
        """The dtype of stored tokens, whose bits the arrays hold."""
        return jnp.dtype(self.dtype) if self.codec is None else self.codec.stored_dtype

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.key.shape[-3]

    @property
    def head_dim(self) -> int:
        """D, of keys."""
        return self.head_dims[0]

    @property
    def value_head_dim(self) -> int:
        """Dv, of values."""
        return self.head_dims[1]

    @property
    def width(self) -> int:
        """W, the features of the array of keys."""
        return self.key.shape[-1]

    def key_of(self, x: jax.Array) -> jax.Array:
        """The keys [..., D] of the array of keys [..., W], or of a part of it."""
        return x[..., : self.head_dim]

    def value_of(self, x: jax.Array, value: jax.Array | None) -> jax.Array:
        """The values [..., Dv] of the arrays of keys and of values, or of parts of them; encoded as they are."""
        if value is not None:
            return value
        return x[..., : self.latent] if self.latent is not None else x[..., self.width - self.value_head_dim :]

    @functools.partial(jax.jit, inline=True)
    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces) -> Store:
        """This store with new tokens; every other slot is unchanged.

        Args:
            key: [B, T, K, D].
            value: [B, T, K, Dv]; None for latent content.
            pieces: where they go.

        Memory: O(new tokens) of temporaries; the store itself is updated in place where its buffer is donated.
        """
        return self._written(self._tokens(key, value), pieces, pieces.row.shape[0])

    @functools.partial(jax.jit, inline=True)  # else its loop would be compiled in each eager call
    def write_some(self, tokens: dict[str, jax.Array], pieces: Pieces) -> Store:
        """`write` of tokens as `NewTokens` has them, where most pieces may be empty: the loop leaves them out."""
        is_some = pieces.size > 0
        order = jnp.argsort(~is_some, stable=True)
        return self._written(tokens, Pieces(*(x[order] for x in pieces)), is_some.sum(dtype=jnp.int32))

    def _written(self, tokens: dict[str, jax.Array], pieces: Pieces, count: jax.Array | int) -> Store:
        """This store with the first ``count`` pieces of new tokens."""
        scales = {name for name in tokens if name.endswith("scale")}

        def with_features(name: str, x: jax.Array) -> jax.Array:
            return x[..., None] if name in scales else x

        targets = [with_features(name, getattr(self, name)) for name in tokens]
        layer = None if self.first is None else self.first // self.own_blocks
        written = _write(targets, [with_features(*x) for x in tokens.items()], pieces, count, layer)
        changes: dict[str, Any] = {
            name: x[..., 0] if name in scales else x for name, x in zip(tokens, written, strict=True)
        }
        return dataclasses.replace(self, **changes)

    def _tokens(self, key: jax.Array, value: jax.Array | None) -> dict[str, jax.Array]:
        """New tokens as they are stored, [B, K, T, d], and their scales by token, [B, K, T]; by the names of arrays."""
        stored, scale = self._encoded(key, self.key_scale)
        found, scales = {"key": stored}, {"key_scale": scale}
        if value is not None:
            found["value"], scales["value_scale"] = self._encoded(value, self.value_scale)
        if self.value is None:
            joined = [found["key"], *([found.pop("value")] if value is not None else [])]
            zeros = jnp.zeros((*stored.shape[:-1], self.width - sum(x.shape[-1] for x in joined)), stored.dtype)
            joined.insert(1, zeros)
            found["key"] = jnp.concatenate([x for x in joined if x.shape[-1]], axis=-1)
        return found | {name: x for name, x in scales.items() if x is not None and self.has_token_scales}

    def _encoded(self, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """New tokens [B, T, K, d] as they are stored, [B, K, T, d], and their scales."""
        x = x.swapaxes(1, 2)
        if self.codec is None:
            return to_bits(x), None
        stored, scale = self.codec.encode(x, None if self.codec.scales == "token_head" else scale)
        return to_bits(stored), scale

    def decoded(
        self, key: jax.Array, value: jax.Array | None, key_scale: jax.Array | None, value_scale: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Stored tokens [..., K, n, d] and their scales as keys and values, float32 with a codec."""
        if self.latent is not None:
            value_scale = key_scale
        key, value = (from_bits(x, self.stored_dtype) for x in (self.key_of(key), self.value_of(key, value)))
        if self.codec is not None:
            assert key_scale is not None
            assert value_scale is not None
            key, value = self.codec.decode(key, key_scale), self.codec.decode(value, value_scale)
        return key, value


def _write(
    targets: list[jax.Array],
    tokens: list[jax.Array],
    pieces: Pieces,
    count: jax.Array | int,
    layer: jax.Array | None,
) -> list[jax.Array]:
    """Each target with pieces of new tokens [B, K, T, d].

    Args:
        targets: [blocks, K, n, d] each, or a layer of [L, blocks, K, n, d].
        tokens: for each target.
        pieces: where they go.
        count: how many of the pieces are written, the first ones.
        layer: which one.
    """
    T, n = tokens[0].shape[2], targets[0].shape[-2]
    # A window of a row's new tokens may begin before the first and end after the last of them.
    window = min(T, n)
    before = 0 if T == 1 else window
    padded = [x if T == 1 else jnp.pad(x, ((0, 0), (0, 0), (before, before), (0, 0))) for x in tokens]

    def piece(i: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        row, first, size, block, slot = (x[i] for x in pieces)
        zero = jnp.int32(0)
        start = jnp.clip(slot, 0, n - window)
        shift = slot - start
        place = jnp.arange(window, dtype=jnp.int32)[:, None]
        is_new = (place >= shift) & (place < shift + size)
        from_token = zero if T == 1 else first - shift + before
        at = (*(() if layer is None else (layer,)), block, zero, start, zero)
        results = []
        for array, new in zip(arrays, padded, strict=True):
            sizes = (1, array.shape[-3], window, array.shape[-1])
            given = lax.dynamic_slice(new, (row, zero, from_token, zero), sizes)
            old = lax.dynamic_slice(array, at, (*(1,) * (array.ndim - 4), *sizes))
            results.append(lax.dynamic_update_slice(array, jnp.where(is_new, given, old), at))
        return results

    if isinstance(count, int) and count == 1:
        return piece(jnp.int32(0), targets)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), piece, targets)
