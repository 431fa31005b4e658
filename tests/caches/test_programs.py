"""Caches in compiled programs: traces, transformations and export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops import OperationMetadata, OperationRegistry
from attnops.caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache
from attnops.masks import Causal

B, H, K, D = 2, 4, 2, 32
STORAGES = ("dense", "ring", "pages")
PAGES_QUICK = ["pages", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "ring"))]


def create(storage: str, length: int = 24, **options: Any) -> Cache:
    """An empty cache of `length` slots a row, pages of 8."""
    options = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32} | options
    if storage == "ring":
        return WindowCache.create(window=length - 2, max_append=3, **options)
    if storage == "pages":
        pages = length // 8
        table = np.random.default_rng(0).permutation(B * pages).reshape(B, pages)
        return PagedCache.create(pages=B * pages, page_size=8, max_pages=pages, table=table, **options)
    return DenseCache.create(length=length, **options)


def flash(**options: Any) -> Any:
    return OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error", **options))


def tokens(T: int = 3, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(B, T, heads, D)), dtype) for heads in (H, K, K)]


@pytest.mark.parametrize("storage", STORAGES)
def test_one_trace_serves_all_lengths_tables_and_fill_states(storage: str) -> None:
    traces = 0

    @jax.jit
    def step(cache: Cache, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        nonlocal traces
        traces += 1
        out, cache = flash().step(query, key, value, cache, mask=Causal(), query_lengths=lengths)
        return out.attention_outputs, cache

    cache = create(storage)
    for lengths in ([3, 3], [0, 1], [3, 2], [2, 0], *[[3, 3]] * 7):  # the last of them find dense rows full
        _, cache = step(cache, *tokens(), np.array(lengths, np.int32))
        if isinstance(cache, PagedCache):
            cache = cache.with_table(np.flip(np.asarray(cache.table), 0).copy())
    cache = cache.truncate([5, 0]).reset(np.array([True, False]))
    step(cache, *tokens(), np.array([1, 1], np.int32))
    assert traces == 1


def test_one_trace_serves_all_packed_rows() -> None:
    traces = 0

    @jax.jit
    def step(cache: Cache, query: Any, key: Any, value: Any, rows: Rows) -> Any:
        nonlocal traces
        traces += 1
        return flash().step(query, key, value, cache, mask=Causal(), rows=rows)

    cache = create("pages")
    packed = [x.reshape(1, 2 * 3, *x.shape[2:]) for x in tokens()]
    for starts, slots in (([0, 3, 6], [0, 1]), ([0, 5, 6], [1, 0]), ([2, 2, 4], [1, 0]), ([0, 0, 0], [1, 1])):
        _, cache = step(cache, *packed, Rows(starts, slots))
    assert traces == 1
    assert cache.lengths.tolist() == [3 + 1 + 2, 3 + 5]


@pytest.mark.parametrize("storage", PAGES_QUICK)
def test_vmap_is_a_call_for_each(storage: str) -> None:
    caches = [create(storage).append(*tokens(3, seed)[1:], [3, seed]) for seed in (1, 2)]
    stacked: Any = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    arrays = [jnp.stack(x) for x in zip(tokens(2, 3), tokens(2, 4), strict=True)]

    def step(cache: Cache, query: Any, key: Any, value: Any) -> Any:
        out, cache = flash().step(query, key, value, cache, mask=Causal())
        return out.attention_outputs, cache

    found, after = jax.jit(jax.vmap(step))(stacked, *arrays)
    for i, cache in enumerate(caches):
        wanted, grown = jax.jit(step)(cache, *(x[i] for x in arrays))
        np.testing.assert_allclose(found[i], wanted, atol=1e-5)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(grown), strict=True):
            np.testing.assert_array_equal(a[i], b)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_survives_export(storage: str) -> None:
    """As arrays: what is exported takes and gives the leaves, and no class is registered for it."""
    cache = create(storage, codec=Quantized("float8_e4m3fn"), dtype=jnp.bfloat16)
    leaves, tree = jax.tree.flatten(cache)

    def step(leaves: list[Any], query: Any, key: Any, value: Any) -> Any:
        out, cache = flash().step(query, key, value, jax.tree.unflatten(tree, leaves), mask=Causal())
        return out.attention_outputs, jax.tree.leaves(cache)

    arrays = tokens(dtype=jnp.bfloat16)
    blob = export.export(jax.jit(step))(leaves, *arrays).serialize()
    found, wanted = export.deserialize(blob).call(leaves, *arrays), jax.jit(step)(leaves, *arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_cache_is_a_pytree_of_arrays_with_paths() -> None:
    cache = create("pages", codec=Quantized("int8"), layers=2)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    assert names == {".store.key", ".store.key_scale", ".store.value_scale", ".lengths", ".starts", ".overflowed",
                     ".table"}  # fmt: skip
    assert all(x.shape[0] == 2 for x in jax.tree.leaves(cache))
