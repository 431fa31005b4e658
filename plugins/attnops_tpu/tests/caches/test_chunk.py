"""Chunks of a tile: which scores of them are masked, and the values that a mask is given."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from attnops.kernels import describe
from attnops.masks import Causal, KeyPadding, Mask
from attnops_tpu.caches.between import Between
from attnops_tpu.caches.chunk import Chunk
from attnops_tpu.caches.operands import Kind, values
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import Tile
from attnops_tpu.caches.tile_sizes import ranges, reads_a_tile


class Buffer:
    """A NumPy array that is indexed as a reference is."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape = x, x.shape

    def __getitem__(self, at: Any) -> np.ndarray:
        at = at if isinstance(at, tuple) else (at,)
        return self.x[tuple(slice(i.start, i.start + i.size) if hasattr(i, "size") else i for i in at)]


def with_mask(plan: Callable[..., CachePlan], mask: Mask | None, **fields: int) -> CachePlan:
    sizes = plan(**fields)
    bound = None if mask is None else mask.bind(sizes.B, sizes.H, sizes.T, sizes.S)
    return plan(**fields, scoring=describe((sizes.T, sizes.S), bound, None, None, 0.0, False, by_row=True))


def visible(plan: CachePlan, item: int, number: int, start: int, size: int, head: int = 1, **given: Any) -> np.ndarray:
    """[rows, size]; asserts that it is the transpose of what a plan with transposed scores has, in two parts."""
    rows = chunk_of(plan, item, number, start, size, slice(0, plan.R), head, **given)
    columns = dataclasses.replace(plan, transposed=True)
    cuts = [0, plan.R // 2, plan.R]
    parts = [chunk_of(columns, item, number, start, size, slice(*at), head, **given) for at in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).T, rows)
    return rows


def chunk_of(
    plan: CachePlan, item: int, number: int, start: int, size: int, at: slice, head: int, **given: Any
) -> np.ndarray:
    refs: Any = SimpleNamespace(**{"missing": None, "by_key_buffer": None, **given})
    full = np.asarray(given.get("is_full", False))
    tile = Tile(*map(np.int32, (item, item // plan.nq, item // plan.nq, number, 0, plan.units)), full)  # type: ignore[arg-type]
    chunk = Chunk(plan, refs, tile, 1, head, start, size, Between([], 1), at)  # type: ignore[arg-type]
    return np.asarray(jax.jit(chunk.visible)())


def test_rows_are_the_queries_of_each_head_and_columns_slots_of_the_cache(
    cache_plan: Callable[..., CachePlan],
) -> None:
    plan = with_mask(cache_plan, Causal(), T=6, bq=3, S=64)
    seen = np.asarray(Causal().bind(3, 4, 6, 64).dense(3, 4, 6, 64))[0, 0]
    item, number = 3, 3  # the second tile of queries of row 1; slots 48 to 63
    result = visible(plan, item, number, 8, 8)
    assert result.shape == (plan.G * 3, 8)
    np.testing.assert_array_equal(result, np.tile(seen[3:6, 56:64], (plan.G, 1)))


def test_slots_beyond_the_rows_end_and_of_missing_pages_are_masked(
    cache_plan: Callable[..., CachePlan],
) -> None:
    plan = with_mask(cache_plan, None, S=60)
    np.testing.assert_array_equal(visible(plan, 0, 3, 8, 8), np.tile(np.arange(8) < 4, (plan.R, 1)))
    present = np.ones((8, 16), np.int32)
    present[:, 4:8] = 0
    missing = SimpleNamespace(present=Buffer(present))
    np.testing.assert_array_equal(visible(plan, 0, 0, 0, 16, missing=missing)[0], present[0] == 1)
    # What was not transferred is not looked at.
    none = Buffer(np.zeros((2, 1, 16), np.int32))
    assert visible(plan, 0, 0, 0, 16, missing=missing, is_full=True, by_key_buffer=none).all()


def test_values_by_key_are_those_of_the_chunk_in_the_tiles_buffer(cache_plan: Callable[..., CachePlan]) -> None:
    is_token = np.random.default_rng(0).random((3, 64)) < 0.5
    plan = with_mask(cache_plan, KeyPadding(is_token), T=6, bq=3)
    (value,) = (value for value in values(plan) if value.kind is Kind.BY_KEY)
    tiles = np.zeros((2, 1, 16), np.int32)
    tiles[1, value.place] = is_token[1, 32:48]
    are_queries = SimpleNamespace(by_row=[Buffer(np.ones((1, plan.R, 128), np.int32))])
    by_row = [Buffer(np.ones((1, 1, 128), np.int32))]
    result = visible(plan, 2, 2, 4, 8, by_key_buffer=Buffer(tiles), state=are_queries, by_row=by_row)
    np.testing.assert_array_equal(result, np.tile(is_token[1, 36:44], (plan.R, 1)))


@pytest.mark.parametrize(("bk", "chunk"), [(16, 16), (2048, 1024), (1280, 512), (100, 40)])
def test_chunks_and_their_reads_cover_a_tile_once(bk: int, chunk: int) -> None:
    keys: list[int] = []
    reads = 0
    for start, size in ranges(bk, chunk):
        assert size <= chunk
        for first, read in ranges(size, 128):
            keys += range(start + first, start + first + read)
            reads += 1
    assert keys == list(range(bk))
    # Of keys and of values, of each head.
    assert reads_a_tile(3, bk, chunk) == 6 * reads
