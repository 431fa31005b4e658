"""KiviCache: 4-bit keys with scales by channel and group of tokens, 4-bit values with scales by token, as in KIVI."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from attnops.exported import serialised
from attnops.operations.flash.forward import KeyValue
from attnops_caches.base import Cache, Contents
from attnops_caches.bits import bits_dtype, from_bits, to_bits
from attnops_caches.calls.request import CacheRequest
from attnops_caches.codec import LARGEST, Quantized
from attnops_caches.dense import rows_to_take
from attnops_caches.integers import check_size
from attnops_caches.layout import TokenOptions, layout_of
from attnops_caches.placement import PLACEMENT
from attnops_caches.store import Pieces, Store, create_store
from attnops_caches.stored import create_rows
from attnops_caches.tiles import StoreLoader, TileAt, TileLoader, indices

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import DType, Index

# Scales by tensor are used as they are: those of keys broadcast to them.
_CODEC: Final = Quantized("int4", "tensor")
_OPTIONS: Final = ("kv_heads", "head_dim", "value_head_dim", "dtype")


@serialised(placement=PLACEMENT)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviCache(Cache):
    """A row of S slots for each sequence, in 4 bits as in KIVI (arXiv:2402.02750). See `Cache`.

    A few channels of keys are much larger than the others, which lose all detail where a token has one scale. Here
    each channel has a scale for every G tokens, a *group*, computed once the group is complete; values have scales by
    token and head, as in `Quantized`. The newest R keys of a row are read as they were appended.

    The error of an element of an older key is at most half a step, ``(max - min) / 28`` of its channel in its group,
    left padding left out; that of a value is ``max|x| / 14`` of its token's head. What is read is computed in float32,
    and rounded to the cache's dtype. A channel whose step would be below ``2 ** -126`` is read as its middle, which a
    CPU may take for 0 below ``2 ** -125``. NaN or infinity in a key makes its channel NaN in the older keys of its
    group and kv head.

    Queries see the cache after an append: of a prompt that is longer than R, also its own older keys in 4 bits.

    A key is quantised once; but where `truncate` leaves a row more than ``R - G + 1`` tokens shorter than it has ever
    been, the keys of its last group may be those that were read, and are quantised again: their errors add up.

    Attributes:
        codes: keys less their middle, in steps of their scale: int8 [B, K, S, D / 2], features i and i + D / 2 in one.
        scales: of each group and channel, float32 [B, K, S / G, D].
        middles: the mean of the least and the greatest key, likewise.
        recent: the newest keys, the token of index i in slot i mod R: [B, K, R, D], narrow floats as bits.
        values: the values, as tokens of latent content.
        group: G.
    """

    codes: jax.Array
    scales: jax.Array
    middles: jax.Array
    recent: jax.Array
    values: Store
    group: int = dataclasses.field(metadata={"static": True})

    storage: ClassVar[str] = "KiviCache"

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        length: int,
        group: int = 32,
        recent: int | None = None,
        starts: ArrayLike | None = None,
        **tokens: Unpack[TokenOptions],
    ) -> KiviCache:
        """An empty cache.

        Args:
            batch: B, the rows.
            length: S, the slots of a row, a multiple of ``group``.
            group: G, the tokens that share the scales of their keys.
            recent: R, how many of the newest keys are kept as they are, G at least; None for 2 · G.
            starts: how many tokens of left padding each row begins with, integers [B]; None for none.
            **tokens: kv_heads, head_dim, value_head_dim and dtype of `TokenOptions`; head dims must be even.

        Memory: B · K · (S · (D / 2 + 8 · D / G + Dv / 2 + 4) + R · D · bytes of the dtype) bytes.

        Raises:
            TypeError: a size that is not an int; an option that there is not, or one that is missing.
            ValueError: a size below 1, or one that does not fit as above; another dtype; another option of
                `TokenOptions`, such as a layer axis; starts that are known to be negative.
        """
        B, S, G = (check_size(x, n) for x, n in (("batch", batch), ("length", length), ("group", group)))
        R = 2 * G if recent is None else check_size("recent", recent)
        layout, K, _ = layout_of({**tokens, "codec": _CODEC})
        for name, given in tokens.items():
            if given is not None and name not in _OPTIONS:
                raise ValueError(f"{name}={given} is given, but a KiviCache has {list(_OPTIONS)} only; leave it out")
        if S % G:
            raise ValueError(f"length={S} must be a multiple of group={G}, such as {-(-S // G) * G}")
        if R < G:
            raise ValueError(f"recent={R} must be at least group={G}, whose keys are kept until it is complete")
        D, Dv = layout.head_dim, layout.value_head_dim
        return cls(
            **create_rows(B, starts),
            codes=jnp.zeros((B, K, S, D // 2), jnp.int8),
            scales=jnp.zeros((B, K, S // G, D), jnp.float32),
            middles=jnp.zeros((B, K, S // G, D), jnp.float32),
            recent=jnp.zeros((B, K, R, D), bits_dtype(layout.dtype)),
            values=create_store(B, S, kv_heads=K, head_dim=Dv, latent=Dv, dtype=layout.dtype, codec=Quantized("int4")),
            group=G,
        )

    def describe(self) -> CacheRequest:
        return dataclasses.replace(super().describe(), codec=_CODEC.dtype, scales="channel")

    @property
    def length(self) -> int:
        return self.codes.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    @property
    def head_dim(self) -> int:
        return self.recent.shape[3]

    @property
    def value_head_dim(self) -> int:
        return self.values.layout.value_head_dim

    @property
    def dtype(self) -> DType:
        return self.values.layout.dtype

    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        slot, run = self.lengths[rows], jnp.arange(rows.shape[0], dtype=jnp.int32)
        fit = jnp.clip(self.length - slot, 0, count)
        return Pieces(run, jnp.zeros_like(run), fit, rows, slot), fit

    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces, sparse: bool) -> Self:
        assert value is not None
        G, R, T, new = self.group, self.recent.shape[2], key.shape[1], to_bits(key)
        values = self.values.write(self.values.encoded(value, None), pieces, sparse=sparse)
        # A row completes this many groups at most. The loop has an iteration for each that is complete.
        most = (T + G - 1) // G
        group = pieces.slot[:, None] // G + jnp.arange(most, dtype=jnp.int32)  # [N, most]
        is_complete = ((group + 1) * G <= (pieces.slot + pieces.size)[:, None]).reshape(-1)
        order = jnp.argsort(~is_complete, stable=True)

        def quantise(i: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row, first, _, block, slot = (x[order[i] // most] for x in pieces)
            number = group.reshape(-1)[order[i]]
            index = number * G + jnp.arange(G, dtype=jnp.int32)
            given, kept = new[row, jnp.clip(first + index - slot, 0, T - 1)], self.recent[block, :, index % R]
            keys = from_bits(jnp.where((index < slot)[:, None, None], kept, given), self.dtype)
            coded = _encode(keys.swapaxes(0, 1), (index >= self.starts[block])[:, None])
            at = (indices(block, 0, start, 0) for start in (number * G, number, number))
            return tuple(map(lax.dynamic_update_slice, arrays, (x[None] for x in coded), at))

        groups = self.codes, self.scales, self.middles
        codes, scales, middles = lax.fori_loop(jnp.int32(0), is_complete.sum(dtype=jnp.int32), quantise, groups)
        token = pieces.size[:, None] - 1 - jnp.arange(min(T, R), dtype=jnp.int32)  # the newest of each row
        slot = jnp.where(token >= 0, (pieces.slot[:, None] + token) % R, R)  # out of range: dropped
        newest = new[pieces.row[:, None], jnp.clip(pieces.first[:, None] + token, 0, T - 1)]
        recent = self.recent.at[pieces.block[:, None], :, slot].set(newest, mode="drop")
        arrays: Any = {"codes": codes, "scales": scales, "middles": middles, "recent": recent, "values": values}
        return dataclasses.replace(self, **arrays)

    def read(self) -> Contents:
        keys = jnp.concatenate(self._halves(self.lengths[:, None, None], 0), axis=-1)
        values = self.values.decoded(self.values._blocks())[0].astype(self.dtype)
        return Contents(keys.swapaxes(1, 2), values.swapaxes(1, 2), *self.positions())

    def _halves(self, lengths: jax.Array, first: Index) -> list[jax.Array]:
        """The halves of the features of keys, [..., n, D / 2], of rows of such ``lengths``, from slot ``first`` on.

        The arrays may be tiles [..., n, D / 2] and [..., n / G, D]; ``recent`` has all its slots.
        """
        index, R = first + jnp.arange(self.codes.shape[-2], dtype=jnp.int32), self.recent.shape[-2]
        newest = jnp.take(from_bits(self.recent, self.dtype), index % R, axis=-2)
        steps = (jnp.split(jnp.repeat(x, self.group, axis=-2), 2, axis=-1) for x in (self.scales, self.middles))
        halves = zip(_CODEC.parts(self.codes), *steps, jnp.split(newest, 2, axis=-1), strict=True)
        is_new = (index >= lengths - R)[..., None]
        return [
            jnp.where(is_new, key, (code.astype(jnp.float32) * scale + middle).astype(key.dtype))
            for code, scale, middle, key in halves
        ]

    def loader(self) -> TileLoader:
        return KiviLoader(self)

    def truncate(self, lengths: ArrayLike) -> Self:
        """See `Cache.truncate`; keys that were replaced in ``recent`` by those taken back are there again, as read."""
        cache = super().truncate(lengths)
        slot = jnp.arange(self.recent.shape[2], dtype=jnp.int32)
        # The index of the token in each slot of `recent`, [B, R]; below 0 where there is none.
        had, wanted = (x[:, None] - 1 - (x[:, None] - 1 - slot) % slot.size for x in (self.lengths, cache.lengths))
        row, index = jnp.arange(self.batch, dtype=jnp.int32)[:, None], jnp.clip(wanted, 0, self.length - 1)
        scales, middles = (x[row, :, index // self.group] for x in (self.scales, self.middles))
        lost = to_bits((_CODEC.decode(self.codes[row, :, index], scales) + middles).astype(self.dtype))
        is_lost = ((wanted != had) & (wanted >= 0))[:, None, :, None]
        return dataclasses.replace(cache, recent=jnp.where(is_lost, lost.swapaxes(1, 2), self.recent))

    def take_rows(self, rows: ArrayLike) -> Self:
        """See `DenseCache.take_rows`."""
        given = rows_to_take(rows, self.batch)
        exists, index = (given >= 0) & (given < self.batch), jnp.clip(given, 0, self.batch - 1)
        taken = jax.tree.map(lambda x: jnp.take(x, index, axis=0), self).reset(~exists)
        return dataclasses.replace(taken, overflowed=taken.overflowed | ~exists)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviLoader(TileLoader):
    """Loads tiles of whole groups of a `KiviCache`."""

    cache: KiviCache

    @property
    def slots(self) -> int:
        return self.cache.length

    @property
    def unit(self) -> int:
        return self.cache.group

    @property
    def itemsize(self) -> int:
        return self.cache.codes.dtype.itemsize

    def load(self, at: TileAt) -> KeyValue:
        cache, first, n = self.cache, at.slot // self.unit, at.size // self.unit

        def tile(x: jax.Array, start: Index, size: int) -> jax.Array:
            return lax.dynamic_slice(x, indices(at.row, at.head, start, 0), (1, at.heads, size, x.shape[3]))[0]

        tiles: Any = {name: tile(getattr(cache, name), first, n) for name in ("scales", "middles")}
        tiles |= {"codes": tile(cache.codes, at.slot, at.size), "recent": tile(cache.recent, 0, cache.recent.shape[2])}
        keys = dataclasses.replace(cache, **tiles)._halves(cache.lengths[at.row], at.slot)
        values = StoreLoader(cache.values, None).load(at)
        return KeyValue(tuple(x.astype(at.dtype) for x in keys), values.key, None, values.key_scale)


def _encode(keys: jax.Array, is_real: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, scales and middles of a group of keys [K, G, D]; ``is_real``, bool [G, 1]: no left padding."""
    keys, largest = keys.astype(jnp.float32), LARGEST[_CODEC.dtype]
    low = jnp.where(is_real, keys, jnp.inf).min(1, keepdims=True)
    high = jnp.where(is_real, keys, -jnp.inf).max(1, keepdims=True)
    middle, scale = jnp.where(is_real.any(), low / 2 + high / 2, 0.0), (high / 2 - low / 2) / largest
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale)  # as in `Quantized.encode`
    # Rounded up, the greatest numbers would be infinite.
    is_huge = jnp.abs(middle) + largest * scale > (1 - 1e-6) * float(jnp.finfo(jnp.float32).max)
    scale = jnp.where(is_huge, (1 - 1e-6) * scale, scale)
    return _CODEC.encode(jnp.where(is_real, keys - middle, 0.0), scale)[0], scale, middle
