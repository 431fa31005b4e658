"""Tile sizes: one table, with its reasons."""

from __future__ import annotations

import math
from typing import Final, NamedTuple


class Row(NamedTuple):
    """Rows of a tile of queries (all heads of a kv head together), keys a tile, and scores that run at a time."""

    rows: int
    keys: int
    scores: int


# Chosen by CPU time at T = 4,096, causal, 2 cores with AVX-512 (forward, forward + backward in ms):
# - Below 512 × 512 XLA often keeps a product on one core: 256 × 256 takes 1.4 times as long by the clock. Above, the
#   diagonal wastes more: 1024 × 1024 takes 152 ms for 144.
# - bfloat16 from a head dim of 128: 512 × 256 takes 156 and 666 ms, 512 × 512 187 and 701.
# - Up to four heads at a time are 0 to 20 % better than one.
WIDE: Final = Row(512, 512, 1 << 20)
WIDE_BFLOAT16: Final = Row(512, 256, 1 << 19)

# Tiles are a multiple of it: 16 float32 fill the widest vector register.
_MULTIPLE: Final = 16


def table_row(is_bfloat16: bool, head_dim: int) -> Row:
    """The table's row for a dtype of products and the larger of D and Dv."""
    return WIDE_BFLOAT16 if is_bfloat16 and head_dim >= 128 else WIDE


def choose_tiles(
    T: int, S: int, groups: int, block_q: int | None, block_k: int | None, row: Row = WIDE
) -> tuple[int, int]:
    """Queries and keys a tile.

    Args:
        T: queries.
        S: keys.
        groups: query heads a kv head, which share a tile.
        block_q: the metadata's wish; None for the table's.
        block_k: likewise.
        row: of the table.
    """
    q = min(block_q, T) if block_q else _equal_tiles(T, max(row.rows // groups, _MULTIPLE))
    k = min(block_k, S) if block_k else _equal_tiles(S, row.keys)
    return q, k


def choose_lanes(B: int, K: int, scores: int, by_batch: bool, by_head: bool, alone: bool, row: Row = WIDE) -> int:
    """How many of the B · K problems run at a time: as many small ones as fill the cores.

    Args:
        B: batch.
        K: kv heads.
        scores: scores of a tile.
        by_batch: whether the batch is told apart by the mask's tiles or a bias, so that lanes must share one.
        by_head: whether heads are told apart by a bias: likewise.
        alone: whether every kv head has tiles of its own to visit.
        row: of the table.
    """
    if not isinstance(B, int):
        B = 1  # symbolic, in an exported program: lanes are of one batch
    alike = 1 if alone else K if by_batch or by_head else B * K
    most = max(1, row.scores // scores)
    whole = [d for d in range(1, K + 1) if K % d == 0] + [K * d for d in range(1, B + 1) if B % d == 0]
    return max(lanes for lanes in whole if lanes == 1 or lanes <= min(alike, most))


def _equal_tiles(length: int, most: int) -> int:
    """Tiles of equal size, at most about ``most``, so that little is padded."""
    tiles = math.ceil(length / most)
    return math.ceil(length / tiles / _MULTIPLE) * _MULTIPLE
