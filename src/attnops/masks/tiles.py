"""Tiles: which of them a mask leaves empty, partial or full, and the block maps that kernels go by."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks.base import Mask
from attnops.masks.integers import minus


class Coverage(enum.IntEnum):
    """What a mask says of a tile."""

    EMPTY = 0  # no query sees any key: not to be visited
    PARTIAL = 1  # the mask must be applied
    FULL = 2  # every query sees every key: nothing to mask


class TileCoverage(NamedTuple):
    """Three-valued logic over tiles, as two booleans each; arrays that broadcast to [B, H, tiles of q, tiles of kv].

    Attributes:
        some: some query may see some key; False is certain.
        all: every query sees every key; True is certain.
    """

    some: Any
    all: Any

    def __and__(self, other: TileCoverage) -> TileCoverage:
        return TileCoverage(self.some & other.some, self.all & other.all)

    def __or__(self, other: TileCoverage) -> TileCoverage:
        return TileCoverage(self.some | other.some, self.all | other.all)

    def __invert__(self) -> TileCoverage:
        # On arrays: ~True of Python's bool is -2.
        return TileCoverage(np.True_ ^ self.all, np.True_ ^ self.some)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles of queries by tiles of keys. Index arrays have shape [1, 1, tiles of q, 1] and [1, 1, 1, tiles of kv].

    Attributes:
        q_first: the first query of each tile.
        q_last: the last query of each tile.
        kv_first: the first key of each tile.
        kv_last: the last key of each tile.
        within: if given, only the pairs whose ``q - kv`` lies in this (lowest, highest) are asked about.
        of_positions: whether these are positions, whose differences int32 need not hold, in place of indices.
    """

    q_first: Any
    q_last: Any
    kv_first: Any
    kv_last: Any
    within: tuple[Any, Any] | None = None
    of_positions: bool = False

    @classmethod
    def make(cls, q_starts: Any, block_q: int, q_stop: int, kv_starts: Any, block_k: int, kv_stop: int) -> Grid:
        """Tiles that begin at these indices and end after a block, or where the sequence does."""
        q = np.asarray(q_starts, np.int32).reshape(1, 1, -1, 1)
        kv = np.asarray(kv_starts, np.int32).reshape(1, 1, 1, -1)
        return cls(
            q, np.minimum(q + (block_q - 1), q_stop - 1), kv, np.minimum(kv + (block_k - 1), kv_stop - 1)
        )  # fmt: skip

    def difference(self) -> tuple[Any, Any]:
        """The lowest and the highest ``q - kv`` of the pairs asked about; every number between occurs."""
        if self.within is not None:
            return self.within
        if self.of_positions:
            return minus(self.q_first, self.kv_last), minus(self.q_last, self.kv_first)
        return self.q_first - self.kv_last, self.q_last - self.kv_first

    def q_extent(self, values: Any) -> tuple[Any, Any]:
        """The least and the greatest of ``values`` [B or 1, T] in each tile of queries, [B or 1, 1, tiles of q, 1]."""
        low, high = _extent(values, self.q_first.reshape(-1), self.q_last.reshape(-1))
        return low[:, None, :, None], high[:, None, :, None]

    def kv_extent(self, values: Any) -> tuple[Any, Any]:
        """The least and the greatest of ``values`` [B or 1, S] in each tile of keys, [B or 1, 1, 1, tiles of kv]."""
        low, high = _extent(values, self.kv_first.reshape(-1), self.kv_last.reshape(-1))
        return low[:, None, None, :], high[:, None, None, :]


def _extent(values: Any, first: Any, last: Any) -> tuple[Any, Any]:
    check_by_token(values)
    block, length = int((last - first).max()) + 1, values.shape[1]
    if np.array_equal(first, np.arange(0, length, block)) and last[-1] == length - 1:
        xp = _numpy_of([values])
        tiles = xp.pad(values, ((0, 0), (0, -length % block)), mode="edge").reshape(-1, len(first), block)
    else:
        tiles = values[:, np.minimum(first[:, None] + np.arange(block), last[:, None])]
    return tiles.min(axis=-1), tiles.max(axis=-1)


def check_by_token(values: Any) -> None:
    """Raise a `ValueError` unless an array of tokens is laid out as [B or 1, length], as binding does."""
    if np.ndim(values) != 2:
        raise ValueError("an array of the mask is not laid out by token yet; bind(B, H, T, S) the mask first")


def mask_tiles(mask: Mask, grid: Grid) -> TileCoverage:
    """What a bound mask says of each tile of a grid.

    The parts that depend on ``q - kv`` alone (causal, windows) are combined exactly, not by three-valued logic: the
    numbers are cut where such a part begins or ends, between two cuts each is constant, and a tile is what its
    stretches are together. ``Causal() | ~Causal()`` is thus FULL on the diagonal too.
    """
    bands = list(mask.bands())
    if len(bands) < 2:
        return mask.tiles(grid)
    lowest, highest = grid.difference()
    some: Any = np.False_
    every: Any = np.True_
    cuts = _sorted([edge for low, high in bands for edge in (low, high + 1)])
    # What lies below the first cut, between two, and above the last.
    for below, above in zip([None, *cuts], [*cuts, None], strict=True):
        low = lowest if below is None else _maximum(lowest, below)
        high = highest if above is None else _minimum(highest, above - 1)
        occurs = low <= high
        # A stretch that does not occur is asked about at its first number, and the answer ignored.
        here = mask.tiles(dataclasses.replace(grid, within=(low, _maximum(low, high))))
        some = some | (occurs & here.some)
        every = every & (here.all | (np.True_ ^ occurs))
    return TileCoverage(some, every)


def same_number(q_first: Any, q_last: Any, kv_first: Any, kv_last: Any) -> TileCoverage:
    """Pairs of equal numbers, where queries have all those between two, and so have keys."""
    some = (q_first <= kv_last) & (kv_first <= q_last)
    return TileCoverage(some, (q_first == q_last) & (kv_first == kv_last) & (q_first == kv_first))


def below(first: Any, last: Any, limit: Any) -> TileCoverage:
    """Numbers from ``first`` to ``last`` that are below a limit."""
    return TileCoverage(first < limit, last < limit)


def _sorted(cuts: list[Any]) -> list[Any]:
    if all(isinstance(cut, int) for cut in cuts):
        return sorted(set(cuts))
    xp = _numpy_of(cuts)
    return list(xp.sort(xp.stack(xp.broadcast_arrays(*cuts)), axis=0))


def _maximum(a: Any, b: Any) -> Any:
    return _numpy_of([a, b]).maximum(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return _numpy_of([a, b]).minimum(a, b)


def _numpy_of(values: list[Any]) -> Any:
    """JAX's numpy where a value is JAX's, else numpy itself, so that what is known when tracing stays known."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


@dataclasses.dataclass(frozen=True)
class BlockMap:
    """Which tiles of a call a kernel visits, and where it must mask.

    Attributes:
        coverage: `Coverage` as int8 [B or 1, H or 1, tiles of q, tiles of kv]; numpy where the mask is known when
            tracing, else a JAX array.
        block_q: queries a tile; the last may be shorter.
        block_k: keys a tile; the last may be shorter.
    """

    coverage: Any
    block_q: int
    block_k: int

    @property
    def is_static(self) -> bool:
        """Whether the map is known when tracing."""
        return isinstance(self.coverage, np.ndarray)

    def transposed(self) -> Any:
        """The coverage by tiles of keys, then of queries: what a backward pass over keys goes by."""
        return self.coverage.swapaxes(2, 3)

    def count(self, coverage: Coverage) -> Any:
        """How many tiles are of one kind."""
        return (self.coverage == coverage).sum()


# Rows of tiles are done some at a time, so that the temporaries of a map of millions of tiles stay small.
_TILES_AT_ONCE = 1 << 20


def block_map(mask: Mask | None, shape: tuple[int, int, int, int], block_q: int, block_k: int) -> BlockMap:
    """The block map of a mask.

    Args:
        mask: bound or not; None for one that allows all.
        shape: (B, H, T, S).
        block_q: queries a tile.
        block_k: keys a tile.

    Returns:
        A map of O(T · S / (block_q · block_k)) bytes, times B or H where the mask differs by them.
    """
    B, H, T, S = shape
    rows, columns = -(-T // block_q), -(-S // block_k)
    if mask is None:
        return BlockMap(np.full((1, 1, rows, columns), Coverage.FULL, np.int8), block_q, block_k)
    bound = mask.bind(B, H, T, S)
    step = max(1, _TILES_AT_ONCE // columns)
    kv_starts = np.arange(columns) * block_k
    parts = []
    for row in range(0, rows, step):
        q_starts = np.arange(row, min(row + step, rows)) * block_q
        codes = _codes(mask_tiles(bound, Grid.make(q_starts, block_q, T, kv_starts, block_k, S)))
        # A mask of keys alone says the same of every row.
        parts.append(_numpy_of([codes]).broadcast_to(codes, (*codes.shape[:2], len(q_starts), columns)))
    codes = parts[0] if len(parts) == 1 else _numpy_of(parts).concatenate(parts, axis=2)
    return BlockMap(codes, block_q, block_k)


def _codes(tiles: TileCoverage) -> Any:
    xp = _numpy_of([tiles.some, tiles.all])
    # What is certain to be all is certain to be some.
    codes = xp.asarray(tiles.some).astype(np.int8) + xp.asarray(tiles.all & tiles.some).astype(np.int8)
    return codes


def one_tile(mask: Mask, q_range: tuple[int, int], kv_range: tuple[int, int]) -> Any:
    """See `Mask.coverage`."""
    for name, (start, stop) in (("q_range", q_range), ("kv_range", kv_range)):
        if not 0 <= start < stop:
            raise ValueError(f"{name}=({start}, {stop}) must hold at least one index, stop excluded, none below 0")
    grid = Grid.make([q_range[0]], q_range[1] - q_range[0], q_range[1], [kv_range[0]], kv_range[1] - kv_range[0],
                     kv_range[1])  # fmt: skip
    codes = _codes(mask_tiles(mask, grid))
    if isinstance(codes, jax.Array) or codes.size > 1:
        return codes[:, :, 0, 0]
    return Coverage(int(codes.reshape(())))
