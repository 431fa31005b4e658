"""Block maps as a kernel's tiles need them: ragged ends masked, heads that share a tile merged."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attnops.masks import Coverage, Mask, block_map


def map_shape(mask: Mask | None, scores: tuple[int, int, int, int]) -> tuple[int, int]:
    """How many batches and heads the block map of a bound mask has: each 1 or all."""
    B, H, *_ = block_map(mask, scores, scores[2], scores[3]).coverage.shape
    return B, H


def ragged(coverage: Any, axis: int, rest: int) -> Any:
    """The coverage, the last tiles along an axis being masked where they are not whole.

    Args:
        coverage: [B or 1, H or 1, …] of `attnops.masks.Coverage`, numpy's or traced.
        axis: of the tiles.
        rest: tokens in the last tile; 0 where it is whole.
    """
    if not rest:
        return coverage
    xp: Any = np if isinstance(coverage, np.ndarray) else jnp
    size = coverage.shape[axis]
    is_last = (np.arange(size) == size - 1).reshape([-1 if k == axis else 1 for k in range(coverage.ndim)])
    return xp.where(is_last, xp.minimum(coverage, int(Coverage.PARTIAL)), coverage)


def merged(coverage: Any, axis: int, size: int) -> Any:
    """The coverage of several batches or heads together, ``size`` along an axis.

    A tile is visited if any of them needs it, and masked if any does not see all of it.

    Args:
        coverage: [B or 1, H or 1, …] of `attnops.masks.Coverage`, numpy's or traced.
        axis: 0 or 1.
        size: what is left of the axis, a divisor of it where it has more.
    """
    if coverage.shape[axis] <= size:
        return coverage
    xp: Any = np if isinstance(coverage, np.ndarray) else jnp
    shape = list(coverage.shape)
    shape[axis : axis + 1] = [size, shape[axis] // size]
    grouped = coverage.reshape(shape)
    least, most = grouped.min(axis=axis + 1), grouped.max(axis=axis + 1)
    return xp.where(least == most, most, xp.minimum(most, int(Coverage.PARTIAL)))
