"""Tiles of queries by tiles of keys, and what interval arithmetic tells about each: empty, partial or full."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnops.masks.integers import minus, numpy_of
from attnops.typing import Array, BoolArray, Index, Leaf

if TYPE_CHECKING:
    from attnops.masks.base import Mask


class Coverage(enum.IntEnum):
    """How much of a tile a mask allows."""

    EMPTY = 0  # no query sees any key: the tile is skipped
    PARTIAL = 1  # the mask must be applied
    FULL = 2  # every query sees every key: nothing to mask


class CoverageBounds(NamedTuple):
    """What is certain about the `Coverage` of each tile of a grid: three-valued logic as two booleans per tile.

    Both arrays broadcast to [B, H, tiles of q, tiles of kv].

    Attributes:
        some: some query may see some key; False is certain.
        all: every query sees every key; True is certain.
    """

    some: BoolArray
    all: BoolArray

    def __and__(self, other: CoverageBounds) -> CoverageBounds:
        return CoverageBounds(self.some & other.some, self.all & other.all)

    def __or__(self, other: CoverageBounds) -> CoverageBounds:
        return CoverageBounds(self.some | other.some, self.all | other.all)

    def __invert__(self) -> CoverageBounds:
        # On arrays: ~True of Python's bool is -2.
        return CoverageBounds(np.True_ ^ self.all, np.True_ ^ self.some)

    def codes(self) -> Array:
        """The `Coverage` of each tile as int8, of the arrays' broadcast shape."""
        xp = numpy_of(self.some, self.all)
        # A tile without pairs is FULL and EMPTY at once; it counts as EMPTY.
        return xp.asarray(self.some).astype(np.int8) + xp.asarray(self.all & self.some).astype(np.int8)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles of queries by tiles of keys. Index arrays have shape [1, 1, tiles of q, 1] and [1, 1, 1, tiles of kv].

    Attributes:
        q_first: the first query of each tile.
        q_last: the last query of each tile.
        kv_first: the first key of each tile.
        kv_last: the last key of each tile.
        within: if given, only pairs with ``q - kv`` in this (lowest, highest) range count.
        of_positions: whether these are positions, whose differences may overflow int32, instead of indices.
    """

    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array
    within: tuple[Index, Index] | None = None
    of_positions: bool = False

    @classmethod
    def make(
        cls,
        q_starts: Array | list[int],
        block_q: int,
        q_stop: int,
        kv_starts: Array | list[int],
        block_k: int,
        kv_stop: int,
    ) -> Grid:
        """Tiles that begin at these indices and end after a block, or where the sequence does."""
        q = np.asarray(q_starts, np.int32).reshape(1, 1, -1, 1)
        kv = np.asarray(kv_starts, np.int32).reshape(1, 1, 1, -1)
        return cls(
            q, np.minimum(q + (block_q - 1), q_stop - 1), kv, np.minimum(kv + (block_k - 1), kv_stop - 1)
        )  # fmt: skip

    def difference(self) -> tuple[Index, Index]:
        """The lowest and the highest ``q - kv`` of the pairs in each tile; every number between occurs."""
        if self.within is not None:
            return self.within
        if self.of_positions:
            return minus(self.q_first, self.kv_last), minus(self.q_last, self.kv_first)
        return self.q_first - self.kv_last, self.q_last - self.kv_first

    def q_extent(self, values: Leaf) -> tuple[Array, Array]:
        """The minimum and maximum of ``values`` [B or 1, T] in each tile of queries, [B or 1, 1, tiles of q, 1]."""
        low, high = extents(values, self.q_first.reshape(-1), self.q_last.reshape(-1))
        return low[:, None, :, None], high[:, None, :, None]

    def kv_extent(self, values: Leaf) -> tuple[Array, Array]:
        """The minimum and maximum of ``values`` [B or 1, S] in each tile of keys, [B or 1, 1, 1, tiles of kv]."""
        low, high = extents(values, self.kv_first.reshape(-1), self.kv_last.reshape(-1))
        return low[:, None, None, :], high[:, None, None, :]


def extents(values: Leaf, first: Array, last: Array) -> tuple[Array, Array]:
    """The minimum and maximum of ``values`` [B or 1, length] from each ``first`` to its ``last``, [B or 1, tiles]."""
    check_by_token(values)
    block, length = int((last - first).max()) + 1, values.shape[1]
    if np.array_equal(first, np.arange(0, length, block)) and last[-1] == length - 1:
        xp = numpy_of(values)
        by_tile = xp.pad(values, ((0, 0), (0, -length % block)), mode="edge").reshape(-1, len(first), block)
    else:
        by_tile = values[:, np.minimum(first[:, None] + np.arange(block), last[:, None])]
    return by_tile.min(axis=-1), by_tile.max(axis=-1)


def check_by_token(values: Leaf) -> None:
    """Raise a `ValueError` unless an array of tokens has the shape [B or 1, length] that binding gives it."""
    if np.ndim(values) != 2:
        raise ValueError("an array of the mask does not have shape [B or 1, length] yet; call mask.bind(B, H, T, S)")


def equal_bounds(q_first: Array, q_last: Array, kv_first: Array, kv_last: Array) -> CoverageBounds:
    """Bounds for "the query's number equals the key's", from the lowest and highest number of each tile."""
    some = (q_first <= kv_last) & (kv_first <= q_last)
    return CoverageBounds(some, (q_first == q_last) & (kv_first == kv_last) & (q_first == kv_first))


def below_bounds(first: Array, last: Array, limit: Index) -> CoverageBounds:
    """Bounds for "the number is below ``limit``", from the lowest and highest number of each tile."""
    return CoverageBounds(first < limit, last < limit)


def tight_bounds(mask: Mask, grid: Grid) -> CoverageBounds:
    """`Mask.coverage_bounds` of a bound mask, with its bands (causal, windows) combined exactly.

    Three-valued logic alone makes ``Causal() | ~Causal()`` PARTIAL on the diagonal. Here the range of ``q - kv`` is
    split where a band begins or ends. Between two cuts each band is constant, and a tile combines the bounds of its
    intervals, so that the diagonal is FULL.
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
        low = lowest if start is None else numpy_of(lowest, start).maximum(lowest, start)
        high = highest if stop is None else numpy_of(highest, stop).minimum(highest, stop - 1)
        occurs = low <= high
        # An interval that does not occur in a tile is evaluated at its first number, and the result is ignored.
        bounds = mask.coverage_bounds(dataclasses.replace(grid, within=(low, numpy_of(low, high).maximum(low, high))))
        some = some | (occurs & bounds.some)
        every = every & (bounds.all | (np.True_ ^ occurs))
    return CoverageBounds(some, every)


def _sorted(cuts: list[Index]) -> list[Index]:
    if all(isinstance(cut, int) for cut in cuts):
        return sorted(set(cuts))
    xp = numpy_of(*cuts)
    return list(xp.sort(xp.stack(xp.broadcast_arrays(*cuts)), axis=0))
