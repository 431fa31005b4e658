"""From a block map to lists of tiles: what a row of tiles visits, FULL ones first, then PARTIAL ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.tiles import Coverage

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

    columns: jax.Array
    start: jax.Array
    middle: jax.Array
    stop: jax.Array
    any_full: bool
    any_partial: bool


def visits(coverage: Any) -> Visits:
    """The tiles to visit.

    Args:
        coverage: [maps, rows, columns] of `Coverage`. Of a numpy array only what is visited is stored; a traced one
            is sorted at run time, O(rows · columns) integers.
    """
    return _known(coverage) if isinstance(coverage, np.ndarray) else _traced(coverage)


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
    int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    return Visits(
        int32(columns), int32(start), int32(start + n_full), int32(stop), bool(full.any()), bool(partial.any())
    )  # fmt: skip


def _traced(coverage: jax.Array) -> Visits:
    maps, rows, width = coverage.shape
    # FULL first, then PARTIAL, then EMPTY, in order of column within each.
    columns = jnp.argsort(-coverage, axis=-1, stable=True).astype(jnp.int32)
    start = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32) * width, (maps, rows))
    middle = start + (coverage == Coverage.FULL).sum(-1, dtype=jnp.int32)
    stop = middle + (coverage == Coverage.PARTIAL).sum(-1, dtype=jnp.int32)
    return Visits(columns.reshape(maps, rows * width), start, middle, stop, True, True)
