"""Chosen blocks over caches: values against loops, and which pages are read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Blocks, Causal
from attnops_caches import DenseCache, PagedCache, Rows, WindowCache
from attnops_caches.flash import attention

B, K, H, D, SLOTS, PAGE = 2, 2, 4, 16, 64, 8
LENGTHS = np.array([50, 37])
RNG = np.random.default_rng(0)
KEY, VALUE = RNG.normal(size=(2, B, 50, K, D)).astype(np.float32)


def operation() -> Any:
    return OperationRegistry.create("flash", OperationMetadata(platform="cpu"))


def cache_of(storage: str) -> Any:
    sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
    if storage == "dense":
        cache: Any = DenseCache.create(length=SLOTS, **sizes)
    elif storage == "window":
        cache = WindowCache.create(window=SLOTS, max_append=50, **sizes)
    else:
        cache = PagedCache.create(pages=32, page_size=PAGE, max_pages=SLOTS // PAGE, **sizes)
        table = np.random.default_rng(1).permutation(32)[: B * SLOTS // PAGE].reshape(B, -1)
        cache = dataclasses.replace(cache, table=jnp.asarray(table, jnp.int32))
    return cache.append(KEY, VALUE, LENGTHS)


def by_loops(query: Any, chosen: Any, q_block: int, kv_block: int) -> Any:
    out = np.zeros(query.shape)
    for b, i, h in np.ndindex(query.shape[:3]):
        position = LENGTHS[b] - query.shape[1] + i
        row = chosen[b, h * chosen.shape[1] // H, i // q_block]
        keys = [j for j in range(position + 1) if row[j // kv_block]]
        if keys:
            weights = np.exp(KEY[b, keys, h * K // H] @ query[b, i, h] * D**-0.5)
            out[b, i, h] = weights @ VALUE[b, keys, h * K // H] / weights.sum()
    return out


@pytest.mark.parametrize("storage", ["paged", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("T", "q_block", "kv_block", "n"), [(1, 1, PAGE, 2), (5, 2, 12, 1)])
def test_a_query_sees_the_chosen_blocks_of_positions(storage: str, T: int, q_block: int, kv_block: int, n: int) -> None:
    chosen = RNG.random((B, n, -(-T // q_block), -(-SLOTS // kv_block))) < 0.5
    query = RNG.normal(size=(B, T, H, D)).astype(np.float32)

    @jax.jit
    def attend(query: jax.Array, chosen: jax.Array) -> jax.Array:
        mask = Causal() & Blocks(chosen, q_block, kv_block)
        return operation()(query, cache_of(storage), mask=mask).attention_outputs

    out = attend(query, chosen)
    np.testing.assert_allclose(out, by_loops(query, chosen, q_block, kv_block), atol=1e-5)


def test_decoding_reads_the_chosen_pages_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(attention, "_compiled", lambda *x: given.extend(x) or (jnp.zeros((B, 1, H, D)), None, None))
    indices = np.array([[[0, 5, -1], [3, 1, 2]], [[4, 0, 3], [2, -1, -1]]])[:, :, None]
    query = np.zeros((B, 1, H, D), np.float32)

    @jax.jit
    def schedule_of() -> Any:
        operation()(query, cache_of("paged"), mask=Causal() & Blocks(indices, 1, PAGE))
        return given[-1]

    schedule, plan = schedule_of(), given[0]
    assert plan.bk == PAGE
    for row, chosen in enumerate(indices.reshape(B * K, 3)):
        pages = schedule.columns[row, schedule.start[row, 0] : schedule.stop[row, 0]].tolist()
        assert sorted(pages) == sorted(page for page in chosen.tolist() if page >= 0)


def test_blocks_are_refused_where_they_have_no_meaning() -> None:
    chosen = np.ones((1, 1, 1, SLOTS // PAGE), bool)

    def attend(storage: str, query: Any, **options: Any) -> Any:
        return operation()(query, cache_of(storage), mask=Blocks(chosen, 2, PAGE), **options).attention_outputs

    rows = Rows([0, 1, 2], [0, 1])
    with pytest.raises(ValueError, match=r"Blocks\(.*but rows are packed"):
        jax.eval_shape(lambda: attend("paged", np.zeros((1, 2, H, D), np.float32), rows=rows))
    with pytest.raises(ValueError, match=r"positions in a WindowCache of 113 slots have no limit"):
        jax.eval_shape(lambda: attend("window", np.zeros((B, 1, H, D), np.float32)))
