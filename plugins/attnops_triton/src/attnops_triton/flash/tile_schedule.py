"""Tile schedules: for each row of a block map its active tiles, FULL ones first, then PARTIAL ones."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.kernels import Foldable
from attnops.masks import Causal, Coverage, Mask
from attnops_triton.flash.bits import BitsFunction

if TYPE_CHECKING:
    from attnops.typing import Array, Leaf, NumpyArray, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ranges", "columns", "words", "first"],
    meta_fields=["map_shape", "rows", "width", "constant"],
)
@dataclasses.dataclass(frozen=True)
class TileSchedule(Foldable):
    """The active tiles of each row. A pytree.

    The kind of mask decides which arrays there are (`ScheduleLayout`), so that one kernel serves all lengths.

    Attributes:
        ranges: int32 [maps · rows · 4], start and stop of FULL, start and stop of PARTIAL; None with ``constant``.
        columns: int32 [maps · rows · width], the lists of columns that ``ranges`` indexes; None if ``ranges`` has
            columns.
        map_shape: the numbers of batches and heads of the block map, each 1 or all; ``maps`` is their product.
        rows: rows of a map.
        width: columns listed per row; 0 without a list.
        constant: without a mask, the four numbers of ``ranges``, the same for every row; otherwise None.
        words: int32 [tiles, bq, words per query], the bits of PARTIAL tiles in the order of rows; None unless the plan
            has a bit mask.
        first: int32 [maps · rows], the index of a row's first PARTIAL tile in ``words``.
    """

    ranges: Array | None
    columns: Array | None
    map_shape: tuple[int, int]
    rows: int
    width: int
    constant: tuple[int, int, int, int] | None
    words: Array | None = None
    first: Array | None = None

    def fold(self, batched: PyTree, n: int, B: int) -> TileSchedule:
        """The schedules of ``n`` slices as one, for `attnops.kernels.folds_batch`."""
        is_shared = not any((batched.ranges, batched.columns, batched.words, batched.first))
        if is_shared and (self.map_shape[0] == 1 or self.constant is not None):
            return self

        def folded(x: Leaf, is_batched: PyTree) -> Leaf:
            if x is None:
                return None
            x = x.reshape(*([n] if is_batched else []), self.map_shape[0], -1)
            return jnp.broadcast_to(x if is_batched else x[None], (n, B, x.shape[-1])).reshape(-1)

        words, first = self.words, folded(self.first, batched.first)
        if words is not None and batched.words:
            # The tiles of all slices are concatenated.
            first = (first.reshape(n, -1) + np.arange(n)[:, None] * words.shape[1]).reshape(-1)
            words = words.reshape(-1, *words.shape[2:])
        return dataclasses.replace(
            self,
            ranges=folded(self.ranges, batched.ranges),
            columns=folded(self.columns, batched.columns),
            map_shape=(n * B, self.map_shape[1]),
            words=words,
            first=first,
        )


class EveryTile(NamedTuple):
    """The coverage of every tile."""

    coverage: Array  # int8 [B or 1, H or 1, tiles of q, tiles of kv]
    # int32 [tiles, bq, words per query], the bits of active tiles; None unless the plan has a bit mask.
    words: Array | None
    numbers: Array | None  # int32 [B or 1, H or 1, tiles of q, tiles of kv], the index of a tile in ``words``


class ScheduleLayout(enum.Enum):
    """How a schedule names the active tiles of a row."""

    CONSTANT = "two ranges of columns, the same for all rows"
    RANGES = "two ranges of columns for each row"
    LISTED = "a list of columns for each row"


def layout_of(mask: Mask | None) -> ScheduleLayout:
    """The layout for a kind of mask.

    A causal mask needs no list: in each row its FULL tiles are contiguous, and so are its PARTIAL tiles.
    """
    if mask is None:
        return ScheduleLayout.CONSTANT
    return ScheduleLayout.RANGES if type(mask) is Causal else ScheduleLayout.LISTED


def tile_schedule(
    coverage: Array, layout: ScheduleLayout, bits_of: BitsFunction | None = None, by_key: bool = False
) -> TileSchedule:
    """The schedule of a block map.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`. A NumPy array if the mask is known when
            tracing. A traced array is sorted at run time, in O(rows · columns) integers.
        layout: the layout of the mask. Traced coverage, and columns that are not contiguous, always have lists.
        bits_of: computes the bits of tiles, for a bit mask; None for others. With traced coverage it computes the bits
            of all tiles.
        by_key: whether rows are tiles of keys and columns are tiles of queries, rather than the reverse.
    """
    if bits_of is not None:
        by_query = bits_of
        bits_of = (lambda b, h, row, column: by_query(b, h, column, row)) if by_key else by_query
    return _known(coverage, layout, bits_of) if isinstance(coverage, np.ndarray) else _traced(coverage, bits_of)


def _known(coverage: NumpyArray, layout: ScheduleLayout, bits_of: BitsFunction | None) -> TileSchedule:
    *maps, rows, columns = coverage.shape
    schedule = _static(coverage.reshape(-1, rows, columns), (maps[0], maps[1]), layout)
    if bits_of is None:
        return schedule
    is_partial = coverage == Coverage.PARTIAL
    count = is_partial.sum(axis=3).reshape(-1)
    first = jnp.asarray(np.cumsum(count) - count, jnp.int32)
    indices = np.nonzero(is_partial) if is_partial.any() else [np.zeros(1, np.int32)] * 4
    return dataclasses.replace(schedule, words=bits_of(*indices), first=first)


def _traced(coverage: Array, bits_of: BitsFunction | None) -> TileSchedule:
    *maps, rows, columns = coverage.shape
    flat = coverage.reshape(-1, rows, columns)
    n_full = (flat == Coverage.FULL).sum(axis=2, dtype=jnp.int32)
    n_partial = (flat == Coverage.PARTIAL).sum(axis=2, dtype=jnp.int32)
    ranges = jnp.stack([jnp.zeros_like(n_full), n_full, n_full, n_full + n_partial], axis=2)
    order = jnp.argsort(_rank(flat), axis=2, stable=True).astype(jnp.int32)
    words = first = None
    if bits_of is not None:
        b, h, row, _ = (x.reshape(-1) for x in np.indices(coverage.shape, np.int32))
        words = bits_of(b, h, row, order.reshape(-1))
        first = (n_full + (np.arange(n_full.size, dtype=np.int32) * columns).reshape(n_full.shape)).reshape(-1)
    return TileSchedule(
        ranges.reshape(-1), order.reshape(-1), (maps[0], maps[1]), rows, columns, None, words, first
    )  # fmt: skip


def every_tile(coverage: Array, bits_of: BitsFunction | None = None) -> EveryTile:
    """The coverage of every tile of a block map, and the bits of active tiles.

    Args:
        coverage: `attnops.masks.Coverage` of each tile, [batches, heads, tiles of queries, tiles of keys].
        bits_of: computes the bits of tiles, for a bit mask; None for others.
    """
    if bits_of is None:
        return EveryTile(jnp.asarray(coverage), None, None)
    active = coverage > 0 if isinstance(coverage, np.ndarray) else np.ones(coverage.shape, bool)
    numbers = np.maximum(np.cumsum(active.reshape(-1)) - 1, 0).reshape(active.shape)
    indices = np.nonzero(active) if active.any() else [np.zeros(1, np.int32)] * 4
    return EveryTile(jnp.asarray(coverage), bits_of(*indices), jnp.asarray(numbers, jnp.int32))


def _static(coverage: NumpyArray, maps: tuple[int, int], layout: ScheduleLayout) -> TileSchedule:
    rows = coverage.shape[1]
    is_full, is_partial = coverage == Coverage.FULL, coverage == Coverage.PARTIAL
    column_ranges = [_column_range(kind) for kind in (is_full, is_partial)]
    if layout is not ScheduleLayout.LISTED and all(contiguous for _, _, contiguous in column_ranges):
        bounds = [bound for start, stop, _ in column_ranges for bound in (start, stop)]
        ranges = np.stack(bounds, axis=2).astype(np.int32)
        if layout is ScheduleLayout.CONSTANT:
            a, b, c, d = (int(x) for x in ranges.reshape(-1, 4)[0])
            return TileSchedule(None, None, maps, rows, 0, (a, b, c, d))
        return TileSchedule(jnp.asarray(ranges.reshape(-1)), None, maps, rows, 0, None)
    n_full, n_partial = is_full.sum(axis=2), is_partial.sum(axis=2)
    width = max(1, int((n_full + n_partial).max()))
    order = np.argsort(_rank(coverage), axis=2, kind="stable")[..., :width]
    ranges = np.stack([np.zeros_like(n_full), n_full, n_full, n_full + n_partial], axis=2)
    flat_ranges, columns = (jnp.asarray(x.reshape(-1).astype(np.int32)) for x in (ranges, order))
    return TileSchedule(flat_ranges, columns, maps, rows, width, None)


def _column_range(kind: NumpyArray) -> tuple[NumpyArray, NumpyArray, bool]:
    """The start and stop of the columns of one kind in each row, and whether they are contiguous in all rows."""
    count = kind.sum(axis=2)
    start = np.where(count > 0, kind.argmax(axis=2), 0)
    stop = np.where(count > 0, kind.shape[2] - kind[..., ::-1].argmax(axis=2), 0)
    return start, stop, bool((stop - start == count).all())


def _rank(coverage: Array) -> Array:
    """A sort key: FULL tiles come first, then PARTIAL, then EMPTY tiles."""
    return int(Coverage.FULL) - coverage


class TileSchedules(NamedTuple):
    """The schedules of all kernels."""

    forward: TileSchedule  # by tiles of queries
    # By tiles of queries, for dq; None if it equals ``forward``, or if the kernel for dk and dv adds dq.
    by_query: TileSchedule | None
    by_key: TileSchedule  # by tiles of keys
    by_score: EveryTile | None  # every tile, for the gradients of an array or table bias; None without one
