"""Schedules have the active tiles of a mask alone, FULL ones first."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.masks import Causal, Chunked, Coverage, Mask, Segments, SlidingWindow, block_map
from attnops_triton.flash.tile_schedule import ScheduleLayout, TileSchedule, every_tile, layout_of, tile_schedule

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


def test_bits_of_every_active_tile_are_numbered_in_the_order_of_rows() -> None:
    coverage = np.array([[[[0, 1, 2], [1, 0, 1]]]], np.int8)
    asked: list[np.ndarray] = []

    def bits_of(*indices: np.ndarray) -> np.ndarray:
        asked.append(np.stack(indices))
        return np.zeros((len(indices[0]), 16, 1), np.int32)

    tiles = every_tile(coverage, bits_of)
    assert asked[0][2:].tolist() == [[0, 0, 1, 1], [1, 2, 0, 2]]
    numbers = np.asarray(tiles.numbers)
    assert numbers[coverage > 0].tolist() == [0, 1, 2, 3]
    assert every_tile(coverage).words is None
    every_tile(np.zeros_like(coverage), bits_of)
    assert asked[1].tolist() == [[0]] * 4, "there is at least one tile, since arrays have no length of 0"


def test_a_schedule_of_slices_under_vmap_is_that_of_each() -> None:
    coverage = np.random.default_rng(1).integers(0, 3, (2, 1, 4, 3)).astype(np.int8)
    one = tile_schedule(coverage, ScheduleLayout.LISTED)
    shared = one.fold(jax.tree.map(lambda x: False, one), 3, 2)
    assert shared.map_shape == (6, 1)
    assert listed(shared) == expected(coverage) * 3
    causal = tile_schedule(coverage[:1], ScheduleLayout.LISTED)
    assert causal.fold(jax.tree.map(lambda x: False, causal), 3, 2) is causal, "one map for all batches"
