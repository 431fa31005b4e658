"""What must not change the result of a call over a cache: where tokens lie, and how they came there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, SlidingWindow
from attnops_caches import DenseCache, PagedCache, PagePool, Quantized, Rows, WindowCache

B, H, K, D, PAGE, SLOTS = 3, 4, 2, 8, 4, 24
TABLE = np.array([[5, 1, 7, 2, 12, 16], [0, 3, 6, 4, 13, 17], [11, 10, 9, 8, 14, 15]], np.int32)
OPTIONS: dict[str, Any] = {"kv_heads": K, "head_dim": D, "dtype": jnp.float32, "batch": B}
INT8, CAUSAL = Quantized("int8"), Causal()


@pytest.fixture(params=["flash", pytest.param("vanilla", marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def operation(request: pytest.FixtureRequest) -> Any:
    """In place, and through `read`; in tiles of 8 keys."""
    metadata = OperationMetadata(on_unsupported="error", block_q=8, block_k=8)
    return OperationRegistry.create(f"attnops:{request.param}", metadata)


def draw(T: int, seed: int = 0, heads: int = K) -> Any:
    return np.random.default_rng(seed).normal(size=(B, T, heads, D)).astype(np.float32)


def dense(codec: Quantized | None = None, **options: Any) -> DenseCache:
    return DenseCache.create(length=SLOTS, codec=codec, **OPTIONS | options)


def paged(table: Any = TABLE, codec: Quantized | None = None, page: int = PAGE, **options: Any) -> PagedCache:
    return PagedCache.create(
        pages=B * SLOTS // page, page_size=page, max_pages=np.shape(table)[1], table=np.asarray(table), codec=codec,
        **OPTIONS | options,
    )  # fmt: skip


def filled(cache: Any, T: int = 13, lengths: Any = (13, 6, 9)) -> Any:
    """With tokens of the same values for every storage."""
    return append(cache, draw(T, 1), draw(T, 2), np.array(lengths))


@jax.jit
def append(cache: Any, key: Any, value: Any, lengths: Any) -> Any:
    return cache.append(key, value, lengths)


@functools.partial(jax.jit, static_argnums=0)
def call(operation: Any, cache: Any, query: Any, query_lengths: Any = None, mask: Any = CAUSAL) -> Any:
    result = operation(query, cache, mask=mask, query_lengths=query_lengths, return_lse=True)
    return result.attention_outputs, result.logsumexp


@functools.partial(jax.jit, static_argnums=0)
def step(
    operation: Any,
    cache: Any,
    query: Any,
    key: Any,
    value: Any,
    lengths: Any = None,
    rows: Any = None,
    mask: Any = CAUSAL,
) -> Any:
    options = {"mask": mask, "query_lengths": lengths, "rows": rows, "return_lse": True}
    result, cache = operation.step(query, key, value, cache, **options)
    return result.attention_outputs, result.logsumexp, cache


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_near(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("codec", [None, INT8], ids=str)
@pytest.mark.slow
def test_pages_in_any_order(operation: Any, codec: Quantized | None) -> None:
    other = np.random.default_rng(0).permutation(TABLE.size)[TABLE]
    query = draw(3, heads=H)
    assert_same(*(call(operation, filled(paged(table, codec)), query) for table in (TABLE, other)))


@pytest.mark.parametrize("page", [1, 2, 12])
@pytest.mark.slow
def test_pages_of_any_size_equal_a_dense_cache(operation: Any, page: int) -> None:
    most = SLOTS // page
    table = np.random.default_rng(1).permutation(B * most).reshape(B, most)
    query = draw(3, heads=H)
    assert_near(call(operation, filled(paged(table, page=page)), query), call(operation, filled(dense()), query))


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, paged, lambda: WindowCache.create(window=6, max_append=12, **OPTIONS)])
@pytest.mark.tier(every=4)
def test_one_prompt_equals_its_chunks(operation: Any, make: Any) -> None:
    query, key, value = draw(12, 3, H), draw(12, 4), draw(12, 5)
    out, lse, whole = step(operation, make(), query, key, value)
    cache, outs, lses = make(), [], []
    for first, T in ((0, 4), (4, 7), (11, 1)):
        at = slice(first, first + T)
        chunk, chunk_lse, cache = step(operation, cache, query[:, at], key[:, at], value[:, at])
        outs.append(chunk)
        lses.append(chunk_lse)
    assert_near((np.concatenate(outs, 1), np.concatenate(lses, 2)), (out, lse))
    assert_same(jax.tree.leaves(cache), jax.tree.leaves(whole))


@pytest.mark.slow
def test_a_ring_equals_a_dense_cache_under_its_window(operation: Any) -> None:
    ring, full = WindowCache.create(window=5, max_append=3, **OPTIONS), dense()
    for i, (T, lengths) in enumerate([(3, (3, 2, 0)), (3, (3, 1, 3)), (1, (1, 1, 1)), (3, (2, 3, 3)), (1, (1, 0, 1))]):
        arrays = draw(T, i, H), draw(T, i + 10), draw(T, i + 20), np.array(lengths)
        *found, ring = step(operation, ring, *arrays)
        *wanted, full = step(operation, full, *arrays, mask=Causal() & SlidingWindow(4, None))
        assert_near(found, wanted)


@pytest.mark.slow
def test_a_fork_equals_a_copy(operation: Any) -> None:
    """Of pages that are shared, and of the last one that is not, though both rows then grow."""
    pool = PagePool.create(pages=18, page_size=PAGE, rows=B, max_pages=6).reserve(np.array([6, 9, 3]))
    cache, full = filled(paged(pool.table, None), lengths=(6, 9, 3)), filled(dense(), lengths=(6, 9, 3))
    source, target = np.array([1, 1]), np.array([0, 2])
    pool, copies = pool.fork(source, target)
    cache, full = cache.fork(source, target, pool.table, copies), full.take_rows(np.array([1, 1, 1]))
    for i, lengths in enumerate([(3, 1, 2), (3, 3, 3)]):
        pool = pool.reserve(np.asarray(cache.lengths) + lengths)
        assert pool.ok.all()
        arrays = draw(3, i, H), draw(3, i + 10), draw(3, i + 20), np.array(lengths)
        *found, cache = step(operation, cache.with_table(pool.table), *arrays)
        *wanted, full = step(operation, full, *arrays)
        assert_near(found, wanted)
    assert not cache.overflowed.any()


@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.slow
def test_rows_in_any_order(operation: Any, make: Any) -> None:
    order, query = np.array([2, 0, 1]), draw(3, heads=H)
    cache = filled(make())
    if isinstance(cache, PagedCache):
        moved = dataclasses.replace(cache, **{name: x[order] for name, x in cache._rows().items()})
    else:
        moved = cache.take_rows(order)
    assert_same(call(operation, moved, query[order]), (x[order] for x in call(operation, cache, query)))


@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.slow
def test_rows_without_queries_change_no_other(operation: Any, make: Any) -> None:
    arrays = draw(3, 6, H), draw(3, 7), draw(3, 8)
    out, lse, cache = step(operation, filled(make()), *arrays, np.array([3, 0, 2]))
    wanted, wanted_lse, _ = step(operation, filled(make()), *arrays, np.array([3, 3, 2]))
    assert_same((out[0], lse[0], out[2], lse[2]), (wanted[0], wanted_lse[0], wanted[2], wanted_lse[2]))
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    assert cache.lengths.tolist() == [16, 6, 11]


@pytest.mark.parametrize("codec", [None, INT8], ids=str)
@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_a_step_appends_and_then_calls(operation: Any, make: Any, codec: Quantized | None) -> None:
    query, key, value, lengths = draw(3, 6, H), draw(3, 7), draw(3, 8), np.array([3, 1, 2])
    *found, stepped = step(operation, filled(make(codec=codec)), query, key, value, lengths)
    appended = append(filled(make(codec=codec)), key, value, lengths)
    assert_same(jax.tree.leaves(stepped), jax.tree.leaves(appended))
    assert_near(found, call(operation, appended, query, lengths))


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.tier(every=2)
def test_packed_rows_equal_padded_ones(operation: Any, make: Any) -> None:
    query, key, value = draw(4, 6, H), draw(4, 7), draw(4, 8)
    out, lse, padded = step(operation, filled(make()), query, key, value, np.array([1, 0, 4]))
    # One query of padding, row 2, row 0, two of padding.
    packed = [np.concatenate([x[1, :1], x[2], x[0, :1], x[1, :2]])[None] for x in (query, key, value)]
    rows = Rows(np.array([1, 5, 6]), np.array([2, 0]))
    found, found_lse, cache = step(operation, filled(make()), *packed, rows=rows)
    assert_near((found[0, 1:5], found[0, 5], found_lse[0, :, 1:5]), (out[2], out[0, 0], lse[2]))
    assert_same(jax.tree.leaves(cache), jax.tree.leaves(padded))


@pytest.mark.slow
def test_runs_in_any_order(operation: Any) -> None:
    query, key, value = (x.reshape(1, -1, *x.shape[2:]) for x in (draw(2, 6, H), draw(2, 7), draw(2, 8)))
    one, lse, cache = step(operation, filled(paged()), query, key, value, rows=Rows([0, 2, 4, 6], [0, 1, 2]))
    order = np.array([4, 5, 0, 1, 2, 3])
    other, other_lse, same = step(
        operation, filled(paged()), *(x[:, order] for x in (query, key, value)), rows=Rows([0, 2, 4, 6], [2, 0, 1])
    )
    assert_near((other, other_lse), (one[:, order], lse[:, :, order]))
    assert_same(jax.tree.leaves(same), jax.tree.leaves(cache))


@pytest.mark.parametrize("make", [dense, paged])
def test_drafts_that_were_taken_back_leave_nothing(operation: Any, make: Any) -> None:
    cache = filled(make())
    drafted = append(cache, draw(4, 7) * np.nan, draw(4, 8) * np.nan, np.array([4, 2, 0])).truncate(cache.lengths)
    arrays = draw(3, 6, H), draw(3, 7), draw(3, 8), np.array([2, 3, 1])
    assert_same(step(operation, drafted, *arrays)[:2], step(operation, cache, *arrays)[:2])


@pytest.mark.parametrize("make", [dense, paged])
def test_left_padding_is_as_if_it_were_not_there(operation: Any, make: Any) -> None:
    starts = np.array([2, 0, 5])
    key, value = draw(14, 1), draw(14, 2)
    padded_key, padded_value = (
        np.stack([np.concatenate([np.full((s, K, D), np.nan, np.float32), x[b]])[:14] for b, s in enumerate(starts)])
        for x in (key, value)
    )
    lengths, query = np.array([12, 14, 9]), draw(3, heads=H)
    found = call(operation, append(make(starts=starts), padded_key, padded_value, lengths), query)
    wanted = call(operation, append(make(), key, value, lengths - starts), query)
    assert_near(found, wanted)


@pytest.mark.parametrize("block_k", [4, 12, 24])
@pytest.mark.slow
def test_tiles_of_any_size(block_k: int) -> None:
    query, cache = draw(3, heads=H), filled(paged())
    found, wanted = (
        call(OperationRegistry.create("attnops:flash", OperationMetadata(block_q=2, block_k=k)), cache, query)
        for k in (block_k, 8)
    )
    assert_near(found, wanted)
