"""Packed rows as a batch of tiles: each has queries of one row of the cache, and the next row begins a new tile.

Only queries and results are gathered; the cache stays where it is, and a tile is told its row.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from attnops.kernels import FlashCall
from attnops.masks import Mask
from attnops_caches import NewTokens, PagedCache, StoredCache
from attnops_caches.masks import Packed, PackedByRow
from attnops_tpu.caches.tile_sizes import packed_queries_a_tile

CacheType = TypeVar("CacheType", bound=StoredCache)


class Unpacked(NamedTuple):
    """A call of packed rows as one of a batch of tiles.

    Attributes:
        call: of queries [tiles, bq, H, D], with the mask and the bias of [tiles, H, bq, S].
        of_keys: a call of as many tiles of which tile i is of row i of the cache, as far as there are rows: what it has
            by key is that of the row; None where there are more rows than tiles.
        row: of the cache, of each tile, int32 [tiles]; any of tiles without queries.
        exists: whether a tile has queries, bool [tiles].
        tile: of each packed query, int32 [N].
        place: in its tile, int32 [N].
        is_real: whether it is no padding, bool [N].
    """

    call: FlashCall
    of_keys: FlashCall | None
    row: jax.Array
    exists: jax.Array
    tile: jax.Array
    place: jax.Array
    is_real: jax.Array


def unpacked(call: FlashCall, cache: StoredCache) -> Unpacked:
    """A call of packed rows as one of a batch of tiles, see `has_packed`."""
    mask, (_, N, H, _) = call.mask, call.query.shape
    assert isinstance(mask, (Packed, PackedByRow))
    G = H // cache.kv_heads
    bq = packed_queries_a_tile(call.metadata.block_q, N, cache.batch, G)
    rows, number = mask.q_rows, jnp.arange(N, dtype=jnp.int32)
    is_real = rows >= 0
    begins = is_real & (rows != jnp.concatenate([jnp.full((1,), -1, jnp.int32), rows[:-1]]))
    place = (number - jax.lax.cummax(jnp.where(begins, number, 0))) % bq
    is_first = is_real & (place == 0)
    tile = jnp.maximum(jnp.cumsum(is_first.astype(jnp.int32)) - 1, 0)
    tiles = tiles_of(N, cache.batch, bq)
    first = jnp.nonzero(is_first, size=tiles, fill_value=N)[0].astype(jnp.int32)
    exists = first < N
    count = jnp.zeros((tiles,), jnp.int32).at[tile].add(is_real.astype(jnp.int32))
    # Beyond a tile's queries its last one again: what sees all keys of a tile needs no mask there.
    within = jnp.minimum(jnp.arange(bq, dtype=jnp.int32), jnp.maximum(count, 1)[:, None] - 1)
    queries = jnp.minimum(first[:, None] + within, N - 1)
    row = jnp.where(exists, rows[jnp.minimum(first, N - 1)], 0)

    def of(row: jax.Array) -> FlashCall:
        slots = cache.slots().of_rows(row)
        return call.replace(
            query=call.query[0][queries],
            mask=mask.of_tiles(queries, exists, row, slots).bind(tiles, H, bq, cache.length),
            bias=None if call.bias is None else call.bias.of_tiles(queries, slots),
        )

    of_keys = of(jnp.minimum(jnp.arange(tiles, dtype=jnp.int32), cache.batch - 1)) if tiles >= cache.batch else None
    return Unpacked(of(row), of_keys, row, exists, tile, place, is_real)


def new_of_tiles(of: Unpacked, cache: CacheType, new: NewTokens) -> tuple[CacheType, NewTokens]:
    """The new tokens that the kernel writes, as those of a batch of tiles, and the cache with the others.

    The kernel writes those of a row of one tile, such as a single token. A tile of a row of several would need the new
    tokens of the others: those of a prompt are written before, which takes little of the time that its scores do. So
    are those of a row that has more of them than a tile has queries, since the queries of left padding are in none.
    """
    assert new.starts is not None
    bq, N = of.call.query.shape[1], of.tile.shape[0]
    tiles = jnp.zeros((cache.batch,), jnp.int32).at[of.row].add(of.exists.astype(jnp.int32))
    is_one = (tiles == 1) & (new.size <= bq)
    cache = cache.write_new(new, ~is_one)
    size = jnp.where(of.exists & is_one[of.row], new.size[of.row], 0)
    token = jnp.minimum(new.starts[of.row][:, None] + jnp.arange(bq, dtype=jnp.int32), N - 1)
    tokens = {name: x[0][:, token].swapaxes(0, 1) for name, x in new.tokens.items()}
    # Of the blocks that the tokens of all rows might take, those that a tile's may.
    most = (bq - 1) // cache.page_size + 1 + (bq > 1) if isinstance(cache, PagedCache) else 1
    return cache, NewTokens(tokens, new.first[of.row], size, new.blocks[of.row, :most])


def has_packed(mask: Mask | None) -> bool:
    """Whether a call's queries are packed rows, by its mask."""
    return isinstance(mask, (Packed, PackedByRow))


def tiles_of(N: int, rows: int, bq: int) -> int:
    """The most tiles that N packed queries of so many rows may have."""
    return (N + min(rows, N) * (bq - 1)) // bq


def packed(of: Unpacked, out: jax.Array, lse: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Results of tiles, [tiles, bq, H, Dv] and [tiles, H, bq], as those of packed rows: 0 and −inf for padding."""
    out = jnp.where(of.is_real[:, None, None], out[of.tile, of.place], jnp.zeros((), out.dtype))[None]
    if lse is not None:
        lse = jnp.where(of.is_real[:, None], lse[of.tile, :, of.place], -jnp.inf).T[None]
    return out, lse
