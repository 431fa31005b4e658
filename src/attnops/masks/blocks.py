"""Block maps: the coverage of every tile of a call, from which kernels make their tile schedules."""

from __future__ import annotations

import dataclasses

import numpy as np

from attnops.masks.base import Mask
from attnops.masks.coverage import Coverage, Grid, tight_bounds
from attnops.masks.integers import numpy_of
from attnops.typing import Array, Index


@dataclasses.dataclass(frozen=True)
class BlockMap:
    """Which tiles of a call a kernel visits, and where it must apply the mask.

    Attributes:
        coverage: the `Coverage` of each tile as int8 [B or 1, H or 1, tiles of q, tiles of kv]; numpy where the mask is
            known when tracing, else a JAX array.
        block_q: queries per tile; the last may be shorter.
        block_k: keys per tile; the last may be shorter.
    """

    coverage: Array
    block_q: int
    block_k: int

    @property
    def is_static(self) -> bool:
        """Whether the map is known when tracing."""
        return isinstance(self.coverage, np.ndarray)

    def count(self, coverage: Coverage) -> Index:
        """How many tiles have this coverage."""
        return (self.coverage == coverage).sum()


# Tiles that are computed at once, so that the temporaries of a map of millions of tiles stay small.
_TILES_AT_ONCE = 1 << 20


def block_map(mask: Mask | None, shape: tuple[int, int, int, int], block_q: int, block_k: int) -> BlockMap:
    """The block map of a mask.

    Args:
        mask: bound or not; None for one that allows all.
        shape: (B, H, T, S).
        block_q: queries per tile.
        block_k: keys per tile.

    Returns:
        A map of O(T · S / (block_q · block_k)) bytes, times B or H where the mask varies by them.
    """
    B, H, T, S = shape
    rows, columns = -(-T // block_q), -(-S // block_k)
    if mask is None:
        return BlockMap(np.full((1, 1, rows, columns), Coverage.FULL, np.int8), block_q, block_k)
    bound = mask.bind(B, H, T, S)
    step = max(1, _TILES_AT_ONCE // columns)
    kv_starts = np.arange(columns) * block_k
    row_blocks = []
    for row in range(0, rows, step):
        q_starts = np.arange(row, min(row + step, rows)) * block_q
        codes = tight_bounds(bound, Grid.make(q_starts, block_q, T, kv_starts, block_k, S)).codes()
        # The coverage of a mask of keys alone has one row for all queries.
        row_blocks.append(numpy_of(codes).broadcast_to(codes, (*codes.shape[:2], len(q_starts), columns)))
    codes = row_blocks[0] if len(row_blocks) == 1 else numpy_of(*row_blocks).concatenate(row_blocks, axis=2)
    return BlockMap(codes, block_q, block_k)
