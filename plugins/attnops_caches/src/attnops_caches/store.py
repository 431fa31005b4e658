"""The arrays that hold the tokens of a cache, in blocks; what is common to all storages.

A block is a row of a `DenseCache`, the ring of a row, or a page. Heads come before tokens in a block, so that a tile of
one head is contiguous. Key and value of a token are in two arrays, or joined in one: then a page is one transfer, and
a TPU's lanes are full where D alone would not fill them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from attnops.exported import serialised, serialised_tuple
from attnops_caches.bits import bits_dtype, from_bits, to_bits
from attnops_caches.layout import TokenLayout, TokenOptions, layout_of


@serialised_tuple
class Pieces(NamedTuple):
    """Runs of new tokens, each in consecutive slots of one block; int32 arrays [N].

    Attributes:
        row: the row in the arrays of new tokens.
        first: the index of the first token in that row.
        size: how many tokens; 0 for none.
        block: the block that they are written to.
        slot: the slot of the first.
    """

    row: jax.Array
    first: jax.Array
    size: jax.Array
    block: jax.Array
    slot: jax.Array

    def packed(self, starts: jax.Array | None) -> Pieces:
        """These pieces by row of a cache as pieces of packed tokens, in which rows begin at ``starts``; None: not."""
        if starts is None:
            return self
        return self._replace(first=self.first + starts[self.row], row=jnp.zeros_like(self.row))


class GivenTokens(NamedTuple):
    """New tokens of one layer as the caller gave them.

    Attributes:
        size: how many tokens of each row fit, int32 [B].
        starts: for packed rows, the index of each row's first token among the T, int32 [B]; None for a batch.
        key: [B, T, K, D]; for packed rows [1, T, K, D].
        value: likewise, [B, T, K, Dv]; None for latent content.
    """

    size: jax.Array
    starts: jax.Array | None
    key: jax.Array
    value: jax.Array | None


@serialised_tuple
class NewTokens(NamedTuple):
    """New tokens that are not written yet.

    Attributes:
        tokens: what is written to each array of the `Store`, by its name: tokens as they are stored, [B, K, T, d], and
            scales by token, [B, K, T]; for packed rows [1, K, N, d] and [1, K, N].
        first: the slot of each row's first new token, int32 [B]; in a ring, slot 0 follows the last slot.
        size: how many tokens of each row fit, int32 [B].
        blocks: the blocks that each row's tokens go to, in order, int32 [B, blocks].
        starts: for packed rows, the index of each row's first token among the N, int32 [B]; None for a batch.
        given: the tokens as the caller gave them, for a kernel that quantises them itself, so that XLA leaves
            ``tokens`` out, and for `Cache.with_tokens` where a kernel does not write those of all rows.
    """

    tokens: dict[str, jax.Array]
    first: jax.Array
    size: jax.Array
    blocks: jax.Array
    starts: jax.Array | None = None
    given: GivenTokens | None = None


@serialised(layout=(TokenLayout.to_json, TokenLayout.from_json))
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
    """Keys and values of tokens in blocks of n slots.

    Attributes:
        key: [blocks, K, n, W], in the codec's dtype; narrow floats as bits, see `attnops_caches.bits`. Two features of
            int4 are one byte: then W is half the layout's ``width``, and Dv half its ``value_head_dim``.
        value: [blocks, K, n, Dv]; None if the array of keys has the values.
        key_scale: the keys' scales, float32 [], [K] or [blocks, K, n], by the codec; None without one.
        value_scale: the values' scales, likewise; None for latent content.
        layout: how a token lies in these arrays.
        layer: which layer it is, int32 [], where these arrays have all layers, [L, …]; else None.
    """

    key: jax.Array
    value: jax.Array | None
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    layout: TokenLayout = dataclasses.field(metadata={"static": True})
    layer: jax.Array | None = None

    @property
    def slots(self) -> int:
        """n, the slots of a block."""
        return self.key.shape[-2]

    @property
    def own_blocks(self) -> int:
        """How many blocks one layer has."""
        return self.key.shape[-4]

    @property
    def base(self) -> jax.Array | int:
        """The index of the first block among those of `flat_blocks`."""
        return 0 if self.layer is None else self.layer * self.own_blocks

    def own(self, x: jax.Array) -> jax.Array:
        """This layer's blocks of an array of blocks: a copy if it has those of other layers too."""
        return x if self.layer is None else lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

    def at_layer(self, layer: ArrayLike) -> Store:
        """One layer of a store with a layer axis: the arrays stay those of all layers."""
        layer = jnp.asarray(layer, jnp.int32)  # from the last if negative
        return dataclasses.replace(self, layer=jnp.where(layer < 0, layer + self.key.shape[0], layer))

    def flat_blocks(self) -> dict[str, jax.Array]:
        """The arrays of blocks as they are read, without a layer axis: the blocks of all layers one after the other.

        What is written must keep the axis: XLA's CPU backend copies a loop's array that is reshaped where K is 1.
        """
        blocks = self._blocks()
        return blocks if self.layer is None else {name: x.reshape(-1, *x.shape[2:]) for name, x in blocks.items()}

    def _blocks(self) -> dict[str, jax.Array]:
        """The arrays of blocks."""
        names = ("key", "value", *(("key_scale", "value_scale") if self.layout.has_token_scales else ()))
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def given_scales(self) -> dict[str, jax.Array]:
        """The scales that the cache was created with, by head or tensor; of this layer."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: self.own(x) for name, x in scales.items() if x is not None and not self.layout.has_token_scales}

    def decoded(self, blocks: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Some blocks of each array of `_blocks`, [..., K, n, d], as keys and values; float32 with a codec."""
        layout, without = self.layout, {"key_scale": None, "value_scale": None}
        arrays: dict[str, Any] = without | self.given_scales | blocks

        def as_floats(stored: jax.Array, scale: Any) -> jax.Array:
            x = from_bits(stored, layout.stored_dtype)
            return x if layout.codec is None else layout.codec.decode(x, scale)

        key = as_floats(layout.key_of(arrays["key"]), arrays["key_scale"])
        if layout.content == "latent":
            return key, key[..., : layout.value_head_dim]
        return key, as_floats(layout.value_of(arrays["key"], arrays.get("value")), arrays["value_scale"])

    @functools.partial(jax.jit, inline=True, static_argnames="sparse")  # else each eager call would compile its loop
    def write(self, tokens: dict[str, jax.Array], pieces: Pieces, *, sparse: bool) -> Store:
        """This store with new ``tokens``, encoded, in their ``pieces``; every other slot is unchanged.

        If ``sparse``, most pieces may be empty, and the loop leaves these out. A donated store is updated in place.
        """
        count: jax.Array | int = pieces.row.shape[0]
        if sparse:
            is_some = pieces.size > 0
            order = jnp.argsort(~is_some, stable=True)
            pieces, count = Pieces(*(x[order] for x in pieces)), is_some.sum(dtype=jnp.int32)
        T, n, lead = tokens["key"].shape[2], self.slots, () if self.layer is None else (self.layer,)
        # The window of a piece may begin before its row's first new token, and end after the last.
        window = min(T, n)
        before = 0 if T == 1 else window
        around = (0, 0), (0, 0), (before, before), (0, 0)
        padded = {name: x if T == 1 else jnp.pad(x, around[: x.ndim]) for name, x in tokens.items()}

        def write_piece(i: jax.Array, arrays: dict[str, Any]) -> dict[str, Any]:
            row, first, size, block, slot = (x[i] for x in pieces)
            zero = jnp.int32(0)
            start = jnp.clip(slot, 0, n - window)
            shift = slot - start
            from_token = zero if T == 1 else first - shift + before
            written = {}
            for name, new in padded.items():
                last = new.shape[3:]
                place = jnp.arange(window, dtype=jnp.int32).reshape(-1, *(1 for _ in last))
                is_new = (place >= shift) & (place < shift + size)
                sizes = (1, new.shape[1], window, *last)
                at = (*lead, block, zero, start, zero)[: arrays[name].ndim]
                given = lax.dynamic_slice(new, (row, zero, from_token, zero)[: new.ndim], sizes)
                given = from_bits(given, arrays[name].dtype)  # an engine's arrays may hold narrow floats as they are
                old = lax.dynamic_slice(arrays[name], at, (*(1 for _ in lead), *sizes))
                written[name] = lax.dynamic_update_slice(arrays[name], jnp.where(is_new, given, old), at)
            return written

        arrays = {name: getattr(self, name) for name in padded}
        if isinstance(count, int) and count == 1:
            return dataclasses.replace(self, **write_piece(jnp.int32(0), arrays))
        return dataclasses.replace(self, **lax.fori_loop(jnp.int32(0), jnp.int32(count), write_piece, arrays))

    def encoded(self, key: jax.Array, value: jax.Array | None) -> dict[str, jax.Array]:
        """New tokens [B, T, K, d] as stored, [B, K, T, elements], and scales by token, float32 [B, K, T], by array."""
        layout, codec, arrays = self.layout, self.layout.codec, {}
        given = self.given_scales
        for name, x in ("key", key), ("value", value):
            if x is None:
                continue
            stored = x.swapaxes(1, 2)
            if codec is not None:
                stored, scales = codec.encode(stored, given.get(f"{name}_scale"))
                if layout.has_token_scales:
                    arrays[f"{name}_scale"] = scales
            arrays[name] = to_bits(stored)
        return self.joined(arrays)

    def joined(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Stored tokens by array, with key [..., D] and value [..., Dv] in one, unless the layout has two."""
        layout = self.layout
        if layout.content == "separate":
            return arrays
        first, last = arrays["key"], [arrays["value"]] if "value" in arrays else []
        padding = layout.elements(layout.width) - first.shape[-1] - sum(x.shape[-1] for x in last)
        zeros = [jnp.zeros((*first.shape[:-1], padding), first.dtype)] if padding else []
        others = {name: x for name, x in arrays.items() if name not in ("key", "value")}
        return others | {"key": jnp.concatenate([first, *zeros, *last], axis=-1)}


def create_store(blocks: int, slots: int, joins: bool = False, **tokens: Unpack[TokenOptions]) -> Store:
    """An empty store of ``blocks`` of n = ``slots``, its arguments checked.

    If ``joins``, key and value are in one array, without zeros unless a width is given.
    """
    layout, K, lead = layout_of(tokens, joins)
    codec, is_latent = layout.codec, layout.content == "latent"

    def array(features: int) -> jax.Array:
        return jnp.zeros((*lead, blocks, K, slots, layout.elements(features)), bits_dtype(layout.stored_dtype))

    def scales(name: str, given: ArrayLike | None) -> jax.Array | None:
        if codec is None or codec.scales == "token_head":
            if given is not None:
                why = "has no codec" if codec is None else "computes scales by token and head itself"
                raise ValueError(f"{name} is given, but the cache {why}; leave it out")
            return None if codec is None else jnp.zeros((*lead, blocks, K, slots), jnp.float32)
        shape = () if codec.scales == "tensor" else (K,)
        if given is None:
            raise ValueError(f"{name} is missing: with scales={codec.scales!r} it must be given, float32 {list(shape)}")
        is_known = not isinstance(given, jax.Array)
        if is_known and not all(np.isfinite(x) and x > 0 for x in np.asarray(given, np.float32).ravel()):
            raise ValueError(f"{name}={given} must be finite and above 0: tokens are stored as x / {name}")
        array = jnp.asarray(given, jnp.float32)
        if array.shape not in (shape, (*lead, *shape)):
            raise ValueError(f"{name} has shape {array.shape}, but must have shape {(*lead, *shape)} or {shape}")
        return jnp.broadcast_to(array, (*lead, *shape)) * jnp.float32(1)  # a buffer of its own, which can be donated

    if is_latent and tokens.get("value_scale") is not None:
        raise ValueError("value_scale is given, but the cache has latent content, which has no values of its own")
    return Store(
        key=array(layout.width),
        value=array(layout.value_head_dim) if layout.content == "separate" else None,
        key_scale=scales("key_scale", tokens.get("key_scale")),
        value_scale=None if is_latent else scales("value_scale", tokens.get("value_scale")),
        layout=layout,
    )
