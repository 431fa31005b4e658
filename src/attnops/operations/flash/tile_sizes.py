"""Tile sizes: one table, with its reasons."""

from __future__ import annotations

import math
from typing import Final, NamedTuple


class NativeTileSizes(NamedTuple):
    """Tile sizes.

    Attributes:
        rows: rows of a tile of queries, all heads of a kv head together.
        keys: keys per tile.
        scores: the most scores that are computed at a time.
    """

    rows: int
    keys: int
    scores: int


# Chosen by CPU time at T = 4,096, causal, 2 cores with AVX-512 (forward, forward + backward in ms):
# - Below 512 × 512 XLA often keeps a product on one core: 256 × 256 needs 1.4 times the wall time. Above, tiles on the
#   diagonal waste more: 1024 × 1024 takes 152 ms, 512 × 512 144 ms.
# - bfloat16 from a head dim of 128: 512 × 256 takes 156 and 666 ms, 512 × 512 187 and 701.
# - Up to four heads at a time are 0 to 20 % better than one.
# - Two tiles of little more than half a row's sizes are slower than one: causal, T = 600 takes 3.9 and 9.7 ms in two,
#   3.1 and 9.2 in one; T = 192 with 9 heads on 3, 0.82 and 2.1 ms, 0.62 and 1.3; T = 256, 1.16 and 3.0, 0.89 and 2.5;
#   but T = 768, 6.8 and 21 ms, 8.4 and 26, since one tile computes the masked half.
WIDE: Final = NativeTileSizes(512, 512, 1 << 20)
WIDE_BFLOAT16: Final = NativeTileSizes(512, 256, 1 << 19)

# Up to this many tokens, a tile may be twice as large as its table row says.
_SHORT: Final = 256

# Tiles of smaller blocks have several. With one block of eight chosen, T = 16,384, such tiles of blocks of 512, 128 and
# 64 tokens take 1.0, 1.1 and 1.5 times an eighth of the CPU time of all scores; tiles of 512 tokens 1.0, 10 and 12.
# Loading several chosen tiles of keys for one product is not faster.
_FEWEST: Final = 64

# Tile sizes are multiples of this: 16 float32 fill the widest vector register.
_MULTIPLE: Final = 16


def table_row(is_bfloat16: bool, head_dim: int) -> NativeTileSizes:
    """The table's row for a dtype of products and the larger of D and Dv."""
    return WIDE_BFLOAT16 if is_bfloat16 and head_dim >= 128 else WIDE


def choose_tiles(
    T: int,
    S: int,
    groups: int,
    block_q: int | None,
    block_k: int | None,
    row: NativeTileSizes = WIDE,
    blocks: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Queries and keys per tile.

    Args:
        T: queries.
        S: keys.
        groups: query heads per kv head, which share a tile.
        block_q: the metadata's queries per tile; None for the table's.
        block_k: the metadata's keys per tile; None for the table's.
        row: the table's row.
        blocks: queries and keys per block of the mask's `attnops.masks.Blocks`; None without any.
    """
    # Tiles of more queries than T would compute rows that do not exist: 64 instead of 4 when one token is decoded.
    most = max(row.rows // groups, _MULTIPLE)
    if blocks is not None:
        block_q, block_k = block_q or _tile_of_blocks(blocks[0], most), block_k or _tile_of_blocks(blocks[1], row.keys)
    q = min(block_q, T) if block_q else T if T < _MULTIPLE else _equal_tiles(T, most)
    k = min(block_k, S) if block_k else _equal_tiles(S, row.keys)
    return q, k


def choose_problems_per_tile(
    B: int, K: int, scores: int, by_batch: bool, by_head: bool, by_kv_head: bool, row: NativeTileSizes = WIDE
) -> int:
    """How many of the B · K problems are computed at a time: as many small ones as fill the cores.

    Args:
        B: batch.
        K: kv heads.
        scores: scores of a tile.
        by_batch: whether active tiles or a bias vary by batch, so that the problems of a group must share a batch.
        by_head: whether a bias varies by head, so that the problems of a group must share a batch.
        by_kv_head: whether active tiles vary by kv head, so that each problem is a group.
        row: the table's row.
    """
    if not isinstance(B, int):
        B = 1  # symbolic, in an exported program: the problems of a group share a batch
    most = min(1 if by_kv_head else K if by_batch or by_head else B * K, max(1, row.scores // scores))
    sizes = [d for d in range(1, K + 1) if K % d == 0] + [K * d for d in range(1, B + 1) if B % d == 0]
    return max(size for size in sizes if size == 1 or size <= most)


def _tile_of_blocks(block: int, most: int) -> int:
    """A tile that overlaps few blocks: of one block or an equal share of it, or of the blocks of ``_FEWEST`` tokens."""
    return math.ceil(block / math.ceil(block / most)) if block >= _FEWEST else block * (min(_FEWEST, most) // block)


def _equal_tiles(length: int, most: int) -> int:
    """Tiles of equal size, so that little is padded: one if that is faster, else of at most about ``most``."""
    tiles = 1 if length <= max(1.25 * most, min(2 * most, _SHORT)) else math.ceil(length / most)
    return math.ceil(length / tiles / _MULTIPLE) * _MULTIPLE
