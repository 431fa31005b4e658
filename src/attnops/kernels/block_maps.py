"""Block maps adapted to a kernel's tiles: ragged ends masked, heads that share a tile merged."""

from __future__ import annotations

import numpy as np

from attnops.masks import Coverage, Mask, block_map
from attnops.masks.integers import numpy_of
from attnops.typing import Array


def map_shape(mask: Mask | None, scores: tuple[int, int, int, int]) -> tuple[int, int]:
    """How many batches and heads the block map of a bound mask has: each 1, or all."""
    B, H, *_ = block_map(mask, scores, scores[2], scores[3]).coverage.shape
    return B, H


def ragged(coverage: Array, axis: int, remainder: int) -> Array:
    """The coverage, with FULL replaced by PARTIAL in the last tiles along an axis if they reach beyond the last token.

    Args:
        coverage: [B or 1, H or 1, …] of `attnops.masks.Coverage`, a numpy array or traced.
        axis: the axis of the tiles.
        remainder: tokens in the last tile; 0 if it is complete.
    """
    if not remainder:
        return coverage
    xp = numpy_of(coverage)
    size = coverage.shape[axis]
    is_last = (np.arange(size) == size - 1).reshape([-1 if k == axis else 1 for k in range(coverage.ndim)])
    return xp.where(is_last, xp.minimum(coverage, int(Coverage.PARTIAL)), coverage)


def merged(coverage: Array, axis: int, size: int) -> Array:
    """The coverage merged over batches or heads, to ``size`` along an axis.

    A tile is active if it is for any of them, and FULL if it is for all of them.

    Args:
        coverage: [B or 1, H or 1, …] of `attnops.masks.Coverage`, a numpy array or traced.
        axis: 0 or 1.
        size: the size of the axis in the result; a divisor of the axis, unless that is smaller.
    """
    if coverage.shape[axis] <= size:
        return coverage
    xp = numpy_of(coverage)
    shape = list(coverage.shape)
    shape[axis : axis + 1] = [size, shape[axis] // size]
    grouped = coverage.reshape(shape)
    least, most = grouped.min(axis=axis + 1), grouped.max(axis=axis + 1)
    return xp.where(least == most, most, xp.minimum(most, int(Coverage.PARTIAL)))
