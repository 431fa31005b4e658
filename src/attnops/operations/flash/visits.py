"""From a block map to lists of tiles: what a row of tiles visits, FULL ones first, then PARTIAL ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.grid import Coverage

State = TypeVar("State")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "start", "middle", "stop"],
    meta_fields=["any_full", "any_partial"],
)
@dataclasses.dataclass(frozen=True)
class Visits:
    """For each map and each of its rows: FULL tiles at ``columns[start:middle]``, PARTIAL at ``columns[middle:stop]``.

    Attributes:
        columns: [maps, entries] int32; rows follow one another.
        start: [maps, rows] int32.
        middle: [maps, rows] int32.
        stop: [maps, rows] int32.
        any_full: whether any tile may be FULL.
        any_partial: whether any tile may be PARTIAL.
    """

    columns: Any
    start: Any
    middle: Any
    stop: Any
    any_full: bool
    any_partial: bool


# Entries, up to which a list that must not differ by the mask has room for every tile.
_ROOMY: Final = 1 << 16


def visits(coverage: Any, is_data: bool = False) -> Visits:
    """The tiles to visit.

    Args:
        coverage: [maps, rows, columns] of `Coverage`. Of a numpy array only what is visited is stored; a traced one
            is sorted at run time, O(rows · columns) integers.
        is_data: whether masks that differ by numbers are to give lists of one shape.
    """
    if not isinstance(coverage, np.ndarray):
        return _traced(coverage)
    found = _known(coverage)
    if not is_data:
        return found
    every, used = coverage.shape[1] * coverage.shape[2], found.columns.shape[1]
    # Of more tiles than that, a power of two; else lists would grow with T · S.
    size = every if every <= _ROOMY else max(_ROOMY, 1 << (used - 1).bit_length())
    columns = np.pad(found.columns, ((0, 0), (0, size - used)))
    return dataclasses.replace(found, columns=columns, any_full=True, any_partial=True)


def for_row(v: Visits, m: Any, row: Any, step: Callable[[Any, State, bool], State], state: State) -> State:
    """Fold ``step(column, state, masked)`` over the tiles of one row that are not EMPTY."""

    def run(first: Any, last: Any, state: State, masked: bool) -> State:
        return lax.fori_loop(first, last, lambda e, s: step(v.columns[m, e], s, masked), state)

    start, middle, stop = v.start[m, row], v.middle[m, row], v.stop[m, row]
    if v.any_full:
        state = run(start, middle, state, False)
    if v.any_partial:
        state = run(middle, stop, state, True)
    return state


def _known(coverage: Any) -> Visits:
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
    return Visits(columns, start, middle, stop, bool(full.any()), bool(partial.any()))


def _traced(coverage: jax.Array) -> Visits:
    maps, rows, width = coverage.shape
    # FULL first, then PARTIAL, then EMPTY, in order of column within each.
    columns = jnp.argsort(-coverage, axis=-1, stable=True).astype(jnp.int32)
    start = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32) * width, (maps, rows))
    middle = start + (coverage == Coverage.FULL).sum(-1, dtype=jnp.int32)
    stop = middle + (coverage == Coverage.PARTIAL).sum(-1, dtype=jnp.int32)
    return Visits(columns.reshape(maps, rows * width), start, middle, stop, True, True)
