"""Tile sizes: a table by generation, chosen by counts of static schedules, and what fits vector memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from attnops import OperationMetadata
from attnops_tpu.flash.tile_schedule import MAX_COLUMNS, MAX_ENTRIES, MAX_ROWS
from attnops_tpu.generations import MAX_CODE, Generation, generation


class SubTileSizes(NamedTuple):
    """The sub-tiles of a tile, which a pass computes one after the other in straight-line code."""

    rows: int  # keys per sub-tile
    cols: int  # queries per sub-tile
    lag: int = 2  # in the backward pass, the number of sub-tiles between the first products of a sub-tile and its last
    # in the backward pass, whether sub-tiles are ordered by queries, then keys; else by keys, then queries.
    keys_first: bool = True


class TileSizes(NamedTuple):
    """The tiles of a call; the fields are those of `attnops_tpu.flash.plan.FlashPlan`."""

    bq: int
    bk: int
    forward: SubTileSizes
    backward: SubTileSizes
    span: int
    split: int
    vmem: int


class Candidate(NamedTuple):
    """Tile sizes of the table."""

    bq: int  # queries per tile
    bk: int  # keys per tile
    bundles: int  # bundles for 512 × 512 scores, forward and backward together, bfloat16, D = 128, nothing masked


# Counted by benchmarks/tpu_schedule.py. A step ends with some 200 bundles in which results drain, so large tiles are
# better, unless a mask wastes much of them.
_SMALLEST: Final = Candidate(128, 128, 12000)
_V6E: Final = (
    Candidate(2048, 2048, 1363), Candidate(1024, 2048, 1380), Candidate(1024, 1024, 1465), Candidate(512, 512, 1850),
    Candidate(256, 256, 3400), _SMALLEST,
)  # fmt: skip
_TPU7X: Final = (
    Candidate(2048, 2048, 1330), Candidate(2048, 1024, 1380), Candidate(1024, 1024, 1420), Candidate(512, 512, 1820),
    Candidate(256, 256, 3050), _SMALLEST,
)  # fmt: skip
_NARROW_UNIT: Final = (Candidate(1024, 1024, 3580), Candidate(512, 512, 3700), Candidate(256, 256, 5200), _SMALLEST)
TABLE: Final[dict[str, tuple[Candidate, ...]]] = {
    "v4": _NARROW_UNIT,
    "v5e": _NARROW_UNIT,
    "v5p": _NARROW_UNIT,
    "v6e": _V6E,
    "tpu7x": _TPU7X,
}
# 256 × 256 is the most that the 64 vector registers can hold, and the size of the matrix unit of v6e and tpu7x. On
# tpu7x, at 1024 × 1024, 512 keys per sub-tile forward spill 29 registers per tile, not 141, at 478 bundles instead
# of 476; a lag of 3 backward needs 960 bundles instead of 995.
_SUB_TILES: Final = (SubTileSizes(256, 256), SubTileSizes(256, 256))
SUB_TILES: Final[dict[str, tuple[SubTileSizes, SubTileSizes]]] = {
    "v4": _SUB_TILES,
    "v5e": _SUB_TILES,
    "v5p": _SUB_TILES,
    "v6e": _SUB_TILES,
    "tpu7x": (SubTileSizes(512, 256), SubTileSizes(256, 256, lag=3, keys_first=False)),
}
# The fixed bundles of a grid step: 110 to 200 forward and 180 to 280 backward, depending on whether operands are in
# vector or in main memory, and the share of a row's ends.
STEP: Final = 400
# Bundles of the code that computes no tiles, forward and backward; and how much more code than FULL tiles, for as many
# sub-tiles, the tiles of kernels with masks have. Backward the matrix unit takes most.
_OTHER_CODE: Final = 2_700, 1_000
_MASKED_CODE: Final = 1.18, 1.03
# The largest tile that is a candidate for every generation.
LARGEST: Final = 1024
# Tiles of queries are rows of one kernel's schedule and columns of another's, and so are tiles of keys.
MAX_TILES: Final = min(MAX_ROWS, MAX_COLUMNS)
# Biases and caps need registers and code, and a bias's tiles need memory. Smaller tiles are as fast with them.
MAX_WITH_CAP_OR_BIAS: Final = 512
# The share of vector memory that is planned for, and the most that a kernel may use, with what the compiler adds.
USABLE: Final = 0.85
MOST: Final = 0.95
LANES: Final = 128


class Work(NamedTuple):
    """What a kernel computes with tiles of a size."""

    tiles: int  # how many tiles are not EMPTY
    computed: float  # the scores that are computed, in tiles
    code: float  # the code for all kinds of tiles, in FULL tiles


class Problem(NamedTuple):
    """What tile sizes depend on."""

    # Queries and keys.
    T: int
    S: int
    G: int  # query heads per kv head
    # Head dims.
    D: int
    Dv: int
    itemsize: int  # bytes per element of query, key and value
    out_itemsize: int  # bytes per element of the output
    has_cap_or_bias: bool = False  # whether scores have a cap or a bias
    bytes_a_score: int = 0  # bytes per score of arrays of T × S elements and their gradients
    n_maps: int = 1  # the product of the numbers of batches and heads of the block map


def choose(metadata: OperationMetadata, problem: Problem, work: Callable[[int, int, SubTileSizes], Work]) -> TileSizes:
    """The tiles of a call: the metadata's, else those of the fewest bundles that fit vector memory.

    Args:
        metadata: the metadata of the operation.
        problem: what tile sizes depend on.
        work: the work with tiles of so many queries and keys, of sub-tiles of these sizes.
    """
    tpu = generation()
    multiple = 8 if metadata.interpret else LANES
    # The gradients of many query heads per kv head may not fit together; then the heads are split into groups.
    for split in (n for n in range(1, problem.G + 1) if problem.G % n == 0):
        split_problem = problem._replace(G=problem.G // split)
        candidates = _candidates(metadata, split_problem, work, multiple, tpu)
        if candidates:
            break
    smallest = metadata.block_q or LANES, metadata.block_k or LANES
    bq, bk = min(candidates, key=lambda blocks: candidates[blocks]) if candidates else smallest
    forward, backward = (_sub_tiles(bq, bk, sizes) for sizes in SUB_TILES[tpu.name])
    return TileSizes(bq, bk, forward, backward, _span(split_problem, bq, bk, tpu), split, int(tpu.vmem * MOST))


def _candidates(
    metadata: OperationMetadata,
    problem: Problem,
    work: Callable[[int, int, SubTileSizes], Work],
    multiple: int,
    tpu: Generation,
) -> dict[tuple[int, int], tuple[bool, float]]:
    """The tile sizes that fit vector memory; whether they have too much code, and their costs."""
    q, k = metadata.block_q, metadata.block_k
    candidates: dict[tuple[int, int], tuple[bool, float]] = {}
    for row in TABLE[tpu.name]:
        bq = min(q, _round_up(problem.T, multiple)) if q else _equal_tiles(problem.T, row.bq, multiple)
        bk = min(k, _round_up(problem.S, multiple)) if k else _equal_tiles(problem.S, row.bk, multiple)
        if max(-(-problem.T // bq), -(-problem.S // bk)) > MAX_TILES:
            continue
        if (bq, bk) in candidates or (problem.has_cap_or_bias and max(row.bq, row.bk) > MAX_WITH_CAP_OR_BIAS):
            continue
        forward, backward = _bytes(problem, bq, bk)
        if not (q and k) and max(forward, backward + _span_bytes(problem, bq)) > USABLE * tpu.vmem:
            continue
        tiles, computed, code = work(bq, bk, _sub_tiles(bq, bk, SUB_TILES[tpu.name][1]))
        a_tile = bq * bk / 512**2 * row.bundles
        is_too_much = _OTHER_CODE[1] + _MASKED_CODE[1] * code * 0.69 * a_tile > MAX_CODE
        candidates[bq, bk] = is_too_much, computed * a_tile + tiles * STEP
    return candidates


def most_forward_code(bq: int, bk: int) -> float:
    """How much code for tiles the forward kernel may have, as a multiple of that of a FULL tile."""
    a_tile = 0.31 * TABLE[generation().name][0].bundles * bq * bk / 512**2
    return (MAX_CODE - _OTHER_CODE[0]) / (_MASKED_CODE[0] * a_tile)


def _span(problem: Problem, bq: int, bk: int, tpu: Generation) -> int:
    """Tiles of queries whose gradients are in vector memory at a time."""
    free = USABLE * tpu.vmem - _bytes(problem, bq, bk)[1]
    entries = MAX_ENTRIES // (-(-problem.S // bk) * problem.n_maps)
    # As many as fit: each further span is one more sweep, which adds its gradients of keys and values in float32.
    return max(1, min(int(free // _span_bytes(problem, bq)), entries, -(-problem.T // bq)))


def _span_bytes(problem: Problem, queries: int) -> int:
    """The memory of gradients of queries: float32, and two buffers in 16 bits; or two buffers in float32."""
    return 8 * problem.G * problem.D * queries


def _bytes(problem: Problem, bq: int, bk: int) -> tuple[int, int]:
    """An estimate of the memory of both kernels, without gradients of queries. Blocks have two buffers."""
    D, Dv, n = problem.D, problem.Dv, problem.itemsize
    wide_D, wide_Dv = (_round_up(d, LANES) for d in (D, Dv))
    scores = bq * bk * problem.bytes_a_score
    forward = (
        2 * n * (D * bq + wide_D * bk + Dv * bk) + 2 * problem.out_itemsize * Dv * bq + 4 * (bk * bq + Dv * bq) + scores
    )
    backward = 2 * n * (D * bq + wide_D * bk + wide_Dv * bk + Dv * bq) + n * D * bk + scores
    backward += (4 + 2 * n) * (D + Dv) * bk + 16 * 256 * 256 * 4
    rows = 40 * max(bq, bk) * LANES // 4
    return forward + rows, backward + rows


def _equal_tiles(length: int, most: int, multiple: int) -> int:
    """The size of equal tiles of at most ``most``, so that little is padded."""
    tiles = math.ceil(length / most)
    return _round_up(math.ceil(length / tiles), multiple)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _sub_tiles(bq: int, bk: int, sizes: SubTileSizes) -> SubTileSizes:
    """The sub-tiles of a tile: of these sizes, or of what divides it."""
    return sizes._replace(rows=_sub_tile(bk, sizes.rows), cols=_sub_tile(bq, sizes.cols))


def _sub_tile(block: int, most: int) -> int:
    return math.gcd(block, most) if block % LANES == 0 else block
