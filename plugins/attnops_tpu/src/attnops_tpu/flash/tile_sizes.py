"""Tile sizes: one table by generation, with the schedule counts that chose its rows, and what fits vector memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from attnops import OperationMetadata
from attnops_tpu.flash.visits import MAX_COLUMNS, MAX_ROWS, MOST_ENTRIES
from attnops_tpu.generations import Generation, generation


class Parts(NamedTuple):
    """How a pass computes a tile: in straight-line code, part by part.

    Attributes:
        rows: keys a part.
        cols: queries a part.
        lag: backward, how many parts lie between the products that begin one and those that end it.
        keys_first: backward, whether parts of the same queries follow one another; else of the same keys.
    """

    rows: int
    cols: int
    lag: int = 2
    keys_first: bool = True


class Tiles(NamedTuple):
    """See `attnops_tpu.flash.plan.Plan`."""

    bq: int
    bk: int
    forward: Parts
    backward: Parts
    span: int
    split: int
    vmem: int


class Row(NamedTuple):
    """A candidate.

    Attributes:
        bq: queries a tile.
        bk: keys a tile.
        bundles: what 512 × 512 scores take, forward and backward together, bfloat16, D = 128, nothing masked.
    """

    bq: int
    bk: int
    bundles: int


# Counted by benchmarks/tpu_schedule.py. A step has a tail of some 200 bundles in which results drain, so that large
# tiles are better, where a mask does not waste them.
_SMALLEST: Final = Row(128, 128, 12000)
_V6E: Final = (Row(1024, 2048, 1380), Row(1024, 1024, 1465), Row(512, 512, 1850), Row(256, 256, 3400), _SMALLEST)
# Tiles of 1024 × 2048 take 1,360, but spill 75 registers forward where these spill 33.
_TPU7X: Final = (Row(2048, 1024, 1390), Row(1024, 1024, 1430), Row(512, 512, 1820), Row(256, 256, 3050), _SMALLEST)
_NARROW_UNIT: Final = (Row(1024, 1024, 3580), Row(512, 512, 3700), Row(256, 256, 5200), _SMALLEST)
TABLE: Final[dict[str, tuple[Row, ...]]] = {
    "v4": _NARROW_UNIT,
    "v5e": _NARROW_UNIT,
    "v5p": _NARROW_UNIT,
    "v6e": _V6E,
    "tpu7x": _TPU7X,
}
# 256 × 256 is what the 64 vector registers bear, and the size of the matrix unit of v6e and tpu7x. On tpu7x, at
# 1024 × 1024, 512 keys a part forward spill 29 registers a tile for 141 at 478 bundles for 476; a lag of 3 backward
# takes 960 bundles for 995.
_PARTS: Final = (Parts(256, 256), Parts(256, 256))
PARTS: Final[dict[str, tuple[Parts, Parts]]] = {
    "v4": _PARTS,
    "v5e": _PARTS,
    "v5p": _PARTS,
    "v6e": _PARTS,
    "tpu7x": (Parts(512, 256), Parts(256, 256, lag=3, keys_first=False)),
}
# Without a mask a step over many scores is best; every generation has such a row.
LARGEST: Final = 1024
# Queries are numbered as rows of one kernel's visits and as columns of another's, and so are keys.
MOST_TILES: Final = min(MAX_ROWS, MAX_COLUMNS)
# Biases and caps take registers and code of their own; a bias's tiles take memory. Smaller tiles serve them as well.
LARGEST_CHANGED: Final = 512
# A gradient of queries that stays in vector memory takes at most this share of it.
SPAN_SHARE: Final = 0.3
# Of vector memory; the rest is the compiler's.
USABLE: Final = 0.85
LANES: Final = 128


class Problem(NamedTuple):
    """What tiles depend on.

    Attributes:
        T, S: queries and keys.
        G: query heads a kv head.
        D, Dv: head dims.
        itemsize: bytes an element of query, key and value.
        out_itemsize: of the output.
        changes_scores: whether scores have a cap or a bias.
        bytes_a_score: of arrays of T × S elements, and what their gradients need.
        maps: batches and heads that the mask's tiles tell apart.
    """

    T: int
    S: int
    G: int
    D: int
    Dv: int
    itemsize: int
    out_itemsize: int
    changes_scores: bool = False
    bytes_a_score: int = 0
    maps: int = 1


def choose(metadata: OperationMetadata, problem: Problem, visited: Callable[[int, int], int | None]) -> Tiles:
    """The tiles of a call: the metadata's, else of those that fit the ones that take the fewest bundles.

    Args:
        metadata: of the operation.
        problem: see `Problem`.
        visited: how many tiles of these sizes the mask leaves; None where only run time knows.
    """
    where = generation()
    multiple = 8 if metadata.interpret else LANES
    # Of many query heads a kv head, the gradients may not fit together; then they take turns.
    for split in (n for n in range(1, problem.G + 1) if problem.G % n == 0):
        part = problem._replace(G=problem.G // split)
        found = _candidates(metadata, part, visited, multiple, where)
        if found:
            break
    smallest = metadata.block_q or LANES, metadata.block_k or LANES
    bq, bk = min(found, key=lambda blocks: found[blocks]) if found else smallest
    forward, backward = (p._replace(rows=_part(bk, p.rows), cols=_part(bq, p.cols)) for p in PARTS[where.name])
    return Tiles(bq, bk, forward, backward, _span(part, bq, bk, where), split, int(where.vmem * 0.95))


def _candidates(
    metadata: OperationMetadata,
    problem: Problem,
    visited: Callable[[int, int], int | None],
    multiple: int,
    where: Generation,
) -> dict[tuple[int, int], float]:
    """The tiles that fit vector memory, and what they cost."""
    q, k = metadata.block_q, metadata.block_k
    found: dict[tuple[int, int], float] = {}
    for row in TABLE[where.name]:
        bq = min(q, _whole(problem.T, multiple)) if q else _equal(problem.T, row.bq, multiple)
        bk = min(k, _whole(problem.S, multiple)) if k else _equal(problem.S, row.bk, multiple)
        if max(-(-problem.T // bq), -(-problem.S // bk)) > MOST_TILES:
            continue
        if (bq, bk) in found or (problem.changes_scores and max(row.bq, row.bk) > LARGEST_CHANGED):
            continue
        if not (q and k) and _bytes(problem, bq, bk, bq, where) > USABLE * where.vmem:
            continue
        tiles = visited(bq, bk)
        tiles = -(-problem.T // bq) * -(-problem.S // bk) if tiles is None else tiles
        found[bq, bk] = tiles * bq * bk * row.bundles
    return found


def _span(problem: Problem, bq: int, bk: int, where: Generation) -> int:
    """Tiles of queries whose gradients stay in vector memory together."""
    a_tile = 2 * 4 * problem.G * problem.D * bq  # float32, two buffers
    free = USABLE * where.vmem - _bytes(problem, bq, bk, 0, where)
    entries = MOST_ENTRIES // (-(-problem.S // bk) * problem.maps)
    most = int(min(free, max(SPAN_SHARE * where.vmem, a_tile)) // a_tile)
    return max(1, min(most, entries, -(-problem.T // bq)))


def _bytes(problem: Problem, bq: int, bk: int, span: int, where: Generation) -> int:
    """About what the larger of both kernels takes, ``span`` queries' gradients staying. Blocks have two buffers."""
    D, Dv, n = problem.D, problem.Dv, problem.itemsize
    wide_D, wide_Dv = (_whole(d, LANES) for d in (D, Dv))
    scores = bq * bk * problem.bytes_a_score
    forward = (
        2 * n * (D * bq + wide_D * bk + Dv * bk) + 2 * problem.out_itemsize * Dv * bq + 4 * (bk * bq + Dv * bq) + scores
    )
    backward = 2 * n * (D * bq + (wide_D + D) * bk + wide_Dv * bk + Dv * bq) + scores
    backward += (4 + 2 * n) * (D + Dv) * bk + 2 * 4 * problem.G * D * span + 16 * 256 * 256 * 4
    return max(forward, backward) + 40 * max(bq, bk) * LANES // 4


def _equal(length: int, most: int, multiple: int) -> int:
    """Tiles of equal size, at most ``most``, so that little is padded."""
    tiles = math.ceil(length / most)
    return _whole(math.ceil(length / tiles), multiple)


def _whole(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _part(block: int, most: int) -> int:
    return math.gcd(block, most) if block % LANES == 0 else block
