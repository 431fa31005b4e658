"""Flash attention over a cache, in place: tiles are loaded from its blocks and dequantised one at a time.

The scores are those of `attnops_caches.scores`, by slot; only tiles that hold a key that some query sees are loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final, Unpack

import jax

from attnops.errors import Reason
from attnops.kernels.flash import FlashCall
from attnops.masks.at import At
from attnops.masks.base import Mask
from attnops.masks.positions import SlidingWindow
from attnops.operations.flash import FlashAttention
from attnops.operations.flash.backend import NativeFlash, call_once
from attnops.operations.flash.forward import LoadKeyValue, forward
from attnops.operations.flash.operands import NativeArrays
from attnops.operations.flash.plan import Index, NativePlan, quotient_and_remainder
from attnops.operations.flash.tile_schedule import NativeTileSchedule
from attnops.operations.flash.tile_sizes import NativeTileSizes, choose_tiles
from attnops.output import OperationOutput
from attnops_caches.calls.reader import READERS, CacheLimits, CacheOptions, CacheReader, cache_of
from attnops_caches.codec import LARGEST
from attnops_caches.flash import cascade, whole
from attnops_caches.masks.chosen import block_size, least
from attnops_caches.masks.packed import by_query
from attnops_caches.masks.slots import AtSlots
from attnops_caches.tiles import StoreLoader, TileAt, TileLoader

if TYPE_CHECKING:
    from attnops.dispatch.request import AttentionRequest
    from attnops_caches.base import Cache

# Up to so many queries, keys take longer to read than to multiply with, and the tiles are these.
_FEW: Final = 16
# Queries per tile of packed rows, counting each head of a kv head's: a tile reads the keys of every row that it has
# queries of, so that most scores of a large tile are masked. 240 queries of one row and 15 of others, 1,024 keys each,
# H 9, K 3: 42 ms with 128 queries per tile, 15 ms with 16; 256 queries of one row: 4.2 and 6.7 ms.
_PACKED: Final = 48
# Keys per tile: smaller tiles need more steps, whose cost is fixed; larger ones read more keys that no query sees. With
# a window, a quarter of it, since on average half a tile at either end is not seen; but `_LEAST_KEYS` at least.
_KEYS: Final = 512
_LEAST_KEYS: Final = 128
# From so many features (K · D) on, tokens of narrow dtypes have tiles of more keys, and the bytes of float32's. One
# query with 512 and 2,048 keys per tile, B 8, S 4,096: with H 32, K 8, D 128 10.5 and 8.8 ms in bfloat16, 9.6 and 7.0
# in int8; with H 9, K 3, D 64 1.7 and 2.2 in bfloat16, 0.8 and 1.4 in int8.
_WIDE_TOKEN: Final = 1024


@dataclasses.dataclass(frozen=True)
class CachedFlash(NativeFlash):
    """The native backend with tiles that fit a cache; static.

    Attributes:
        slots, itemsize, unit: those of the `TileLoader`.
        is_packed: whether the tiles of all rows follow one another.
    """

    slots: int
    itemsize: int
    unit: int
    is_packed: bool

    def tiles(self, call: FlashCall, row: NativeTileSizes) -> tuple[int, int]:
        T, groups, given = call.query.shape[1], call.query.shape[2] // call.key.shape[2], call.metadata.block_k
        block_q, block_k = choose_tiles(T, self.slots, groups, call.metadata.block_q, given, row)
        if self.is_packed and not call.metadata.block_q:
            block_q = min(block_q, max(_PACKED // groups // 16, 1) * 16)
        if T <= _FEW and not given:
            window = least(call.mask, _window)
            block_k = _KEYS if window is None else max(_LEAST_KEYS, min(_KEYS, window // 4))
            if window is None and call.key.shape[2] * call.key.shape[3] >= _WIDE_TOKEN:
                # At most a quarter of a row's slots, since half the last tile is not seen.
                block_k = max(_KEYS, min(_KEYS * 4 // self.itemsize, self.slots // 4))
        if not given and (chosen := least(call.mask, block_size)):
            block_k = min(block_k, chosen)
        # A multiple of ``unit`` that, if packed, divides a row.
        most, units = max(1, min(block_k, self.slots) // self.unit), self.slots // self.unit
        return block_q, self.unit * max(n for n in range(1, most + 1) if not self.is_packed or units % n == 0)


def _window(mask: Mask) -> int | None:
    """The keys of a window that is known when tracing; None for another mask."""
    if isinstance(mask, (At, AtSlots)):
        return _window(mask.mask)
    if isinstance(mask, SlidingWindow) and isinstance(mask.left, int):
        return mask.left + 1 + (mask.right if isinstance(mask.right, int) else 0)
    return None


def cached_attention(call: FlashCall, loader: TileLoader, is_packed: bool) -> whole.Results:
    """The output [B, T, H, Dv]; the logsumexp, its rounding error and, if asked for, the largest scores, [B, H, T].

    The call is for scores by slot; its key and value have shape and dtype only.
    """
    backend = CachedFlash(loader.slots, loader.itemsize, loader.unit, is_packed)
    plan = dataclasses.replace(backend.plan(call), overlaps=True)
    given = call.query, loader, backend.arrays(plan, call), backend.schedule(plan, call)[0]
    if plan.scoring.holds_function:
        return call_once(functools.partial(_forward, plan, backend), given)  # type: ignore[no-any-return]
    return _compiled(plan, backend, *given)


def _forward(
    plan: NativePlan,
    backend: CachedFlash,
    query: jax.Array,
    loader: TileLoader,
    arrays: NativeArrays,
    schedule: NativeTileSchedule,
) -> whole.Results:
    def load(plan: NativePlan, loader: TileLoader) -> LoadKeyValue:
        return lambda group, kv_tile: loader.load(_tile_at(plan, backend, group, kv_tile))

    def in_tiles() -> whole.Results:
        return forward(plan, query, load(plan, loader), arrays, schedule, of_rows=backend.is_packed)

    if not backend.is_packed and isinstance(loader, StoreLoader):
        if cascade.serves(plan, loader, arrays.mask):
            return cascade.attend_or(plan, query, loader, arrays, load, in_tiles)
        if whole.serves(plan, loader):
            return whole.attend_or(plan, query, loader.store, arrays, schedule, in_tiles)
    return in_tiles()


def _tile_at(plan: NativePlan, backend: CachedFlash, group: Index, kv_tile: Index) -> TileAt:
    row, head = quotient_and_remainder(group * plan.problems_per_tile, plan.K)
    slot = plan.first_key(kv_tile)
    if backend.is_packed:
        row, slot = slot // backend.slots, slot % backend.slots
    return TileAt(row, head, slot, plan.problems_per_tile, plan.bk, plan.dtype)


# Compiled once for equal plans, also where the caller does not compile.
_compiled = jax.jit(_forward, static_argnums=(0, 1))


class NativeFlashReader(CacheReader):
    """Reads tiles of any cache that has a loader, see `attnops_caches.Cache.loader`."""

    limits: ClassVar[CacheLimits] = CacheLimits(storages=None, codecs=frozenset(LARGEST), latent=True, packed=True)

    def unsupported(self, operation: FlashAttention, request: AttentionRequest) -> Iterable[Reason]:
        if not cache_of(request).has_loader:
            yield Reason("cache", cache_of(request).storage, "has no loader of tiles", "define its loader()")

    def not_shared(self, request: AttentionRequest) -> Iterable[Reason]:
        if cache_of(request).is_packed:
            return [Reason("rows", "given", "packed rows attend by themselves")]
        return cascade.reasons(request.batch, request.query_length, request.key_length)

    def attend(
        self, operation: FlashAttention, query: jax.Array, cache: Cache, *, return_max_logits: bool = False,
        **options: Unpack[CacheOptions],
    ) -> OperationOutput:  # fmt: skip
        """See `CacheReader.attend`."""
        is_packed = query.shape[0] == 1 and cache.batch > 1
        rows = (1, cache.batch * cache.length) if is_packed else (cache.batch, cache.length)
        key, value = (jax.ShapeDtypeStruct((*rows, cache.kv_heads, d), query.dtype) for d in
                      (cache.head_dim, cache.value_head_dim))  # fmt: skip
        options["mask"] = by_query(options["mask"], (key.shape[0], query.shape[2], query.shape[1], key.shape[1]))
        call = FlashCall.of(operation.metadata, query, key, value, options).replace(max_logits=return_max_logits)
        loader = cache.loader()
        assert loader is not None
        out, lse, _, *highest = cached_attention(call, loader, is_packed)
        return OperationOutput(out, None, lse if options.get("return_lse") else None, *highest)


READERS[FlashAttention] = {"native": NativeFlashReader()}
