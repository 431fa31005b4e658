"""Bounds of a mask's tiles, exact for the parts that depend on ``q - kv`` alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from attnops.masks.coverage import CoverageBounds, Grid
from attnops.masks.integers import numpy_of

if TYPE_CHECKING:
    from attnops.masks.base import Mask
    from attnops.typing import BoolArray, Index


def tight_bounds(mask: Mask, grid: Grid) -> CoverageBounds:
    """`Mask.coverage_bounds` of a bound mask, with its bands (causal, windows) combined exactly.

    Three-valued logic alone makes ``Causal() | ~Causal()`` PARTIAL on the diagonal. Here the range of ``q - kv`` is
    split where a band begins or ends; between two cuts each band is constant, and a tile's bounds are those of its
    intervals combined, so that the diagonal is FULL.
    """
    bands = list(mask.bands())
    if len(bands) < 2:
        return mask.coverage_bounds(grid)
    lowest, highest = grid.difference()
    some: BoolArray = np.False_
    every: BoolArray = np.True_
    cuts = _sorted([edge for low, high in bands for edge in (low, high + 1)])
    # The intervals below the first cut, between two cuts, and above the last.
    for start, stop in zip([None, *cuts], [*cuts, None], strict=True):
        low = lowest if start is None else _maximum(lowest, start)
        high = highest if stop is None else _minimum(highest, stop - 1)
        occurs = low <= high
        # An interval that does not occur in a tile is evaluated at its first number, and the result is ignored.
        bounds = mask.coverage_bounds(dataclasses.replace(grid, within=(low, _maximum(low, high))))
        some = some | (occurs & bounds.some)
        every = every & (bounds.all | (np.True_ ^ occurs))
    return CoverageBounds(some, every)


def _sorted(cuts: list[Index]) -> list[Index]:
    if all(isinstance(cut, int) for cut in cuts):
        return sorted(set(cuts))
    xp = numpy_of(*cuts)
    return list(xp.sort(xp.stack(xp.broadcast_arrays(*cuts)), axis=0))


def _maximum(a: Index, b: Index) -> Index:
    return numpy_of(a, b).maximum(a, b)


def _minimum(a: Index, b: Index) -> Index:
    return numpy_of(a, b).minimum(a, b)
