"""Tile sizes of calls over caches: one table by generation, and what fits vector memory."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata
from attnops_tpu.generations import Generation

if TYPE_CHECKING:
    from attnops.typing import DType

LANES: Final = 128
# Entries of a row's table that are in scalar memory at a time: 512 bytes, the least that a transfer moves.
PIECE: Final = 128
# The most bytes of a row's new tokens; vector memory holds those of two rows.
MAX_NEW: Final = 8 << 20
# Up to so many new tokens of a row are written one by one, more by whole groups of slots.
MAX_BY_TOKEN: Final = 8
# A unit of a storage without pages, and the most units per tile: each has transfers of its own.
_UNIT: Final = 128
_MAX_UNITS: Final = 512
# Units of at most so many bytes have tiles of twice the bytes: the fixed cost around the starts is shared by more.
_SMALL_UNIT: Final = 8192
# Bytes of a chunk of a masked tile: a row has one such tile, and its queries may see few of the tile's keys.
_MASKED: Final = 2 << 20
# Rows of a tile of scores: more need more vector memory; with fewer, keys are read more often.
_ROWS: Final = 256
# The same for packed rows, where tiles of one query are as large as those of other rows with few queries.
_PACKED_ROWS: Final = 128
# If packed rows have two sizes of tiles: the rows of a small one, of 8 queries at most; how many small tiles cost as
# much as one large tile; and how many queries more than rows there must be for large tiles.
_SMALL_ROWS: Final = 32
SMALL_TILES: Final = 3
_MORE: Final = 64
# Rows of a tile of transposed scores, and the most of all kv heads together: so many, and one for this many bytes of
# vector memory.
_TRANSPOSED_ROWS: Final = 1024
_TRANSPOSED_HEAD_ROWS: Final = 1 << 14
_BYTES_A_ROW: Final = 1 << 13
# Keys of a chunk of transposed scores: more would be fewer units, of which the last ones are not pipelined.
_TRANSPOSED_CHUNK: Final = 512
# Keys and rows of a product of transposed scores: as many as the 64 vector registers can hold.
SUB_KEYS: Final = 256
SUB_ROWS: Final = 256
# How many products of a chunk's keys are between its scores and its weights, see `attnops_tpu.caches.transposed`.
LAG: Final = 4
# Scores of a chunk of a tile, which are in registers between two products: 16 registers of 64.
_CHUNK: Final = 16384
# Up to 128 rows, a chunk has at least so many keys, although scores are spilled: products over fewer keys use less of
# the matrix unit.
_LEAST_CHUNK: Final = 1024
# From so many rows on a tile is bound by the matrix unit, and tiles are long, so that the waits at their ends (some 350
# bundles for a latent) count less.
_MANY_ROWS: Final = 64
# The most chunks of such a tile, of all kv heads, which are straight-line code; and its share of vector memory.
_CHUNKS: Final = 8
_SHARE: Final = 6
# Scores of a tile and kv head: more are spilled from registers.
_SCORES: Final = 1 << 17


class GenerationTiles(NamedTuple):
    """A row of the table."""

    # Bytes of a tile of keys and values, all heads: enough that pending transfers cover the latency of main memory,
    # that the steps of one kv head fill the latencies of another's, and that the some 150 bundles of the loop itself
    # and of the latencies at a tile's ends count little.
    tile: int
    buffers: int  # tiles of keys in vector memory
    # The weight of a start in `choose` if features have 1 byte. On tpu7x these have another layout in vector memory
    # than in main memory, and a start needs 9 bundles if a token is wider than the lanes, else 4.
    start: int = 1
    # Transposed scores of a tile, all kv heads: straight-line code of some 8,000 bundles. Tiles of more than twice as
    # many, whose pages are large, are computed in a loop over chunks.
    scores: int = 1 << 22


class Starts(enum.Enum):
    """When the transfers of a tile start, in the step of the tile that is two before it.

    Attributes:
        BEFORE: before the wait for that tile, so that transfers have most time.
        BETWEEN: some after each read of that tile. Many starts together stall all else: for one kv head in pages of 16
            tokens, the starts alone would need more time than the computation.
        BRANCHED: before the wait for that tile, in branches of their own: a tile of many queries needs so long that its
            straight-line code is not there once for each kind of the tile whose transfers start.
        AFTER: after the reads of that tile, while the matrix unit, which bounds it, finishes its last products. On v6e,
            32 queries per row with 8 kv heads in pages of 16 would need 7 % more time with starts before it.
    """

    BEFORE = enum.auto()
    BETWEEN = enum.auto()
    BRANCHED = enum.auto()
    AFTER = enum.auto()


_MiB: Final = 1 << 20
TABLE: Final = {
    "v4": GenerationTiles(2 * _MiB, 2, scores=1 << 21),
    "v5e": GenerationTiles(2 * _MiB, 3, scores=1 << 21),
    "v5p": GenerationTiles(2 * _MiB, 3, scores=1 << 21),
    "v6e": GenerationTiles(2 * _MiB, 3),
    "tpu7x": GenerationTiles(4 * _MiB, 3, start=9),
}


class CacheTileSizes(NamedTuple):
    """The tiles of a call; the fields are those of `attnops_tpu.caches.plan.CachePlan`."""

    bq: int
    bk: int
    chunk: int
    masked_chunk: int
    unit: int
    piece: int
    buffers: int
    starts: Starts
    transposed: bool


def unit_of(page_size: int, slots: int) -> int:
    """Slots per unit: a page, or what divides the slots of a row."""
    return page_size or math.gcd(_UNIT, slots)


def most_rows(K: int) -> int:
    """The most rows of a tile of transposed scores of each of K kv heads."""
    return min(_TRANSPOSED_ROWS, _TRANSPOSED_HEAD_ROWS // K)


class Heads(NamedTuple):
    """What tiles of queries depend on besides the number of queries."""

    H: int
    K: int
    # whether tiles may have transposed scores: not with latents, whose 128 heads fill the matrix unit with single
    # tokens, and not with products of six passes, whose straight-line code would be six times as long
    transposable: bool
    interpret: bool  # whether tiles need not fill the lanes

    @classmethod
    def of(cls, H: int, K: int, dtypes: Iterable[DType], is_latent: bool, metadata: OperationMetadata) -> Heads:
        """The heads of a call; ``dtypes``: of the query and the cache."""
        one_pass = metadata.precision == lax.Precision.DEFAULT or all(jnp.dtype(x) == jnp.bfloat16 for x in dtypes)
        return cls(H, K, not is_latent and (one_pass or metadata.interpret), metadata.interpret)

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def step(self) -> int:
        """A tile of transposed scores has a multiple of so many queries, so that its rows fill the lanes."""
        return 1 if self.interpret else math.lcm(self.G, LANES) // self.G

    def most_transposed(self, chip: Generation) -> int:
        """The most queries of a tile of transposed scores; 0 if there is none."""
        rows = min(most_rows(self.K), chip.vmem // _BYTES_A_ROW // self.K)
        return 0 if not self.transposable else rows // (self.G * self.step) * self.step


def queries_a_tile(chip: Generation, block_q: int | None, T: int, heads: Heads) -> tuple[int, bool]:
    """Queries per tile, and whether its scores are transposed: those of more rows than fill the lanes.

    Args:
        chip: the generation that is compiled for.
        block_q: the metadata's; None for the table's.
        T: queries per row.
        heads: the heads.
    """
    G, step, most = heads.G, heads.step, heads.most_transposed(chip)
    least = _PACKED_ROWS // 4 if heads.interpret else LANES
    if block_q is None and most and least < G * T:
        tiles = -(-T // most)
        bq = -(-T // (tiles * step)) * step
        if bq <= 2 * T:
            return bq, True
    bq = min(T, block_q or max(_ROWS // G // chip.sublanes, 1) * chip.sublanes)
    return bq, least < G * bq and bq <= most and bq % step == 0


def packed_queries_a_tile(
    chip: Generation, block_q: int | None, N: int, rows: int, heads: Heads
) -> tuple[int, int | None]:
    """Queries per tile of packed rows, and of the large tiles of rows with many queries; None without those.

    Tiles have queries of one row: without large tiles, as many as a row has on average.

    Args:
        chip: the generation that is compiled for.
        block_q: the metadata's; None for the table's.
        N: packed queries.
        rows: the rows of the cache.
        heads: the heads.
    """
    most, few = heads.most_transposed(chip), 1 if heads.interpret else _MORE
    large = min(most, -(-N // heads.step) * heads.step)
    small = 2 if heads.interpret else min(max(_SMALL_ROWS // heads.G, 1), 8)
    if block_q is None and N - rows >= few and large >= 2 * SMALL_TILES * small:
        return small, large
    step = chip.sublanes
    most = max(_PACKED_ROWS // heads.G // step, 1) * step
    bq = min(N, block_q or min(-(-N // (step * rows)) * step, most))
    return min(bq, queries_a_tile(chip, block_q, bq, heads)[0]), None  # a call has one such tile


def ranges(stop: int, step: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at most ``step`` from 0 to ``stop``, as (start, size)."""
    return [(start, min(step, stop - start)) for start in range(0, stop, step)]


def reads_a_tile(K: int, bk: int, chunk: int = LANES) -> int:
    """Reads of keys and of values of a tile while transfers start: 128 tokens of a chunk and a kv head each."""
    return 2 * K * sum(len(ranges(size, LANES)) for _, size in ranges(bk, chunk))


def choose(
    generation: Generation, block_q: int | None, block_k: int | None, lengths: tuple[int, int], heads: Heads,
    token_bytes: int, itemsize: int, unit: int, work: int = 1,
) -> CacheTileSizes:  # fmt: skip
    """The tiles of a call.

    Args:
        generation: the generation that is compiled for.
        block_q: the metadata's; None for the table's.
        block_k: the metadata's; None for the table's.
        lengths: T, and S of a row.
        heads: the heads.
        token_bytes: bytes of the keys and values of a token, all heads, as vector memory holds them.
        itemsize: bytes of a feature.
        unit: the slots of a unit, see `unit_of`.
        work: the instructions of a score, relative to those of a score of bfloat16 without cap and bias.
    """
    (T, S), row, G, K, interpret = lengths, TABLE[generation.name], heads.G, heads.K, heads.interpret
    bq, transposed = queries_a_tile(generation, block_q, T, heads)
    step = math.lcm(unit, generation.sublanes if transposed else 1) if interpret else math.lcm(unit, LANES)
    rows = -(-G * bq // generation.sublanes) * generation.sublanes
    chunk = max(_CHUNK // rows // LANES * LANES, _LEAST_CHUNK if rows <= LANES else LANES)
    tile = 2 * row.tile if row.buffers > 2 and unit * token_bytes <= _SMALL_UNIT else row.tile
    most = min(tile // token_bytes, _SCORES // (G * bq))
    is_long = _MANY_ROWS <= rows <= LANES
    if is_long:
        most = max(most, min(_CHUNKS // K, generation.vmem // _SHARE // token_bytes // chunk) * chunk)
    if transposed:
        most = min(min(row.buffers - 1, 2) * row.tile // token_bytes, row.scores // (work * K * rows))
    most = block_k or min(most, unit * _MAX_UNITS)
    bk = max(most // step, 1) * step
    bk = min(bk, -(-S // step) * step)
    units = bk // unit
    # If only one transfer is pending, memory is idle from the wait for it until the next start.
    starts = Starts.BEFORE
    if row.buffers > 2:
        is_many = units * (row.start if itemsize == 1 else 1) > reads_a_tile(K, bk)
        starts = Starts.AFTER if is_long else Starts.BETWEEN if is_many else Starts.BEFORE
    if starts is Starts.BETWEEN and not interpret:
        # Few scores, so that those of four chunks stay in registers while the products of others are pending.
        chunk = min(chunk, _LEAST_CHUNK)
    chunk = min(chunk, bk)
    masked = min(chunk, max(_MASKED // token_bytes // LANES * LANES, LANES))
    masked = chunk if bk % masked else masked
    if transposed:
        of_key = work * K * rows
        masked = math.gcd(bk, SUB_KEYS if SUB_KEYS * of_key <= row.scores else LANES)
        chunk = min(bk, _TRANSPOSED_CHUNK) if bk * of_key <= 2 * row.scores else masked
        starts = Starts.BRANCHED
    if interpret:
        # Only some tests interpret the plan of a generation other than v4: those have chunks.
        masked = bk // 2 if row.buffers > 2 and bk % (2 * step) == 0 else bk
        chunk = masked if row.tile <= _MASKED else bk
    return CacheTileSizes(bq, bk, chunk, masked, unit, math.lcm(units, PIECE), row.buffers, starts, transposed)
