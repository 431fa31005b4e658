"""Schedules have the active tiles of a mask alone, FULL ones first."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.masks import Causal, Chunked, Coverage, Mask, Segments, SlidingWindow, block_map
from attnops_triton.flash.tile_schedule import ScheduleLayout, TileSchedule, layout_of, tile_schedule

MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(40, 0),
    "chunked": Causal() & Chunked(32),
    "documents": Causal() & Segments(np.repeat([0, 1, 2], [20, 50, 26])),
    "documents that return": Segments(np.repeat([0, 1, 0], [40, 30, 26])),
}


def listed(schedule: TileSchedule) -> list[list[tuple[list[int], list[int]]]]:
    """For each map and row the FULL columns and the PARTIAL ones."""
    maps = []
    for m in range(schedule.map_shape[0] * schedule.map_shape[1]):
        rows = []
        for row in range(schedule.rows):
            at = m * schedule.rows + row
            a, b, c, d = schedule.constant or np.asarray(schedule.ranges).reshape(-1, 4)[at].tolist()
            columns = list(range(1000))
            if schedule.columns is not None:
                columns = np.asarray(schedule.columns).reshape(-1, schedule.width)[at].tolist()
            rows.append((columns[a:b], columns[c:d]))
        maps.append(rows)
    return maps


def expected(coverage: np.ndarray) -> list[list[tuple[list[int], list[int]]]]:
    kinds = Coverage.FULL, Coverage.PARTIAL
    flat = coverage.reshape(-1, *coverage.shape[2:])
    return [[tuple(np.flatnonzero(row == kind).tolist() for kind in kinds) for row in one] for one in flat]


@pytest.mark.parametrize("traced", [False, True])
def test_schedules_of_random_coverage_are_its_tiles_that_are_not_empty(traced: bool) -> None:
    coverage = np.random.default_rng(0).integers(0, 3, (2, 3, 7, 5)).astype(np.int8)
    coverage[0, 0, 2] = coverage[1, 2] = Coverage.EMPTY
    made = functools.partial(tile_schedule, layout=ScheduleLayout.LISTED)
    schedule = jax.jit(made)(jnp.asarray(coverage)) if traced else made(coverage)
    assert listed(schedule) == expected(coverage)


@pytest.mark.parametrize("name", MASKS)
def test_the_schedule_of_a_mask_are_its_tiles_that_are_not_empty(name: str) -> None:
    mask: Mask = MASKS[name]
    coverage = block_map(mask, (1, 1, 96, 96), 16, 16).coverage
    assert listed(tile_schedule(coverage, layout_of(mask))) == expected(coverage)
    transposed = coverage.swapaxes(2, 3)
    assert listed(tile_schedule(transposed, layout_of(mask))) == expected(transposed)


@pytest.mark.slow
def test_only_masks_other_than_causal_have_a_list() -> None:
    def of(mask: Mask | None) -> TileSchedule:
        return tile_schedule(block_map(mask, (1, 1, 4096, 4096), 64, 64).coverage, layout_of(mask))

    assert of(None).constant == (0, 64, 0, 0)
    assert of(Causal()).columns is None
    assert of(Causal() & SlidingWindow(255, 0)).width <= 6
