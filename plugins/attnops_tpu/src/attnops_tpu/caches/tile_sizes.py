"""Tile sizes of calls over caches: one table by generation, and what fits vector memory."""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple

from attnops_tpu.generations import Generation

LANES: Final = 128
# Entries of a row's table that are in scalar memory at a time: 512 bytes, the least that a transfer moves.
PIECE: Final = 128
# What items in scalar memory take, and rows with up to 16 values of masks and biases; of scalar memory's 1 MiB the
# table and what the compiler keeps are left out.
MAX_ITEMS: Final = 1 << 14
ITEM_BYTES: Final = 28
ROW_BYTES: Final = 64
SCALAR_BYTES: Final = 960 << 10
# Bytes of a row's new tokens, of which vector memory has those of two rows.
MAX_NEW: Final = 8 << 20
# A unit of a storage without pages, and the most units per tile: each has transfers of its own.
_UNIT: Final = 128
_MAX_UNITS: Final = 512
# Bytes of units that are so small that a tile of twice the bytes is better: what it takes around its starts is shared.
_SMALL_UNIT: Final = 8192
# Bytes of the part of a masked tile that is computed at a time: a row has one such tile, of which few keys may be seen.
_MASKED: Final = 2 << 20
# Rows of a tile of scores: more need more vector memory, fewer read keys more often.
_ROWS: Final = 256
# The same of packed rows, of which some have one query each, whose tile is as large as that of a prompt.
_PACKED_ROWS: Final = 128
# Scores of a part of a tile, which are in registers between two products: 16 registers of 64.
_PART: Final = 16384
# But of up to 128 rows so many keys at least, although scores are spilled: products over fewer fill less of the matrix
# unit. 1,024 keys of 576 features for 128 rows take with parts of 128, 256, 512 keys 1,803, 1,519, 1,414 bundles, and
# in tiles of 4,096 with parts of 512, 1,024, 2,048 keys 1,000, 935, 1,000.
_LEAST_PART: Final = 1024
# From so many rows on the matrix unit is what a tile takes, and what a tile waits for at its ends should be little of
# it: some 350 bundles of a latent's, which has 1,400 for 1,024 keys alone, 935 in tiles of 4,096, and 857 of 8,192.
_MANY_ROWS: Final = 64
# The parts of such a tile, all kv heads, which are straight-line code; and its share of vector memory.
_PARTS: Final = 8
_SHARE: Final = 6
# Scores of a tile and kv head: more are spilled from registers.
_SCORES: Final = 1 << 17


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        tile: bytes of a tile of keys and values, all heads: enough that what is on its way covers the latency of main
            memory, that the steps of one kv head fill the latencies of another's, and that the loop's own bundles and
            the latencies at a tile's ends, some 150 in all, are few.
        buffers: tiles of keys in vector memory.
        start: how many starts one counts as in `choose` where features have 1 byte. On tpu7x vector memory has other
            tiles for these than main memory, and a start takes 9 bundles where a token is wider than the lanes,
            elsewhere 4.
    """

    tile: int
    buffers: int
    start: int = 1


class Starts(enum.Enum):
    """When the transfers of a tile start, in the step of the tile that is two before it.

    Attributes:
        BEFORE: before the wait for that tile, so that they are on their way longest.
        BETWEEN: some after each of its reads. Where many start together nothing else happens meanwhile: one kv head's
            pages of 16 tokens would take longer to ask for than to compute with.
        AFTER: after its reads, while the last products of a tile that the matrix unit bounds are on their way. On
            v6e 32 queries per row of 8 kv heads in pages of 16 would take 7 % longer with starts before it.
    """

    BEFORE = enum.auto()
    BETWEEN = enum.auto()
    AFTER = enum.auto()


_MiB: Final = 1 << 20
TABLE: Final = {
    "v4": Row(2 * _MiB, 2),
    "v5e": Row(2 * _MiB, 3),
    "v5p": Row(2 * _MiB, 3),
    "v6e": Row(2 * _MiB, 3),
    "tpu7x": Row(4 * _MiB, 3, start=9),
}


class Tiles(NamedTuple):
    """See `attnops_tpu.caches.plan.Plan`."""

    bq: int
    bk: int
    part: int
    masked_part: int
    unit: int
    piece: int
    buffers: int
    starts: Starts


def unit_of(page_size: int, slots: int) -> int:
    """Slots per unit: a page, or what divides the slots of a row."""
    return page_size or math.gcd(_UNIT, slots)


def queries_a_tile(block_q: int | None, T: int, G: int) -> int:
    """Queries per tile.

    Args:
        block_q: the metadata's; None for the table's.
        T: queries per row.
        G: query heads per kv head.
    """
    return min(T, block_q or max(_ROWS // G // 8, 1) * 8)


def packed_queries_a_tile(block_q: int | None, N: int, rows: int, G: int) -> int:
    """Queries per tile of packed rows: as many as a row has on average, since tiles have queries of one row.

    Args:
        block_q: the metadata's; None for the table's.
        N: packed queries.
        rows: of the cache.
        G: query heads per kv head.
    """
    most = max(_PACKED_ROWS // G // 8, 1) * 8
    return min(N, block_q or min(-(-N // (8 * rows)) * 8, most))


def reads_a_tile(K: int, bk: int) -> int:
    """Reads of keys and of values of a tile, 128 tokens of a kv head each."""
    return 2 * K * -(-bk // LANES)


def choose(
    generation: Generation,
    block_q: int | None,
    block_k: int | None,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    token_bytes: int,
    itemsize: int,
    unit: int,
    interpret: bool,
) -> Tiles:
    """The tiles of a call.

    Args:
        generation: that is compiled for.
        block_q: the metadata's; None for the table's.
        block_k: the metadata's; None for the table's.
        lengths: T, and S of a row.
        heads: H and K.
        token_bytes: of the keys and values of a token, all heads, as vector memory holds them.
        itemsize: bytes of a feature.
        unit: see `unit_of`.
        interpret: whether tiles need not fill the lanes.
    """
    (T, S), (H, K), row = lengths, heads, TABLE[generation.name]
    G = H // K
    bq = queries_a_tile(block_q, T, G)
    step = unit if interpret else math.lcm(unit, LANES)
    rows = -(-G * bq // 8) * 8
    part = max(_PART // rows // LANES * LANES, _LEAST_PART if rows <= LANES else LANES)
    tile = 2 * row.tile if row.buffers > 2 and unit * token_bytes <= _SMALL_UNIT else row.tile
    most = min(tile // token_bytes, _SCORES // (G * bq))
    is_long = _MANY_ROWS <= rows <= LANES
    if is_long:
        most = max(most, min(_PARTS // K, generation.vmem // _SHARE // token_bytes // part) * part)
    most = block_k or min(most, unit * _MAX_UNITS)
    bk = max(most // step, 1) * step
    bk = min(bk, -(-S // step) * step)
    units = bk // unit
    # With one tile on its way main memory would stand still between the wait for it and later starts.
    starts = Starts.BEFORE
    if row.buffers > 2:
        is_many = units * (row.start if itemsize == 1 else 1) > reads_a_tile(K, bk)
        starts = Starts.AFTER if is_long else Starts.BETWEEN if is_many else Starts.BEFORE
    if starts is Starts.BETWEEN and not interpret:
        # Few scores, so that those of four parts are in registers while the products of others are on their way.
        part = min(part, _LEAST_PART)
    part = min(part, bk)
    masked = min(part, max(_MASKED // token_bytes // LANES * LANES, LANES))
    masked = part if bk % masked else masked
    if interpret:
        # Only some tests interpret the plan of a generation other than v4: with parts.
        masked = bk // 2 if row.buffers > 2 and bk % (2 * step) == 0 else bk
        part = masked if row.tile <= _MASKED else bk
    return Tiles(bq, bk, part, masked, unit, math.lcm(units, PIECE), row.buffers, starts)


def rows_a_call(nq: int, words: int = 0) -> int:
    """The most rows whose schedule fits scalar memory; 0 where that of one row doesn't.

    Args:
        nq: tiles of queries per row.
        words: of 32 bits, of what else a row has in scalar memory.
    """
    bytes_a_row = ITEM_BYTES * nq + ROW_BYTES + 4 * words
    return min(MAX_ITEMS // nq, SCALAR_BYTES // bytes_a_row)
