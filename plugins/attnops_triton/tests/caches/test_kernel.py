"""The kernels over caches in Triton's interpreter; outputs that they don't write stay NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, Reason
from attnops.masks import Causal, KeyPadding, Lengths, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, in_place_reasons
from attnops_caches.bits import to_bits
from attnops_testing.caches import cache_problem, check_cache
from attnops_testing.runner import Status, Subject
from attnops_triton.caches.tile_sizes import split_count, splits

SUBJECT = Subject(operation="attnops-triton:flash", platform="cuda", interpret=True)
METADATA = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_k=16)

# Combinations that together have each mask, bias, storage, codec, content and number of heads.
QUICK = (
    ("paged", "window per batch", "19 queries", "GQA", "sinks", "soft cap", "logsumexp", "left padding"),
    ("paged", "int8 by token_head", "Causal", "GQA", "3 queries", "packed rows", "float16", "logsumexp"),
)
SLOW = (
    ("ring", "MaskFn", "4 queries", "MQA", "query_lengths", "softmax_scale"),
    ("paged", "window per head", "5 queries", "GQA", "ALiBi"),
    ("Ancestors", "5 queries", "GQA", "op.step", "joined"),
    ("paged", "Segments", "latent", "GQA", "3 queries"),
    ("KeyPadding", "ScoreFn", "4 queries", "D ≠ Dv"),
    ("paged", "mask | mask", "19 queries", "sinks", "float16"),
    ("paged", "~mask", "MQA", "query_lengths", "left padding"),
    ("Lengths", "19 queries", "soft cap", "latent", "float16"),
    ("paged", "Dense", "GQA", "4 queries"),
    ("RelativePosition", "paged", "5 queries"),
    ("array bias", "4 queries", "GQA"),
    ("packed rows", "sinks", "ALiBi", "MQA", "window per batch", "logsumexp"),
    ("paged", "float8_e4m3fn by head", "window per batch", "5 queries", "op.step", "D ≠ Dv"),
    ("float8_e5m2 by tensor", "MQA", "sinks", "soft cap", "query_lengths", "4 queries", "float16"),
    ("ring", "int8 by head", "latent", "logsumexp", "float16"),
    ("paged", "int4 by token_head", "GQA", "3 queries", "packed rows", "float16", "Causal"),
    ("ring", "SlidingWindow", "GQA"),  # a mask of eleven values
    ("ring", "int4 by tensor", "joined", "MQA", "sinks", "float16"),
    ("int4 by head", "D ≠ Dv", "op.step", "5 queries", "Causal"),
    ("paged", "float8_e4m3fn by token_head", "latent", "19 queries", "GQA", "float16", "op.step"),
)


def reasons(subject: Subject, features: tuple[str, ...]) -> list[Reason]:
    """Why a problem is not read in place."""
    problem = cache_problem(subject, features)
    operation = subject.make(problem.metadata)
    request = operation.request(problem.query, problem.after.cache(), **problem.options)
    return in_place_reasons(operation, "gpu", request)


@pytest.mark.parametrize("features", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids="+".join)
@pytest.mark.tier(every=7, quick=["paged+int8 by token_head+Causal+GQA+3 queries+packed rows+float16+logsumexp"])
def test_features_are_read_in_place_and_right(features: tuple[str, ...]) -> None:
    if "packed rows" not in features:
        assert not reasons(SUBJECT, features)
    outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.parametrize("features", [pytest.param(QUICK[0], marks=pytest.mark.slow), QUICK[1]], ids="+".join)
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_splits_that_have_no_keys_are_merged(features: tuple[str, ...]) -> None:
    with splits(3):
        outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


def filled(batch: int, length: int = 200) -> PagedCache:
    """A cache of pages in any order, whose rows are of different lengths."""
    page, K, D = 16, 1, 16
    most = -(-length // page)
    table = np.random.default_rng(0).permutation(batch * most).reshape(batch, most)
    cache = PagedCache.create(batch=batch, pages=batch * most, page_size=page, max_pages=most, kv_heads=K, head_dim=D,
                              dtype=jnp.float32, table=table)  # fmt: skip
    key = jax.random.normal(jax.random.key(1), cache.store.key.shape)
    lengths = jnp.asarray([(length - 37 * b - 1) % length + 1 for b in range(batch)])
    return dataclasses.replace(cache, store=dataclasses.replace(cache.store, key=key), lengths=lengths)


def attend(cache: Cache, count: int, query: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    operation = OperationRegistry.create("attnops-triton:flash", METADATA)
    with splits(count):
        result = jax.jit(lambda q, c: operation(q, c, mask=Causal(), return_lse=True))(query, cache)
    return np.asarray(result.attention_outputs), np.asarray(result.logsumexp)


@pytest.mark.parametrize(
    "count", [2, pytest.param(7, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_splits_agree_with_one(count: int) -> None:
    cache, query = filled(2), jax.random.normal(jax.random.key(2), (2, 1, 2, 16))
    for got, right in zip(attend(cache, count, query), attend(cache, 1, query), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-6, atol=1e-6)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the interpreter's products by products that are rounded once: with some BLAS a row's rounding depends on
    its place in a tile, unlike on GPUs.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.slow
def test_with_a_fixed_number_of_splits_a_row_is_the_same_in_any_batch(exact_products: None) -> None:
    cache, query = filled(2), jax.random.normal(jax.random.key(2), (2, 1, 2, 16))
    rows = {name: getattr(cache, name)[1:] for name in ("table", "lengths", "starts", "overflowed")}
    rows["table"] = jnp.pad(rows["table"], [(0, 0), (0, 7)], constant_values=-1)  # of a batch with longer rows
    alone = attend(dataclasses.replace(cache, **rows), 7, query[1:])
    for got, right in zip(alone, attend(cache, 7, query), strict=True):
        np.testing.assert_array_equal(got, right[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "count"), [(Causal(), 11), (SlidingWindow(50, 0), 1), (SlidingWindow(50, 0), 3)],
    ids=["causal", "window, one split", "window"],
)  # fmt: skip
@pytest.mark.tier(every=3)
def test_with_a_fixed_number_of_splits_a_packed_row_is_the_same_among_any_others(
    mask: Mask, count: int, exact_products: None
) -> None:
    cache, n = filled(3), 40
    query, others = (jax.random.normal(jax.random.key(i), (1, T, 2, 16)) for i, T in ((2, n), (3, 20)))
    operation = OperationRegistry.create("attnops-triton:flash", METADATA)

    def attend(query: jax.Array, rows: Rows) -> np.ndarray:
        with splits(count):
            program = jax.jit(lambda q, c, r: operation(q, c, mask=mask, rows=r).attention_outputs)
            return np.asarray(program(query, cache, rows))

    alone = attend(query, Rows([0, n], [0]))
    among = attend(jnp.concatenate([others, query], 1), Rows([0, 9, 20, 20 + n], [2, 1, 0]))
    np.testing.assert_array_equal(alone[0], among[0, 20:])


@pytest.mark.parametrize(
    ("arch", "programs", "tiles", "count"),
    [("sm_90", 8, 1000, 33), ("sm_89", 8, 1000, 35), ("sm_120", 8, 1000, 47), ("gfx950", 8, 1000, 64),
     # Many programs; few keys; more splits than one program merges; interpreted.
     ("sm_90", 264, 1000, 1), ("sm_90", 8, 9, 3), ("sm_90", 1, 1000, 64), ("", 8, 1000, 1)],
)  # fmt: skip
def test_splits_are_as_many_as_fill_the_gpu(arch: str, programs: int, tiles: int, count: int) -> None:
    assert split_count(arch, programs, tiles) == count


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_splits_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"splits\({count}\) must be from 1 to 64"), splits(count):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), Lengths([20, 20])], ids=repr)
def test_tokens_of_pages_that_are_not_in_the_table_are_not_seen(mask: Mask) -> None:
    table = np.array([[1, -1, 3, -1, 5, 7], [-1, 2, 4, 6, 99, -1]])
    cache = PagedCache.create(batch=2, pages=8, page_size=4, max_pages=6, kv_heads=1, head_dim=8, dtype=jnp.float32,
                              table=jnp.asarray(table))  # fmt: skip
    pages = jax.random.normal(jax.random.key(0), cache.store.key.shape).at[0].set(jnp.nan)
    store = dataclasses.replace(cache.store, key=to_bits(pages))
    cache = dataclasses.replace(cache, store=store, lengths=jnp.array([23, 18]))
    query = jax.random.normal(jax.random.key(2), (2, 1, 2, 8))
    operation = OperationRegistry.create("attnops-triton:flash", METADATA)
    out = jax.jit(lambda q, c: operation(q, c, mask=mask).attention_outputs)(query, cache)
    keys, values, positions, _ = cache.read()
    held = np.repeat((table >= 0) & (table < 8), 4, axis=1) & (positions < np.array([[23], [18]]))
    keys, values = (jnp.where(held[..., None, None], x, 0) for x in (keys, values))
    vanilla = OperationRegistry.create("vanilla", OperationMetadata())
    given = mask.at(cache.lengths[:, None] - 1, None) & KeyPadding(held)
    expected = vanilla(query, keys, values, mask=given).attention_outputs
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_scales_of_values_below_the_normal_float16_numbers_lose_nothing() -> None:
    """Weights are multiplied by them in float16."""
    cache = DenseCache.create(batch=1, length=48, kv_heads=1, head_dim=16, dtype=jnp.float16,
                              codec=Quantized("int8", "token_head"))  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (1, 40, 1, 16), jnp.float16)
    cache = cache.append(key, key)
    scale = cache.store.value_scale * 2.0 ** -(jnp.arange(48) % 7 + 8)
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, value_scale=scale))
    query = jax.random.normal(jax.random.key(1), (1, 1, 2, 16), jnp.float16)
    out, _ = attend(cache, 2, query)
    keys = np.asarray(cache.store.key[0, 0, :40], float) * np.asarray(cache.store.key_scale[0, 0, :40, None])
    values = np.asarray(cache.store.value[0, 0, :40], float) * np.asarray(scale[0, 0, :40, None])
    weights = np.exp(np.asarray(query[0, 0], float) @ keys.T / 4)
    expected = weights / weights.sum(1, keepdims=True) @ values
    np.testing.assert_allclose(out[0, 0], expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_bfloat16_is_not_interpreted() -> None:
    cache = DenseCache.create(batch=1, length=16, kv_heads=1, head_dim=16)
    operation = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform="cuda", interpret=True))
    request = operation.request(jax.ShapeDtypeStruct((1, 1, 1, 16), jnp.bfloat16), cache, mask=Causal())
    assert "bfloat16" in {reason.value for reason in in_place_reasons(operation, "gpu", request)}


@pytest.mark.slow
def test_pages_that_are_missing_among_others_are_not_seen() -> None:
    table = jnp.asarray([[1, 2, -1, 4, 5, -1], [6, 7, 8, 9, 10, 11], [-1, 12, 13, 14, -1, 15]])
    cache = PagedCache.create(
        batch=3, pages=16, page_size=16, max_pages=6, kv_heads=1, head_dim=16, dtype=jnp.float32, table=table
    )
    tokens = jax.random.normal(jax.random.key(0), cache.store.key.shape).at[0].set(jnp.nan)  # of a page of no row
    cache = dataclasses.replace(
        cache, lengths=jnp.asarray([80, 96, 96]), store=dataclasses.replace(cache.store, key=tokens)
    )
    query = jax.random.normal(jax.random.key(1), (3, 1, 2, 16))
    for mask in (None, Causal(), SlidingWindow(30, 0)):
        got, expected = (
            jax.jit(lambda q, c, o=o, mask=mask: o(q, c, mask=mask, return_lse=True))(query, cache)
            for o in (
                OperationRegistry.create("attnops-triton:flash", METADATA),
                OperationRegistry.create("vanilla", OperationMetadata(platform="cpu")),
            )
        )
        np.testing.assert_allclose(got.attention_outputs, expected.attention_outputs, atol=1e-5)
        np.testing.assert_allclose(got.logsumexp, expected.logsumexp, atol=1e-5)
