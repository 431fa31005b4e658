"""Calls outside `jax.jit`: what the first of them compiles serves all later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import program_budget
import pytest

from attnops import OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, PagePool, Quantized, Rows, WindowCache, sharded

B, T, H, K, D = 2, 3, 4, 2, 4
OPTIONS: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
KEY, QUERY = (np.random.default_rng(0).normal(size=(B, T, heads, D)).astype(np.float32) for heads in (K, H))
ROWS = Rows([0, 2, 3], [1, 0])


def create(storage: str) -> Any:
    if storage == "dense":
        return DenseCache.create(length=8, **OPTIONS)
    if storage == "ring":
        return WindowCache.create(window=4, max_append=T, codec=Quantized("int8"), **OPTIONS)
    table = np.arange(8).reshape(2, 4)
    return PagedCache.create(pages=8, page_size=2, max_pages=4, table=table, **OPTIONS)


@pytest.mark.slow
def test_two_hundred_appends_compile_what_two_do() -> None:
    cache, tokens = WindowCache.create(window=4, **OPTIONS), [np.full((B, 1, K, D), i, np.float32) for i in range(200)]
    for i, token in enumerate(tokens):
        if i == 2:
            before = program_budget.compiled()
        cache = cache.append(token, token)
    assert program_budget.compiled() == before
    keys, _, positions, held = map(np.asarray, cache.read())
    assert sorted(positions[0][held[0]].tolist()) == [196, 197, 198, 199]
    np.testing.assert_array_equal(keys[held][:, 0, 0], positions[held])


def steps(name: str) -> Callable[[Any], Any]:
    operation = OperationRegistry.create(name)

    def called(cache: Cache) -> Any:
        packed = QUERY[:1], KEY[:1], KEY[:1]
        return (
            operation.step(QUERY, KEY, KEY, cache, mask=Causal()),
            operation.step(*packed, cache, mask=Causal(), rows=ROWS),
            operation(QUERY, cache, mask=Causal()),
        )

    return called


def moved(cache: Any) -> Any:
    pool = PagePool.create(pages=8, page_size=2, rows=B, max_pages=4).reserve(np.array([3, 2]))
    forked, copies = pool.fork([0], [1])
    if isinstance(cache, PagedCache):
        own = [cache.fork([0], [1], forked.table, copies), cache.with_table(forked.table).copy_pages(copies)]
    else:
        own = [cache.take_rows([1, 0])]
    chosen = np.array([True, False])
    return cache.truncate([1, 1]), cache.reset(chosen), cache.read(), pool.release(chosen), pool.truncate([1, 1]), own


def appended(cache: Any) -> Any:
    return (
        cache.append(KEY, KEY, [1, 3]), cache.append(KEY[:, :1], KEY[:, :1]), cache.append(KEY[:1], KEY[:1], rows=ROWS),
        cache.pending(T).write(KEY, KEY).cache,
    )  # fmt: skip


CALLS = {"appends": appended, "moves": moved, **{name: steps(name) for name in ("attnops:flash", "vanilla", "sdpa")}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::attnops.errors.UnsupportedWarning")
@pytest.mark.parametrize("storage", ["dense", "ring", "paged"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.tier(
    exhaustive=["vanilla-ring", "vanilla-paged", "sdpa-dense", "sdpa-ring"]
)  # through read(), as the other
def test_a_second_identical_call_compiles_nothing(name: str, storage: str) -> None:
    call, cache = CALLS[name], create(storage)
    wanted = call(cache)
    before = program_budget.compiled()
    found = call(cache)
    assert program_budget.compiled() == before
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_equal_caches_on_a_mesh_compile_once_whatever_function_makes_them() -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    by_head = {"codec": Quantized("int8", "head"), "value_scale": [1.0, 2.0]}

    def made(i: int) -> DenseCache:
        scale = jnp.full(K, i + 1.0) if i % 2 else np.full(K, i + 1.0)  # arrays are data
        return sharded(lambda: DenseCache.create(length=8, key_scale=scale, **by_head, **OPTIONS), mesh)

    for i in range(200):
        if i == 2:
            before = program_budget.compiled()
        cache = made(i)
        assert cache.store.key_scale.tolist() == [i + 1.0] * K
    assert program_budget.compiled() == before
    assert cache.store.key.sharding.spec == cache.specs.store.key == jax.P(None, "tp", None, None)
    made(3).store.key.delete()  # buffers of its own
    assert made(3).store.key.shape == (B, K, 8, D)
    assert sharded(lambda: DenseCache.create(length=6, **OPTIONS), mesh).length == 6
