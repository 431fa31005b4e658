"""Packed rows as batches of tiles: each tile has queries of one row of the cache.

Rows with many queries have large tiles, all others small ones, so that neither pays for the other. Only queries and
results are gathered; the cache stays where it is, and a tile is told its row.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from attnops.kernels import FlashCall
from attnops.masks import Mask
from attnops_caches import NewTokens, PagedCache, StoredCache
from attnops_caches.masks import Packed, PackedByRow
from attnops_tpu.caches.in_place import begin_of
from attnops_tpu.caches.tile_sizes import MAX_BY_TOKEN, SMALL_TILES, Heads, packed_queries_a_tile
from attnops_tpu.generations import generation

CacheType = TypeVar("CacheType", bound=StoredCache)


class Unpacked(NamedTuple):
    """Some rows of a call of packed rows as a call of a batch of tiles."""

    query: jax.Array  # the packed queries [N, H, D]
    call: FlashCall  # the call with queries [tiles, bq, H, D], and mask and bias for scores [tiles, H, bq, S]
    # the same call with row i of the cache in place of tile i's, so that its values by key are by row of the cache;
    # None if there are more rows than tiles.
    of_keys: FlashCall | None
    row: jax.Array  # the row of the cache of each tile, int32 [tiles]; any for tiles without queries
    exists: jax.Array  # whether a tile has queries, bool [tiles]
    tile: jax.Array  # the tile of each packed query, int32 [N]
    place: jax.Array  # the index of each packed query in its tile, int32 [N]
    is_real: jax.Array  # whether a packed query is in one of these tiles, bool [N]
    first: jax.Array  # the first packed query that is a tile's own, int32 [tiles]; N for tiles without queries
    size: jax.Array  # how many a tile has, int32 [tiles]


def unpacked(call: FlashCall, cache: StoredCache) -> list[Unpacked]:
    """A call of packed rows as calls of batches of tiles: of small ones, and of large ones if rows may have those."""
    mask, (_, N, H, _) = call.mask, call.query.shape
    assert isinstance(mask, (Packed, PackedByRow))
    heads = Heads.of(H, cache.kv_heads, (call.query.dtype, cache.dtype), cache.is_latent, call.metadata)
    small, large = packed_queries_a_tile(generation(), call.metadata.block_q, N, cache.batch, heads)
    is_real = mask.q_rows >= 0
    if large is None:
        return [_of_tiles(call, cache, small, tiles_of(N, cache.batch, small), is_real)]
    size = _counts(mask.q_rows, is_real, cache.batch)
    tiles = min(2 * -(-N // large), tiles_of(N, min(cache.batch, N // (SMALL_TILES * small + 1)), large))
    is_large = jnp.zeros((cache.batch,), bool)
    # A row with more queries than half of a large tile fills half of its tiles on average, so that its tiles exist.
    for most in (large // 2, large // 4, SMALL_TILES * small):
        more = size > most
        is_large = jnp.where(jnp.where(more, -(-size // large), 0).sum() <= tiles, more, is_large)
    of_large = is_real & is_large[mask.q_rows]
    # So a row has small tiles for at most half of a large one.
    of_small = min(tiles_of(N, cache.batch, small), cache.batch * -(-(large // 2) // small))
    return [
        _of_tiles(call, cache, small, of_small, is_real & ~of_large),
        _of_tiles(call, cache, large, tiles, of_large),
    ]


def _of_tiles(call: FlashCall, cache: StoredCache, bq: int, tiles: int, is_real: jax.Array) -> Unpacked:
    """The packed queries ``is_real``, all queries of some rows, in at most ``tiles`` tiles."""
    mask, (_, N, H, _) = call.mask, call.query.shape
    assert isinstance(mask, (Packed, PackedByRow))
    rows, number = jnp.where(is_real, mask.q_rows, -1), jnp.arange(N, dtype=jnp.int32)
    begins = is_real & (rows != jnp.concatenate([jnp.full((1,), -1, jnp.int32), rows[:-1]]))
    is_first = is_real & ((number - jax.lax.cummax(jnp.where(begins, number, 0))) % bq == 0)
    tile = jnp.maximum(jnp.cumsum(is_first, dtype=jnp.int32) - 1, 0)
    first = _firsts(is_first, tiles)
    exists = first < N
    count = _counts(tile, is_real, tiles)
    begin, last = begin_of(first, N, bq), first + jnp.maximum(count, 1) - 1
    # A tile's own queries are repeated to its ends: so a tile of keys that all of them see needs no mask.
    queries = jnp.clip(begin[:, None] + jnp.arange(bq, dtype=jnp.int32), first[:, None], last[:, None])
    queries = jnp.minimum(queries, N - 1)
    row = jnp.where(exists, rows[jnp.minimum(first, N - 1)], 0)

    def with_rows(row: jax.Array) -> FlashCall:
        slots = cache.slots().of_rows(row)
        return call.replace(
            query=call.query[0][queries],
            mask=mask.of_tiles(queries, exists, row, slots).bind(tiles, H, bq, cache.length),
            bias=None if call.bias is None else call.bias.of_tiles(queries, slots),
        )

    of_keys = None
    if tiles >= cache.batch:
        of_keys = with_rows(jnp.minimum(jnp.arange(tiles, dtype=jnp.int32), cache.batch - 1))
    place = number - begin[tile]
    return Unpacked(call.query[0], with_rows(row), of_keys, row, exists, tile, place, is_real, first, count)


def written_before(cache: CacheType, new: NewTokens, rows: jax.Array) -> CacheType:
    """The cache with the new tokens of some rows, bool [B]."""
    assert new.given is not None
    return cache.with_tokens(new.given._replace(size=jnp.where(rows, new.size, 0)))


def new_of_tiles(
    batch: Unpacked, cache: CacheType, new: NewTokens
) -> tuple[CacheType, NewTokens, NewTokens | None]:  # fmt: skip
    """The new tokens that the kernel writes: those that a batch of small tiles has, and all others.

    The first are of rows whose queries fit one small tile, in whose keys they are merged; of several tiles, each would
    need the new tokens of the others. A row with more new tokens than a tile has queries is among the others too, since
    left padding has no queries. Two cores don't wait for each other: for them, the cache that is returned has the other
    tokens, which are None.
    """
    assert new.starts is not None
    bq, N = batch.call.query.shape[1], batch.tile.shape[0]
    is_one = (_counts(batch.row, batch.exists, cache.batch) == 1) & (new.size <= bq)
    others: NewTokens | None = new._replace(size=jnp.where(is_one, 0, new.size))
    if generation().cores > 1:
        cache, others = written_before(cache, new, ~is_one), None
    size = jnp.where(batch.exists & is_one[batch.row], new.size[batch.row], 0)
    starts, tokens = new.starts, new.tokens
    if bq > MAX_BY_TOKEN:
        token = jnp.minimum(starts[batch.row][:, None] + jnp.arange(bq, dtype=jnp.int32), N - 1)
        tokens = {name: x[0][:, token].swapaxes(0, 1) for name, x in tokens.items()}
    elif cache.batch * bq < N:
        # The first of each row. Of tokens as they were given: as they are stored, tokens are not the first axis, and
        # XLA would copy all to another layout.
        assert new.given is not None
        token = jnp.minimum(starts[:, None] + jnp.arange(bq, dtype=jnp.int32), N - 1).reshape(-1)
        starts = jnp.arange(cache.batch, dtype=jnp.int32) * bq
        key, value = new.given.key, new.given.value
        tokens = cache.store.encoded(key[:, token], None if value is None else value[:, token])
    # The blocks that a tile's tokens may lie in, among those that any row's might.
    most = (bq - 1) // cache.page_size + 1 + (bq > 1) if isinstance(cache, PagedCache) else 1
    blocks, begin = new.blocks[batch.row, :most], None if bq > MAX_BY_TOKEN else starts[batch.row]
    return cache, NewTokens(tokens, new.first[batch.row], size, blocks, begin), others


# By comparing all with all: a scatter is a step for each number, or a call of another core, on TPUs.
def _counts(numbers: jax.Array, counted: jax.Array, n: int) -> jax.Array:
    """How many ``counted`` [N] of some numbers [N] are 0, 1, …, n − 1, int32 [n]."""
    return (counted & (numbers == jnp.arange(n, dtype=jnp.int32)[:, None])).sum(1, dtype=jnp.int32)


def _firsts(x: jax.Array, n: int) -> jax.Array:
    """The indices of the first n that are true of booleans [N], and N for more than there are, int32 [n]."""
    before = jnp.cumsum(x, dtype=jnp.int32)
    return (before <= jnp.arange(n, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)


def has_packed(mask: Mask | None) -> bool:
    """Whether a call's queries are packed rows, by its mask."""
    return isinstance(mask, (Packed, PackedByRow))


def tiles_of(N: int, rows: int, bq: int) -> int:
    """The most tiles that N packed queries of so many rows may have."""
    return (N + min(rows, N) * (bq - 1)) // bq


def packed(batch: Unpacked, x: jax.Array, otherwise: float) -> jax.Array:
    """Results of tiles [tiles, bq, …] as those of packed rows [1, N, …]; a number for all others."""
    is_real = batch.is_real.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(is_real, x[batch.tile, batch.place], jnp.asarray(otherwise, x.dtype))[None]
