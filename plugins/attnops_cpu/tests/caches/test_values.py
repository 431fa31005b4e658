"""The kernel over caches, held to float64: sizes at the edges, tokens that hold NaN, garbage in tables and lengths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Lengths, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache

Array = np.ndarray[Any, Any]


def filled(create: Callable[[], Any], lengths: Any, **fields: Any) -> Any:
    """The cache with normal numbers in every slot, and rows of these lengths; no program makes it."""
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(create))
    stored = cache.store.layout.stored_dtype
    changes: dict[str, Any] = {}
    for i, name in enumerate(("key", "value")):
        if (x := getattr(cache.store, name)) is not None:
            changes[name] = np.random.default_rng(i).standard_normal(x.shape, np.float32).astype(stored).view(x.dtype)
    store = dataclasses.replace(cache.store, **changes)
    return dataclasses.replace(cache, store=store, lengths=np.asarray(lengths, np.int32), **fields)


def dense(**options: Any) -> Callable[[], Any]:
    return functools.partial(DenseCache.create, **options)


def paged(batch: int, length: int, page: int, lengths: Any, **options: Any) -> Any:
    """A cache of pages in any order."""
    most = -(-length // page)
    table = np.random.default_rng(5).permutation(batch * most).reshape(batch, most).astype(np.int32)
    sizes: Any = {"batch": batch, "pages": batch * most, "page_size": page, "max_pages": most}
    return filled(functools.partial(PagedCache.create, **sizes, **options), lengths, table=table)


def attend(query: Array, cache: Cache, mask: Mask | None, **options: Any) -> tuple[Array, Array, Array]:
    """The output, the logsumexp and the largest scores."""
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    options |= {"return_lse": True, "return_max_logits": True} | ({} if mask is None else {"mask": mask})
    result = jax.jit(lambda q, c: operation(q, c, **options))(query.astype(cache.dtype), cache)
    found: Any = (result.attention_outputs, result.logsumexp, result.max_logits)
    out, lse, highest = (np.asarray(x, np.float64) for x in found)
    return out, lse, highest


def exact(query: Array, cache: Cache, left: int | None = None) -> tuple[Array, Array, Array]:
    """Causal attention of the last tokens of each row in float64, with a window of ``left`` tokens before each; as
    `attend` has it.
    """
    B, T, H, D = query.shape
    query = query.astype(cache.dtype).astype(np.float64)
    keys, values, positions, held = (np.asarray(x, np.float64) for x in jax.jit(lambda c: c.read())(cache))
    out, lse, highest = np.zeros((B, T, H, values.shape[3])), *np.full((2, B, H, T), -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        own = int(cache.lengths[b]) - int(cache.starts[b]) - T + t
        sees = (held[b] > 0) & (positions[b] <= own) & (own >= 0) & (left is None or positions[b] >= own - (left or 0))
        if not sees.any():
            continue
        k = h // (H // keys.shape[2])
        scores = keys[b, sees, k] @ query[b, t, h] * D**-0.5
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values[b, sees, k]
        highest[b, h, t] = scores.max()
        lse[b, h, t] = scores.max() + np.log(weights.sum())
    return out, lse, highest


def check(cache: Any, T: int, G: int, mask: Mask | None = None, left: int | None = None) -> None:
    query = np.random.default_rng(9).standard_normal((cache.batch, T, cache.kv_heads * G, cache.head_dim), np.float32)
    found, wanted = attend(query, cache, Causal() if mask is None else mask), exact(query, cache, left)
    eps = float(jnp.finfo(cache.dtype).eps)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        np.testing.assert_allclose(x[finite], y[finite], rtol=16 * eps, atol=16 * eps)


F32: dict[str, Any] = {"dtype": jnp.float32}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("T", [1, 4, 16, 45])
@pytest.mark.parametrize(("G", "D", "Dv"), [(1, 64, 64), (4, 80, 80), (8, 128, 128), (2, 256, 64), (3, 40, 72)])
@pytest.mark.tier(every=3, quick=["3-40-72-4-float32", "8-128-128-1-bfloat16"])
def test_sizes_of_all_kinds(G: int, D: int, Dv: int, T: int, dtype: Any) -> None:
    create = dense(batch=2, length=70, kv_heads=2, head_dim=D, value_head_dim=Dv, dtype=dtype)
    check(filled(create, [70, 33]), T, G)


@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.slow
def test_pages(page: int, T: int) -> None:
    check(paged(3, 300, page, [300, 7, 150], kv_heads=2, head_dim=32, **F32), T, 2)


@pytest.mark.parametrize("length", [1, 15, 2000, 5000])
@pytest.mark.slow
def test_rows_of_one_chunk_and_of_several(length: int) -> None:
    check(filled(dense(batch=2, length=length, kv_heads=1, head_dim=64, **F32), [length, length // 2]), 1, 4)


def test_rows_without_tokens_see_nothing() -> None:
    check(filled(dense(batch=3, length=40, kv_heads=1, head_dim=16, **F32), [0, 1, 40]), 1, 2)


@pytest.mark.parametrize("make", ["dense", "paged", "ring"])
@pytest.mark.slow
def test_a_window_smaller_than_a_page(make: str) -> None:
    options: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, **F32}
    lengths = np.array([90, 4], np.int32)
    if make == "paged":
        cache = paged(2, 100, 16, lengths, **options)
    elif make == "dense":
        cache = filled(dense(batch=2, length=100, **options), lengths)
    else:
        ring = functools.partial(WindowCache.create, batch=2, window=6, max_append=3, **options)
        cache = filled(ring, lengths, written=lengths)
    check(cache, 3, 2, Causal() & SlidingWindow(5, None), left=5)


@pytest.mark.slow
def test_layers_and_starts() -> None:
    create = dense(batch=2, length=30, kv_heads=2, head_dim=16, layers=3, **F32)
    cache = filled(create, [30, 12], starts=np.array([0, 5], np.int32))
    for layer in range(3):
        check(cache.layer(layer), 2, 2)


@pytest.mark.slow
def test_a_traced_layer_that_does_not_exist_is_the_nearest_that_does() -> None:
    create = dense(batch=2, length=30, kv_heads=2, head_dim=16, layers=3, **F32)
    cache = jax.tree.map(jnp.asarray, filled(create, [21, 30], starts=np.zeros(2, np.int32)))
    query = np.random.default_rng(1).standard_normal((2, 1, 2, 16), np.float32)
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    run = jax.jit(lambda layer: operation(query, cache.layer(layer), mask=Causal()).attention_outputs)
    for layer, taken in ((-1, 2), (-9, 0), (7, 2)):
        np.testing.assert_array_equal(run(jnp.int32(layer)), run(jnp.int32(taken)))


@pytest.mark.parametrize("T", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("by_bits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_that_a_query_does_not_see_may_be_nan(by_bits: bool, T: int) -> None:
    """Also those that later queries of the same row see."""
    cache = paged(2, 64, 16, [50, 20], kv_heads=1, head_dim=16, **F32)
    poisoned = cache.store.key.copy()
    table = cache.table
    for b, length in enumerate((50, 20)):
        for slot in range(length - 1, 64):
            poisoned[table[b, slot // 16], :, slot % 16] = np.nan
    store = dataclasses.replace(cache.store, key=poisoned)
    query = np.random.default_rng(1).standard_normal((2, T, 2, 16), np.float32)
    mask = Causal() & Lengths([64, 64]) if by_bits else Causal()
    found = attend(query, dataclasses.replace(cache, store=store), mask)
    wanted = exact(query, cache)
    np.testing.assert_allclose(found[0][:, :-1], wanted[0][:, :-1], rtol=1e-5, atol=1e-5)
    assert all(np.isnan(x).all() for x in (found[0][:, -1], found[1][..., -1], found[2][..., -1]))


@pytest.mark.slow
def test_tables_and_lengths_that_are_garbage_are_not_followed() -> None:
    cache = paged(3, 64, 16, [64, 64, 2**31 - 1], kv_heads=1, head_dim=16, **F32)
    table = cache.table.copy()
    table[0, 1], table[0, 2], table[1, 0] = 2**31 - 1, -(2**31), 12
    cache = dataclasses.replace(cache, table=table)
    query = np.random.default_rng(1).standard_normal((3, 1, 2, 16), np.float32)
    out = attend(query, cache, Causal())[0]
    fields: Any = {name: getattr(cache, name)[:2] for name in ("table", "lengths", "starts", "overflowed")}
    known = exact(query[:2], dataclasses.replace(cache, **fields))
    np.testing.assert_allclose(out[:2], known[0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()


@pytest.mark.slow
def test_results_are_the_same_to_the_bit() -> None:
    cache = filled(dense(batch=2, length=4096, kv_heads=2, head_dim=128), [4096, 3000])
    query = np.random.default_rng(1).standard_normal((2, 1, 8, 128), np.float32)
    first = attend(query, cache, Causal())
    for _ in range(5):
        for x, y in zip(attend(query, cache, Causal()), first, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 3])
def test_rows_that_share_pages_have_the_bits_that_they_have_without_sharing(T: int) -> None:
    lengths, pages = [5000, 5100, 4700, 300], 40  # several chunks of keys
    cache = paged(4, pages * 128, 128, lengths, kv_heads=2, head_dim=16, dtype=jnp.float32)
    shared = np.array(cache.table)
    shared[1:, :30] = shared[0, :30]
    query = np.random.default_rng(2).standard_normal((4, T, 4, 16), np.float32)
    together = dataclasses.replace(cache, table=shared)
    found, expected = attend(query, together, Causal()), exact(query, together)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    arrays = {name: np.array(x) for name in ("key", "value") if (x := getattr(cache.store, name)) is not None}
    for x in arrays.values():
        x[np.asarray(cache.table)[1:, :30]] = x[shared[0, :30]]
    alone = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **arrays))
    for x, y in zip(found, attend(query, alone, Causal()), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.slow
def test_packed_rows_have_the_numbers_of_their_own_calls(codec: str | None) -> None:
    """Prompts and single tokens in one call, in any order, with padding between and after them, to the bit; a row's
    numbers do not depend on its neighbours.
    """
    counts, order, H = np.array([1, 70, 0, 17]), np.array([3, 1, 0]), 4
    options: dict[str, Any] = F32 if codec is None else {"codec": Quantized(codec)}
    cache = paged(4, 600, 16, [600, 90, 33, 300], kv_heads=2, head_dim=32, **options)
    scales = {name: np.full(x.shape, 0.01, np.float32) for name in ("key_scale", "value_scale")
              if (x := getattr(cache.store, name)) is not None}  # fmt: skip
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **scales))
    starts = 2 + np.concatenate([[0], np.cumsum(counts[order])])
    query = np.random.default_rng(2).standard_normal((1, starts[-1] + 5, H, 32), np.float32)
    found = attend(query, cache, Causal(), rows=Rows(starts, order))
    for start, stop, row in zip(starts, starts[1:], order, strict=False):
        alone = attend(query[:, start:stop], cache, Causal(), rows=Rows([0, stop - start], [row]))
        for x, y, axis in zip(found, alone, (1, 2, 2), strict=True):
            np.testing.assert_array_equal(np.take(x, np.arange(start, stop), axis), y)
    if codec is None:
        wanted = exact(np.repeat(query[:, starts[1] : starts[2]], 4, 0), cache)
        np.testing.assert_allclose(found[0][0, starts[1] : starts[2]], wanted[0][1], rtol=1e-5, atol=1e-5)
    for padding in (slice(0, 2), slice(starts[-1], None)):
        assert not found[0][:, padding].any()
        assert np.isneginf(found[1][..., padding]).all()
        assert np.isneginf(found[2][..., padding]).all()


@pytest.mark.slow
def test_scales_that_are_nan_reach_only_queries_that_see_their_token() -> None:
    cache = filled(dense(batch=1, length=64, kv_heads=1, head_dim=16, codec=Quantized("int8"), **F32), [50])
    scales = np.full((1, 1, 64), 0.01, np.float32)
    scales[:, :, 49:] = np.nan
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, key_scale=scales, value_scale=scales))
    out = attend(np.ones((1, 30, 2, 16), np.float32), cache, Causal())[0]
    assert np.isfinite(out[:, :-1]).all()
    assert np.isnan(out[:, -1]).all()


@pytest.mark.slow
def test_a_mapped_axis_is_a_loop() -> None:
    cache = filled(dense(batch=2, length=30, kv_heads=2, head_dim=16, **F32), [30, 12])
    query = np.random.default_rng(1).standard_normal((3, 2, 1, 4, 16), np.float32)
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    run = jax.jit(jax.vmap(lambda q: operation(q, cache, mask=Causal()).attention_outputs))
    for found, one in zip(run(query), query, strict=True):
        np.testing.assert_allclose(found, exact(one, cache)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_step_writes_in_place_and_attends() -> None:
    cache = jax.tree.map(jnp.asarray, filled(dense(batch=2, length=40, kv_heads=2, head_dim=16, **F32), [20, 39]))
    token = jnp.asarray(np.random.default_rng(3).standard_normal((2, 1, 2, 16), np.float32))
    query = jnp.asarray(np.random.default_rng(4).standard_normal((2, 1, 4, 16), np.float32))
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    step = jax.jit(lambda q, k, c: operation.step(q, k, k, c, mask=Causal()), donate_argnums=2)
    after = cache.append(token, token)
    wanted = exact(np.asarray(query), after)[0]
    pointer = cache.store.key.unsafe_buffer_pointer()
    result, written = step(query, token, cache)
    np.testing.assert_allclose(result.attention_outputs, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(written.store.key, after.store.key)
    assert written.store.key.unsafe_buffer_pointer() == pointer


def test_a_cache_of_one_row_takes_packed_rows_with_lengths() -> None:
    cache = filled(dense(batch=1, length=8, kv_heads=1, head_dim=4, **F32), [6])
    query = np.zeros((1, 3, 2, 4), np.float32)
    _, lse, _ = attend(query, cache, Lengths([5]), rows=Rows([0, 3], [0]))
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-6)


def of_int8(dtype: Any, tokens: int, head_dim: int) -> Any:
    """A cache of int8 with all its slots in use, keys and values in steps of 1 / 32."""
    scale = np.float32(1 / 32)
    create = dense(
        batch=1, length=tokens, kv_heads=1, head_dim=head_dim, dtype=dtype, codec=Quantized("int8", "tensor"),
        key_scale=scale, value_scale=scale,
    )  # fmt: skip
    cache, rng = filled(create, [tokens]), np.random.default_rng(3)
    changes = {name: rng.integers(-127, 128, cache.store.key.shape).astype(np.int8) for name in ("key", "value")}
    store = dataclasses.replace(cache.store, **changes, key_scale=scale, value_scale=scale)
    return dataclasses.replace(cache, store=store)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_int8_keeps_small_features_beside_a_large_one(dtype: Any) -> None:
    cache = of_int8(dtype, 100, 64)
    cache.store.key[..., 0] = 0
    query = np.random.default_rng(4).uniform(-2, 2, (1, 1, 1, 64))
    query[..., 0] = 30_000
    found, wanted = attend(query, cache, Causal()), exact(query, cache)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=2 * 4 * eps)
    np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_int8_keeps_small_weights_beside_a_large_one(dtype: Any) -> None:
    cache = of_int8(dtype, 256, 16)
    cache.store.key[:] = 0
    cache.store.key[:, :, 0] = 32
    cache.store.value[:] = 32
    query = np.full((1, 1, 1, 16), 11.15 / 4)  # weights of e^−11.15, less than half of 1 / 32,767
    np.testing.assert_allclose(attend(query, cache, Causal())[0], 1, rtol=0, atol=2 * float(jnp.finfo(dtype).eps))
