"""The slots of a cache's rows as values by row."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from attnops.kernels import of_mask
from attnops.masks import Causal, Chunked, Coverage, Mask, block_map
from attnops_caches import Cache, DenseCache, PagedCache, WindowCache
from attnops_caches.masks.slots import AtSlots, Held, by_arrays, without_table

LENGTHS, STARTS = np.array([0, 5, 17, 24]), np.array([0, 2, 20, 3])
OPTIONS = {"batch": 4, "kv_heads": 1, "head_dim": 1}
TABLE = np.array([[-1] * 6, [0, 1, 2, -1, -1, -1], [3, -1, 4, 99, 5, -1], [6, 7, -1, 8, 9, 10]])


def dense() -> Cache:
    return DenseCache.create(length=24, **OPTIONS)  # type: ignore[arg-type]


def paged() -> Cache:
    return PagedCache.create(pages=11, page_size=4, max_pages=6, table=jnp.asarray(TABLE), **OPTIONS)  # type: ignore[arg-type]


def ring() -> Cache:
    # Index 24 was written and taken back: it still is in the slot of index 13.
    cache = WindowCache.create(window=9, max_append=3, **OPTIONS)  # type: ignore[arg-type]
    return dataclasses.replace(cache, written=jnp.asarray([0, 5, 17, 25]))


def filled(cache: Cache) -> Cache:
    return dataclasses.replace(cache, lengths=jnp.asarray(LENGTHS), starts=jnp.asarray(STARTS))


def index_of(cache: Cache, row: int, slot: int) -> int:
    """The index of the token in a slot; negative for none."""
    if isinstance(cache, WindowCache):
        return max((i for i in range(int(cache.written[row])) if i % cache.length == slot), default=-1)
    if isinstance(cache, PagedCache) and not 0 <= TABLE[row, slot // 4] < 11:
        return -1
    return slot


@pytest.mark.parametrize("make", [dense, paged, ring])
@pytest.mark.slow
def test_positions_and_what_is_held(make: object) -> None:
    cache = filled(make())  # type: ignore[operator]
    index = np.array([[index_of(cache, b, s) for s in range(cache.length)] for b in range(4)])
    expected = (index >= STARTS[:, None]) & (index >= 0) & (index < LENGTHS[:, None])
    positions, held = cache.positions()
    np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(positions[held], (index - STARTS[:, None])[expected])


@pytest.mark.parametrize("make", [dense, paged, ring])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_coverage_of_tiles_is_that_of_arrays_and_exact_for_what_is_held(make: object, size: int) -> None:
    cache = filled(make())  # type: ignore[operator]
    shape = 4, 1, 2, cache.length
    q_positions = jnp.asarray([[-1, -1], [1, 2], [-1, 0], [19, 20]])
    held = Held(q_positions, cache.slots())
    tiles = np.asarray(block_map(held, shape, 1, size).coverage)
    seen = np.pad(np.asarray(held.dense(*shape)), [(0, 0)] * 3 + [(0, -cache.length % size)], mode="edge")
    seen = seen.reshape(*seen.shape[:3], -1, size)
    np.testing.assert_array_equal(tiles == Coverage.EMPTY, ~seen.any(-1))
    np.testing.assert_array_equal(tiles == Coverage.FULL, seen.all(-1))
    for mask in (Causal(), Chunked(5)):
        bound = AtSlots(mask, q_positions, cache.slots().without_pages()).bind(*shape)
        np.testing.assert_array_equal(block_map(bound, shape, 2, size).coverage,
                                      block_map(by_arrays(bound), shape, 2, size).coverage)  # fmt: skip
        np.testing.assert_array_equal(bound.dense(*shape), by_arrays(bound).dense(*shape))


@pytest.mark.slow
def test_numbers_of_keys_are_computed_on_tiles_of_one_row() -> None:
    def axes(mask: Mask, by_row: bool) -> list[set[str]]:
        return [set(x) for x in of_mask(mask, by_row).function.values if "kv" in x]

    for make in (dense, paged, ring):
        cache = filled(make())
        q_positions = jnp.zeros((4, 2), jnp.int32)
        positional = AtSlots(Chunked(5), q_positions, cache.slots().without_pages()).bind(4, 1, 2, cache.length)
        mask = positional & Held(q_positions, cache.slots())
        whole, slots = without_table(mask)
        assert axes(whole, False)
        assert not axes(whole, True)
        if slots is not None:
            assert axes(mask, True) == [{"b", "kv"}]
            np.testing.assert_array_equal(slots.exists, (TABLE >= 0) & (TABLE < 11))
