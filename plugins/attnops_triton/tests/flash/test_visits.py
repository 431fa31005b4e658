"""Kernels visit the tiles that a mask does not leave empty, FULL ones first, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attnops_triton.flash.visits import Visits, visits

from attnops.masks import Causal, Chunked, Coverage, Mask, Segments, SlidingWindow, block_map

MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(40, 0),
    "chunked": Causal() & Chunked(32),
    "documents": Causal() & Segments(np.repeat([0, 1, 2], [20, 50, 26])),
    "documents that return": Segments(np.repeat([0, 1, 0], [40, 30, 26])),
}


def listed(found: Visits) -> list[list[tuple[list[int], list[int]]]]:
    """For each map and row the FULL columns and the PARTIAL ones."""
    maps = []
    for m in range(found.maps[0] * found.maps[1]):
        rows = []
        for row in range(found.rows):
            at = m * found.rows + row
            a, b, c, d = found.constant or np.asarray(found.ranges).reshape(-1, 4)[at].tolist()
            columns = list(range(1000))
            if found.columns is not None:
                columns = np.asarray(found.columns).reshape(-1, found.width)[at].tolist()
            rows.append((columns[a:b], columns[c:d]))
        maps.append(rows)
    return maps


def expected(coverage: np.ndarray) -> list[list[tuple[list[int], list[int]]]]:
    kinds = Coverage.FULL, Coverage.PARTIAL
    flat = coverage.reshape(-1, *coverage.shape[2:])
    return [[tuple(np.flatnonzero(row == kind).tolist() for kind in kinds) for row in one] for one in flat]


@pytest.mark.parametrize("traced", [False, True])
def test_visits_of_random_coverage_are_its_tiles_that_are_not_empty(traced: bool) -> None:
    coverage = np.random.default_rng(0).integers(0, 3, (2, 3, 7, 5)).astype(np.int8)
    coverage[0, 0, 2] = coverage[1, 2] = Coverage.EMPTY
    found = jax.jit(visits)(jnp.asarray(coverage)) if traced else visits(coverage)
    assert listed(found) == expected(coverage)


@pytest.mark.parametrize("name", MASKS)
def test_visits_of_a_mask_are_its_tiles_that_are_not_empty(name: str) -> None:
    mask: Mask = MASKS[name]
    coverage = block_map(mask, (1, 1, 96, 96), 16, 16).coverage
    assert listed(visits(coverage)) == expected(coverage)
    transposed = coverage.swapaxes(2, 3)
    assert listed(visits(transposed)) == expected(transposed)


def test_what_needs_no_list_has_none() -> None:
    def of(mask: Mask | None) -> Visits:
        return visits(block_map(mask, (1, 1, 4096, 4096), 64, 64).coverage)

    assert of(None).constant == (0, 64, 0, 0)
    assert of(Causal()).columns is None
    assert of(Causal() & SlidingWindow(255, 0)).columns is None or of(Causal() & SlidingWindow(255, 0)).width <= 6
