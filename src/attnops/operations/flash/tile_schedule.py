"""The active tiles of each row of a block map: FULL ones first, then PARTIAL ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.coverage import Coverage
from attnops.operations.flash.plan import Index
from attnops.typing import Array

State = TypeVar("State")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "start", "middle", "stop"],
    meta_fields=["any_full", "any_partial"],
)
@dataclasses.dataclass(frozen=True)
class NativeTileSchedule:
    """The active tiles of each map and row: FULL at ``columns[start:middle]``, PARTIAL at ``columns[middle:stop]``.

    Attributes:
        columns: [maps, entries] int32, row after row.
        start: [maps, rows] int32.
        middle: [maps, rows] int32.
        stop: [maps, rows] int32.
        any_full: whether any tile may be FULL.
        any_partial: whether any tile may be PARTIAL.
    """

    columns: Array
    start: Array
    middle: Array
    stop: Array
    any_full: bool
    any_partial: bool


# A list whose shape must not depend on the mask has room for every tile, up to this number of tiles.
_MAX_DENSE: Final = 1 << 16


def tile_schedule(coverage: Array, is_data: bool = False) -> NativeTileSchedule:
    """The active tiles of block maps.

    Args:
        coverage: [maps, rows, columns] of `Coverage`. For a numpy array only active tiles are stored; a traced array is
            sorted at run time, in O(rows · columns) integers.
        is_data: whether the lists must have one shape for all masks that differ only by numbers.
    """
    # One column: one loop for FULL and PARTIAL. XLA hoists work out of each loop, and two would repeat it in each row.
    is_single = coverage.shape[-1] == 1
    if not isinstance(coverage, np.ndarray):
        schedule = _traced(coverage.clip(max=int(Coverage.PARTIAL)) if is_single else coverage)
        return dataclasses.replace(schedule, any_full=not is_single)
    if is_single and is_data:
        coverage = coverage.clip(max=int(Coverage.PARTIAL))
    schedule = _known(coverage)
    if not is_data:
        return schedule
    tiles, active = coverage.shape[1] * coverage.shape[2], schedule.columns.shape[1]
    # Longer lists have a power of two of entries: with room for every tile they would grow with T · S.
    size = tiles if tiles <= _MAX_DENSE else max(_MAX_DENSE, 1 << (active - 1).bit_length())
    columns = np.zeros((len(schedule.columns), size), np.int32)  # faster than `np.pad`
    columns[:, :active] = schedule.columns
    return dataclasses.replace(schedule, columns=columns, any_full=not is_single, any_partial=True)


def for_active_tiles(
    schedule: NativeTileSchedule, m: Index, row: Index, step: Callable[[Index, State, bool], State], state: State
) -> State:
    """Fold ``step(column, state, masked)`` over the active tiles of row ``row`` of map ``m``."""

    def run(first: Index, last: Index, state: State, masked: bool) -> State:
        return lax.fori_loop(first, last, lambda e, s: step(schedule.columns[m, e], s, masked), state)

    start, middle, stop = schedule.start[m, row], schedule.middle[m, row], schedule.stop[m, row]
    if schedule.any_full:
        state = run(start, middle, state, False)
    if schedule.any_partial:
        state = run(middle, stop, state, True)
    return state


def _known(coverage: Array) -> NativeTileSchedule:
    full, partial = coverage == Coverage.FULL, coverage == Coverage.PARTIAL
    n_full, n_partial = full.sum(-1), partial.sum(-1)
    total = (n_full + n_partial).sum(-1)
    stop = np.cumsum(n_full + n_partial, axis=-1)
    start = stop - n_full - n_partial
    columns = np.zeros((len(coverage), max(int(total.max()), 1)), np.int32)
    for m in range(len(coverage)):
        both = np.concatenate([full[m], partial[m]], axis=-1)
        columns[m, : total[m]] = np.nonzero(both)[1] % coverage.shape[-1]
    start, middle, stop = (x.astype(np.int32) for x in (start, start + n_full, stop))
    return NativeTileSchedule(columns, start, middle, stop, bool(full.any()), bool(partial.any()))


def _traced(coverage: jax.Array) -> NativeTileSchedule:
    maps, rows, width = coverage.shape
    # FULL first, then PARTIAL, then EMPTY, in order of column within each.
    columns = jnp.argsort(-coverage, axis=-1, stable=True).astype(jnp.int32)
    start = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32) * width, (maps, rows))
    middle = start + (coverage == Coverage.FULL).sum(-1, dtype=jnp.int32)
    stop = middle + (coverage == Coverage.PARTIAL).sum(-1, dtype=jnp.int32)
    return NativeTileSchedule(columns.reshape(maps, rows * width), start, middle, stop, True, True)
