"""Small and large tiles of packed rows in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal
from attnops_caches import Cache, PagedCache, Rows
from attnops_tpu.caches import attention, mixed
from attnops_tpu.caches.parts import Parts
from attnops_tpu.caches.schedule import ItemSchedule
from attnops_tpu.generations import target
from attnops_tpu.interpreter import detect_races


def test_parts_of_large_items_are_evenly_among_small_items() -> None:
    def program(small: jax.Array, *parts: jax.Array) -> mixed._Order:
        nothing = jnp.zeros((12,), jnp.int32)
        return mixed._order(small, Parts(ItemSchedule(*[nothing] * 7), *parts))

    compiled = jax.jit(program)

    def order(small: int, *counts: int) -> str:
        """The order of so many small items, and of large ones of so many parts each, of 4 that have room for 3."""
        count = np.array([*counts, *[0] * (4 - len(counts))])[:, None]
        exists, is_first, is_last = np.arange(3) < count, np.arange(3) == [[0]] * 4, np.arange(3) == count - 1
        result = jax.tree.map(np.asarray, compiled(np.arange(7) < small, *map(np.ravel, (exists, is_first, is_last))))
        names = [f"L{(i - 7) // 3}.{(i - 7) % 3}" if i >= 7 else f"s{i}" for i in result.items.tolist()]
        names = names[: small + sum(counts)]
        for at, name in enumerate(names):
            is_large = name.startswith("L")
            assert result.is_large[at] == is_large
            assert result.places[is_large][at] == int(name[1:].split(".")[0])
            part = int(name[-1]) if is_large else -1
            assert result.part.is_first[at] == (part == 0)
            assert result.part.is_last[at] == (is_large and part == counts[int(name[1:-2])] - 1)
        assert all(x.min() >= 0 for x in result.places)
        assert all((np.diff(x) >= 0).all() for x in result.places), "blocks are visited in order"
        return " ".join(names)

    assert order(6, 1, 1) == "L0.0 s0 s1 s2 L1.0 s3 s4 s5"
    assert order(6, 2, 1) == "L0.0 s0 s1 L0.1 s2 s3 L1.0 s4 s5"
    assert order(7, 3, 3) == "L0.0 s0 L0.1 s1 L0.2 s2 s3 L1.0 s4 L1.1 s5 L1.2 s6"
    assert order(1, 1, 1, 1, 1) == "L0.0 L1.0 s0 L2.0 L3.0"
    assert order(0, 1, 1, 1) == "L0.0 L1.0 L2.0"
    assert order(7) == "s0 s1 s2 s3 s4 s5 s6"


@pytest.mark.slow
def test_one_core_computes_both_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores take items in turns, scalar memory may not hold all, and code may be too long: then there are two."""
    cache = PagedCache.create(batch=3, pages=36, page_size=8, max_pages=12, kv_heads=2, head_dim=8, dtype=jnp.float32,
                              table=np.arange(36).reshape(3, 12))  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (3, 90, 2, 8))
    cache = cache.append(key, -key, np.array([60, 1, 33]))
    query = jax.random.normal(jax.random.key(1), (1, 40, 4, 8))
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    rows, calls = Rows(jnp.array([2, 32, 33, 34]), jnp.array([0, 2, 1])), []
    run = mixed.run_mixed
    monkeypatch.setattr(attention, "run_mixed", lambda *given: (calls.append(1), run(*given))[1])
    results = []
    for name, most in ("v4", 99), ("v6e", 99), ("v6e", 8):
        monkeypatch.setattr(mixed, "rows_a_call", lambda nq, words, shared, most=most: most)
        with target(name), detect_races():
            result = operation.step(query, query[..., :2, :], query[..., :2, :], cache, mask=Causal(), rows=rows)
        results.append((len(calls), jax.tree.map(np.asarray, result)))
    assert [n for n, _ in results] == [0, 1, 1]
    monkeypatch.setattr(mixed, "rows_a_call", lambda *_: 99)
    monkeypatch.setattr(mixed, "MAX_CODE", 1000)
    with target("v6e"):
        jax.eval_shape(
            lambda: operation.step(query, query[..., :2, :], query[..., :2, :], cache, mask=Causal(), rows=rows)
        )
    assert len(calls) == 1
    for _, result in results[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), result, results[0][1])


# K, G, D, whether scores have all options, and the bundles that libtpu 0.0.52 compiles for v6e.
COUNTED = [
    (8, 4, 128, False, 22_698), (8, 4, 128, True, 32_126), (4, 8, 128, True, 22_991), (8, 4, 256, False, 23_161),
    (8, 2, 128, True, 32_556), (8, 2, 256, False, 24_265), (32, 1, 128, True, 33_220), (64, 1, 128, True, 37_140),
    (16, 2, 256, True, 37_656), (16, 4, 128, False, 32_453), (16, 2, 128, False, 26_461), (2, 16, 128, False, 15_575),
    (1, 8, 128, True, 18_378),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("K", "G", "D", "has_all", "counted"), COUNTED)
def test_the_estimate_of_code_is_near_what_the_compiler_makes(
    K: int, G: int, D: int, has_all: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the plan is made; the counts are of kernels that were compiled without this bound."""
    codes: list[float] = []
    plan_of = attention.mixed_plan

    def planned(small: Any, large: Any) -> Any:
        codes.append(mixed.code_of(small[0]) + mixed.code_of(large[0]))
        return plan_of(small, large)

    monkeypatch.setattr(attention, "mixed_plan", planned)
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    batch, slots, N = 64, 8192, 2048

    def step(query: jax.Array, key: jax.Array, starts: jax.Array) -> Any:
        cache = PagedCache.create(batch=batch, pages=batch * slots // 64, page_size=64, max_pages=slots // 64,
                                  kv_heads=K, head_dim=D, width=2 * D)  # fmt: skip
        options = {"logits_soft_cap": 30.0, "bias": ALiBi(alibi_slopes(K * G))} if has_all else {}
        rows = Rows(starts, jnp.arange(batch))
        return operation.step(query, key, key, cache, mask=Causal(), rows=rows, **options)

    shapes = [((1, N, K * G, D), jnp.bfloat16), ((1, N, K, D), jnp.bfloat16), ((batch + 1,), jnp.int32)]
    with target("v6e"):
        jax.eval_shape(step, *(jax.ShapeDtypeStruct(*x) for x in shapes))
    assert counted <= codes[0] <= 1.1 * counted


def _step(backend: str, cache: Cache, sizes: list[int], of_row: list[int], H: int = 4, **options: Any) -> Any:
    """A packed step of runs of so many tokens, with padding before the first and after the last."""
    D, N = cache.head_dim, sum(sizes) + 5
    random = np.random.default_rng(7)
    query, key = (jnp.asarray(random.normal(size=(1, N, heads, D)), cache.dtype) for heads in (H, cache.kv_heads))
    rows = Rows(jnp.asarray(2 + np.cumsum([0, *sizes]), jnp.int32), jnp.asarray(of_row, jnp.int32))
    metadata = OperationMetadata(platform="tpu" if "tpu" in backend else "cpu", interpret="tpu" in backend,
                                 on_unsupported="error", block_k=32)  # fmt: skip
    operation = OperationRegistry.create(backend, metadata)
    new = (key, None) if cache.is_latent else (key, -key)
    with target("v6e"), detect_races():
        return operation.step(query, *new, cache, mask=Causal(), rows=rows, return_lse=True, **options)


def _right(*given: Any, **options: Any) -> Cache:
    """Hold `_step` to the core's `flash`, whose cache is returned: outputs, logsumexp and all arrays of the cache."""
    (got, written), (expected, after) = (_step(name, *given, **options) for name in ("attnops-tpu:flash", "flash"))
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("attention_outputs", "logsumexp"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=2e-5, atol=2e-5)
    return after


# Rows with pages for all tokens, for some or none of the new ones, and for not even the first; their tokens before.
POOL = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1], [9, *[-1] * 11], [10, 11, 12, 13, 14, *[-1] * 7],
                 [*range(15, 20), -1, 20, 21, *[-1] * 4], [-1] * 12])  # fmt: skip
HELD = np.array([60, 8, 33, 35, 0])


@pytest.mark.slow
def test_rows_whose_pool_runs_out_keep_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompt 12 of 30 tokens fit, and of another, after whose first page one is missing, 5."""
    calls: list[int] = []
    run = mixed.run_mixed
    monkeypatch.setattr(attention, "run_mixed", lambda *given: (calls.append(1), run(*given))[1])
    cache: Cache = PagedCache.create(batch=5, pages=22, page_size=8, max_pages=12, kv_heads=2, head_dim=8,
                                     dtype=jnp.float32, table=POOL)  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (5, 60, 2, 8))
    cache = cache.append(key, -key, HELD)
    after = _right(cache, [30, 1, 1, 20, 1], [0, 1, 2, 3, 4])
    assert calls == [1]
    assert after.overflowed.tolist() == [True, True, False, True, True]
    assert after.lengths.tolist() == [72, 8, 34, 40, 0]


OPTIONS: dict[str, Any] = {
    "bias": ALiBi(alibi_slopes(4)), "logits_soft_cap": 2.0, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OPTIONS, {"H": 6}], ids=["plain", "all", "gathered"])
def test_items_in_parts_are_right(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of several tiles of keys, whose parts have rows with a token between them; 3 query heads per kv head
    are gathered.
    """
    sizes, held = [1, 1, 30, 1, 1, 1, 21, 1, 1, 1], np.array([60, 3, 120, 9, 77, 0, 64, 31, 32, 33])
    B, counts = len(sizes), list[int]()
    cache: Cache = PagedCache.create(batch=B, pages=20 * B, page_size=8, max_pages=20, kv_heads=2, head_dim=8,
                                     dtype=jnp.float32, table=np.arange(20 * B).reshape(B, 20))  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (B, 120, 2, 8))
    cache = cache.append(key, -key, held)
    run = mixed.split

    def split(*given: Any) -> Parts:
        result, most = run(*given), given[-1]
        jax.debug.callback(lambda x: counts.extend(x.reshape(-1, most).sum(1).tolist()), result.exists)
        return result

    monkeypatch.setattr(mixed, "split", split)
    _right(cache, sizes, list(range(B)), **options)
    jax.effects_barrier()
    assert counts == [4, 3]


@pytest.mark.slow
def test_mixed_batches_are_traced_where_x64_is_on() -> None:
    def traced(query: jax.Array, starts: jax.Array) -> Any:
        cache = PagedCache.create(batch=6, pages=72, page_size=8, max_pages=12, kv_heads=2, head_dim=8,
                                  dtype=jnp.float32)  # fmt: skip
        key, rows = query[..., :2, :], Rows(starts, jnp.arange(6, dtype=jnp.int32))
        return operation.step(query, key, key, cache, mask=Causal(), rows=rows)

    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    given = jax.ShapeDtypeStruct((1, 48, 4, 8), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.int32)
    with jax.enable_x64(True), target("v6e"):
        output, cache = jax.eval_shape(traced, *given)
    assert (output.attention_outputs.dtype, cache.lengths.dtype) == (jnp.float32, jnp.int32)


@pytest.mark.slow
def test_mixed_batches_over_latents_are_right() -> None:
    """Scores of latents are in rows, so that there is one size of tiles."""
    cache: Cache = PagedCache.create(batch=3, pages=36, page_size=8, max_pages=12, kv_heads=1, head_dim=12, latent=8,
                                     dtype=jnp.float32, table=np.arange(36).reshape(3, 12))  # fmt: skip
    cache = cache.append(jax.random.normal(jax.random.key(0), (3, 60, 1, 12)), None, np.array([60, 1, 33]))
    _right(cache, [30, 1, 1], [0, 2, 1])


@pytest.mark.slow
def test_tiles_of_keys_of_different_sizes_are_right() -> None:
    """Interpreted, small and large items round a tile of 12 slots to 12 and 8."""
    cache = PagedCache.create(batch=3, pages=9, page_size=4, max_pages=3, kv_heads=1, head_dim=8, dtype=jnp.float32,
                              table=np.arange(9).reshape(3, 3))  # fmt: skip
    query = jax.random.normal(jax.random.key(0), (1, 16, 4, 8))
    key, rows = query[:, :, :1], Rows(jnp.array([0, 10, 11, 12]), jnp.array([0, 1, 2]))
    results = []
    for name, options in ("attnops-tpu:flash", {"platform": "tpu", "interpret": True}), ("attnops:flash", {}):
        operation = OperationRegistry.create(name, OperationMetadata(on_unsupported="error", **options))
        with target("v6e"):
            results.append(operation.step(query, key, -key, cache, mask=Causal(), rows=rows))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *results)
