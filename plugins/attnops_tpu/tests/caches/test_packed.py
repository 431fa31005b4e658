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
    N = len(rows)
    cache: Any = SimpleNamespace(
        kv_heads=1, batch=B, length=16, slots=lambda: SimpleNamespace(of_rows=lambda row: None)
    )

    def run(rows: jax.Array) -> tuple[Any, ...]:
        query = jnp.arange(1, N + 1.0)[None, :, None, None] * jnp.ones((1, 1, H, 8))
        aval = jax.ShapeDtypeStruct((B, 16, 1, 8), jnp.float32)
        made = unpacked(FlashCall(OperationMetadata(block_q=bq), query, aval, aval, mask=Queries(rows)), cache)
        fields = made._replace(call=made.call.query, of_keys=jnp.zeros(made.of_keys is not None))
        out, lse = packed(made, made.call.query, made.call.query[..., 0].swapaxes(1, 2))
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
    np.testing.assert_array_equal(lse[0, 1], np.where(rows >= 0, np.arange(1, N + 1), -np.inf))


def test_the_most_tiles_of_packed_queries() -> None:
    for N in range(1, 12):
        for B in range(1, 5):
            for bq in (1, 3, 4):
                splits = [x for x in np.ndindex(*[N + 1] * B) if sum(x) == N]
                assert tiles_of(N, B, bq) == max(sum(-(-n // bq) for n in split) for split in splits)
