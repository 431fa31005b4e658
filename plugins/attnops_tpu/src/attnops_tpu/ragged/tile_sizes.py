"""Tile sizes of calls over caches: one table by generation, and what fits vector memory."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from attnops_tpu.generations import Generation

LANES: Final = 128
# Entries of a row's table that are in scalar memory at a time: 512 bytes, the least that a transfer moves.
PIECE: Final = 128
# Items in scalar memory take 24 bytes each, and rows up to 16 values of masks and biases; of scalar memory's 1 MiB
# the table and what the compiler keeps are left out.
MAX_ITEMS: Final = 1 << 14
ROW_BYTES: Final = 64
SCALAR_BYTES: Final = 960 << 10
# A unit of a storage without pages, and the most units a tile: each has transfers of its own.
_UNIT: Final = 128
_MAX_UNITS: Final = 256
# Rows of a tile of scores: more need more vector memory, fewer read keys more often.
_ROWS: Final = 256
# Scores of a part of a tile, which are in registers between two products: 16 registers of 64.
_PART: Final = 16384
# But of up to 128 rows so many keys at least, although scores are spilled: products over fewer fill less of the matrix
# unit. 1,024 keys of 576 features for 128 rows take with parts of 128, 256, 512 keys 1,803, 1,519, 1,414 bundles.
_LEAST_PART: Final = 512
# Scores of a tile and kv head: more are spilled from registers.
_SCORES: Final = 1 << 17


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        tile: bytes of a tile of keys and values, all heads: enough that what is on its way covers the latency of main
            memory, that the steps of one kv head fill the latencies of another's, and that the loop's own bundles, some
            80 a tile, are few.
        buffers: tiles of keys in vector memory.
        loads: where a transfer has fewer loads of 128 keys of a kv head, the starts of a tile are spread between them.
            On tpu7x, whose vector memory has other tiles than main memory, a start takes 9 bundles where a token is
            wider than the lanes, elsewhere 4. 512 keys of 8 kv heads with pages of 32 and 64 take there 1,007 and 835
            bundles so, 1,100 and 901 if the starts are together; on v6e those with pages of 16 take 919 and 861.
    """

    tile: int
    buffers: int
    loads: int = 1


_MiB: Final = 1 << 20
TABLE: Final = {
    "v4": Row(2 * _MiB, 2),
    "v5e": Row(2 * _MiB, 3),
    "v5p": Row(2 * _MiB, 3),
    "v6e": Row(2 * _MiB, 3),
    "tpu7x": Row(2 * _MiB, 3, loads=9),
}


class Tiles(NamedTuple):
    """See `attnops_tpu.ragged.plan.Plan`."""

    bq: int
    bk: int
    part: int
    unit: int
    piece: int
    buffers: int
    spreads_starts: bool


def unit_of(page_size: int, slots: int) -> int:
    """Slots a unit: a page, or what divides the slots of a row."""
    return page_size or math.gcd(_UNIT, slots)


def queries_a_tile(block_q: int | None, T: int, G: int) -> int:
    """Queries a tile.

    Args:
        block_q: the metadata's; None for the table's.
        T: queries a row.
        G: query heads a kv head.
    """
    return min(T, block_q or max(_ROWS // G // 8, 1) * 8)


def choose(
    generation: Generation,
    block_q: int | None,
    block_k: int | None,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    token_bytes: int,
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
        unit: see `unit_of`.
        interpret: whether tiles need not fill the lanes.
    """
    (T, S), (H, K), row = lengths, heads, TABLE[generation.name]
    G = H // K
    bq = queries_a_tile(block_q, T, G)
    step = unit if interpret else math.lcm(unit, LANES)
    most = block_k or min(row.tile // token_bytes, _SCORES // (G * bq), unit * _MAX_UNITS)
    bk = max(most // step, 1) * step
    bk = min(bk, -(-S // step) * step)
    units = bk // unit
    rows = -(-G * bq // 8) * 8
    part = max(_PART // rows // LANES * LANES, _LEAST_PART if rows <= LANES else LANES)
    part = bk if interpret else min(bk, part)
    # Where transfers start together nothing else happens: one kv head's pages of 16 tokens would take longer to ask for
    # than to compute with. Of few it takes longer to compute with loads that starts keep in order.
    loads = 2 * K * -(-bk // LANES)
    spreads_starts = row.buffers > 2 and units * row.loads > loads
    return Tiles(bq, bk, part, unit, -(-PIECE // units) * units, row.buffers, spreads_starts)
