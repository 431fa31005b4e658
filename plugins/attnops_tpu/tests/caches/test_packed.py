"""Packed rows as tiles of queries, held to a loop over the queries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata
from attnops.kernels import FlashCall
from attnops.masks import Full
from attnops_caches.masks import Packed
from attnops_tpu.caches.packed import Unpacked, packed, tiles_of, unpacked
from attnops_tpu.generations import target


class Queries(Packed):
    """The mask of packed queries whose rows are given."""

    def __init__(self, rows: jax.Array) -> None:
        object.__setattr__(self, "of_queries", rows)

    @property
    def q_rows(self) -> jax.Array:
        return self.of_queries  # type: ignore[attr-defined]

    def of_tiles(self, *given: Any) -> Full:
        return Full()


ROWS = {
    "rows of one tile and of several": [0] * 3 + [1] * 11 + [3] * 4,
    "padding at both ends, a row twice as long as a tile": [-1, -1, *[2] * 8, 0, -1],
    "single tokens": [3, 1, 0, 2],
    "no token": [-1] * 5,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.tier(every=2)
def test_each_query_is_in_a_tile_of_its_row(name: str) -> None:
    rows, B, bq, H = np.array(ROWS[name]), 4, 4, 2
    N, cache = len(rows), a_cache(B)

    def run(rows: jax.Array) -> tuple[Any, ...]:
        query = jnp.arange(1, N + 1.0)[None, :, None, None] * jnp.ones((1, 1, H, 8))
        aval = jax.ShapeDtypeStruct((B, 16, 1, 8), jnp.float32)
        (made,) = unpacked(FlashCall(OperationMetadata(block_q=bq), query, aval, aval, mask=Queries(rows)), cache)
        fields = made._replace(call=made.call.query, of_keys=jnp.zeros(made.of_keys is not None))
        out, lse = packed(made, made.call.query, 0.0), packed(made, made.call.query[..., 0], -np.inf)
        return fields, out, lse

    result, out, lse = jax.tree.map(np.asarray, jax.jit(run)(rows))
    assert isinstance(result, Unpacked)
    queries = result.call[:, :, 0, 0].astype(int) - 1  # the packed query of each place
    assert len(queries) == tiles_of(N, B, bq)
    assert len(result.of_keys) == (len(queries) >= B)
    has: list[set[int]] = [set() for _ in queries]
    for i, row in enumerate(rows):
        assert result.is_real[i] == (row >= 0)
        if row >= 0:
            assert queries[result.tile[i], result.place[i]] == i
            assert result.row[result.tile[i]] == row
            has[result.tile[i]].add(i)
    assert result.exists.tolist() == [bool(x) for x in has]
    # Places without a query repeat the last of the tile, so that they see no other keys.
    for tile, real in enumerate(has):
        assert not real or set(queries[tile]) == real
    runs = np.flatnonzero(np.diff(np.r_[-1, rows]) != 0)
    lengths = [n for i, n in zip(runs, np.diff(np.r_[runs, N]), strict=True) if rows[i] >= 0]
    assert sum(map(bool, has)) == sum(-(-n // bq) for n in lengths)
    np.testing.assert_array_equal(out[0, :, 0, 0], np.where(rows >= 0, np.arange(1, N + 1), 0))
    np.testing.assert_array_equal(lse[0, :, 1], np.where(rows >= 0, np.arange(1, N + 1), -np.inf))


def a_cache(B: int) -> Any:
    slots = SimpleNamespace(of_rows=lambda row: None)
    return SimpleNamespace(kv_heads=1, batch=B, length=16, slots=lambda: slots, is_latent=False, dtype="bfloat16")


# With 8 kv heads and 32 query heads tiles have 256 queries or 8.
SIZES = {
    "one of each": ([1, 300, 1, 25, 24], [1, 3]), "half of a tile each": ([150] * 4, [0, 1, 2, 3]),
    "few of many": ([30] * 16 + [1] * 16, []), "a quarter": ([70, 30, 30, 30, 30, 30, 30, 30, 30], [0]),
    "none": ([3] * 40, []), "all of one": ([0, 0, 1000], [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_rows_with_many_queries_have_large_tiles_as_far_as_there_are_any(name: str) -> None:
    sizes, large = SIZES[name]
    rows, B = np.repeat(np.arange(len(sizes)), sizes), len(sizes)
    N = len(rows)

    def run(rows: jax.Array) -> Any:
        query = (jnp.arange(1, N + 1)[None, :, None, None] * jnp.ones((1, 1, 32, 8))).astype(jnp.bfloat16)
        aval = jax.ShapeDtypeStruct((B, 16, 8, 8), jnp.float32)
        cache = a_cache(B)
        cache.kv_heads = 8
        with target("v6e"):
            made = unpacked(FlashCall(OperationMetadata(), query, aval, aval, mask=Queries(rows)), cache)
        return [(x.is_real, x.exists, packed(x, x.call.query, 0.0)) for x in made]

    small_tiles, large_tiles = jax.tree.map(np.asarray, jax.jit(run)(rows))
    np.testing.assert_array_equal(large_tiles[0], np.isin(rows, large))
    np.testing.assert_array_equal(small_tiles[0], ~large_tiles[0])
    assert large_tiles[1].sum() == sum(-(-sizes[row] // 256) for row in large)
    both = small_tiles[2] + large_tiles[2]
    np.testing.assert_array_equal(both[0, :, 0, 0], np.arange(1, N + 1).astype(jnp.bfloat16))


def test_the_most_tiles_of_packed_queries() -> None:
    for N in range(1, 12):
        for B in range(1, 5):
            for bq in (1, 3, 4):
                splits = [x for x in np.ndindex(*[N + 1] * B) if sum(x) == N]
                assert tiles_of(N, B, bq) == max(sum(-(-n // bq) for n in split) for split in splits)
