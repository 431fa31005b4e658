"""The kernel over caches in Pallas's interpreter, with races detected and NaN in memory that nothing was written to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, Reason
from attnops.masks import Causal, Dense, KeyPadding, Lengths, Mask, MaskFn
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache, in_place_reasons, step_reasons
from attnops_caches.bits import to_bits
from attnops_testing.caches import cache_problem, check_cache
from attnops_testing.runner import Status, Subject
from attnops_tpu.caches import batches
from attnops_tpu.generations import target
from attnops_tpu.interpreter import detect_races

SUBJECT = Subject(operation="attnops-tpu:flash", platform="tpu", interpret=True)

# Together each mask, bias, storage, content and number of heads.
QUICK = (("paged", "window per batch", "19 queries", "GQA", "sinks", "soft cap", "logsumexp", "left padding"),)
SLOW = (
    ("ring", "MaskFn", "4 queries", "MQA", "bfloat16", "query_lengths", "softmax_scale"),
    ("paged", "window per head", "5 queries", "GQA", "ALiBi"),
    ("Ancestors", "5 queries", "GQA", "op.step", "joined"),
    ("paged", "Segments", "latent", "GQA", "3 queries"),
    ("paged", "mask | mask", "19 queries", "sinks"),
    ("paged", "~mask", "MQA", "query_lengths", "left padding"),
    ("paged", "mask & mask", "joined", "bfloat16"),
    ("paged", "Dense", "GQA"),
    ("paged", "int8 by token_head", "Causal", "GQA", "3 queries", "left padding"),
    ("paged", "float8_e4m3fn by head", "window per batch", "5 queries", "op.step", "D ≠ Dv"),
    ("ring", "int8 by head", "latent", "logsumexp"),
    ("paged", "float8_e4m3fn by token_head", "latent", "19 queries", "GQA", "bfloat16"),
    ("paged", "packed rows", "Segments", "GQA", "19 queries", "sinks", "soft cap", "logsumexp", "left padding"),
    ("paged", "packed rows", "window per head", "ScoreFn", "4 queries", "op.step", "int8 by token_head"),
    ("paged", "packed rows", "SlidingWindow", "4 queries", "float8_e4m3fn by head"),
    ("packed rows", "Chunked", "ALiBi", "float8_e4m3fn by head", "joined", "19 queries"),
)
EXHAUSTIVE = (
    ("window per head", "ALiBi", "3 queries", "GQA", "op.step", "query_lengths"),
    ("paged", "bfloat16", "19 queries", "left padding", "op.step", "int8 by head"),
    ("KeyPadding", "ScoreFn", "4 queries", "D ≠ Dv"),
    ("paged", "PrefixLM", "GQA", "5 queries"),
    ("paged", "Chunked", "logsumexp", "op.step", "bfloat16"),
    ("float8_e5m2 by tensor", "MQA", "sinks", "soft cap", "query_lengths", "4 queries"),
    ("Lengths", "19 queries", "soft cap", "latent"),
    ("ring", "packed rows", "MaskFn", "MQA", "bfloat16", "5 queries"),
    ("paged", "packed rows", "window per batch", "19 queries", "joined", "logsumexp"),
    ("paged", "packed rows", "Lengths", "5 queries", "left padding", "float8_e4m3fn by head"),
    ("packed rows", "mask & mask", "ScoreFn", "4 queries", "sinks"),
)


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    with detect_races():
        yield


@pytest.mark.parametrize(
    "features",
    [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW),
     *(pytest.param(x, marks=pytest.mark.exhaustive) for x in EXHAUSTIVE)], ids="+".join,
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.tier(every=9)
def test_features_are_read_in_place_and_right(features: tuple[str, ...]) -> None:
    assert not reasons(SUBJECT, features)
    outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


INT4 = (
    ("paged", "int4 by token_head", "Causal", "GQA", "3 queries", "left padding", "op.step"),
    ("ring", "int4 by head", "5 queries", "bfloat16", "logsumexp"),
    ("paged", "packed rows", "int4 by tensor", "window per head", "4 queries"),
)


@pytest.mark.parametrize("features", INT4, ids="+".join)
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_int4_of_whole_registers_is_read_in_place_and_right(features: tuple[str, ...]) -> None:
    problem = dataclasses.replace(cache_problem(SUBJECT, features), head_dim=128)
    operation = SUBJECT.make(problem.metadata)
    request = operation.request(problem.query, problem.after.cache(), **problem.options)
    assert not in_place_reasons(operation, "tpu", request)
    problem.check(operation, SUBJECT.compiler_options)


def test_int4_that_is_not_read_in_place_is_told() -> None:
    def pages(head_dim: int, **options: Any) -> Cache:
        return PagedCache.create(batch=2, pages=4, page_size=128, max_pages=2, kv_heads=2, head_dim=head_dim,
                                 codec=Quantized("int4"), **options)  # fmt: skip

    assert told(pages(128)) == told(pages(256)) == []
    assert told(pages(64, width=256)) == ["head_dim", "value_head_dim"]
    assert told(pages(128, width=384)) == ["width"]
    assert "cache" in told(pages(256, latent=128))


@pytest.mark.slow
def test_an_infinite_value_that_is_joined_to_its_key_is_no_score() -> None:
    cache = PagedCache.create(batch=1, pages=2, page_size=4, max_pages=2, kv_heads=1, head_dim=8, dtype=jnp.float32,
                              table=[[1, 0]])  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (1, 8, 1, 8))
    cache = cache.append(key, key.at[0, 3, 0, 2].set(jnp.inf))
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    out = jax.jit(lambda q, c: operation(q, c, mask=Causal()).attention_outputs)(key[:, -1:], cache)
    np.testing.assert_array_equal(np.isposinf(out[0, 0, 0]), np.arange(8) == 2)
    assert not np.isnan(out).any()


@pytest.mark.slow
def test_16_bit_tokens_that_are_wider_than_the_lanes_are_interpreted() -> None:
    cache = PagedCache.create(batch=1, pages=2, page_size=16, max_pages=2, kv_heads=1, head_dim=128, table=[[1, 0]])
    key = jax.random.normal(jax.random.key(0), (1, 20, 1, 128), jnp.bfloat16)
    cache = cache.append(key, key)
    operations = (
        OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform=name, interpret=name == "tpu"))
        for name in ("cpu", "tpu")
    )
    native, kernel = (
        jax.jit(lambda q, c, f=f: f(q, c, mask=Causal()).attention_outputs.astype(jnp.float32))(key[:, -1:], cache)
        for f in operations
    )
    np.testing.assert_allclose(kernel, native, rtol=2**-7, atol=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("features", [QUICK[0], ("paged", "float8_e4m3fn by head", "GQA", "bfloat16", "19 queries")])
@pytest.mark.tier(every=2)
def test_three_buffers_of_a_tile_and_products_of_e4m3_are_right(features: tuple[str, ...]) -> None:
    """The interpreter has the plan of `UNKNOWN`, which has neither."""
    with target("v6e"):
        outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
def test_64_heads_on_one_are_right() -> None:
    """Of rows that end with a whole tile, with a masked one, have one amid whole ones, or no other."""
    lengths = np.array([48, 41, 7, 0, 60])
    table = np.random.default_rng(0).permutation(75).reshape(5, 15)
    cache = PagedCache.create(batch=5, pages=75, page_size=4, max_pages=15, kv_heads=1, head_dim=12, latent=8,
                              dtype=jnp.float32, table=table)  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (5, 60, 1, 12))
    cache = cache.append(key, lengths=lengths)
    query = jax.random.normal(jax.random.key(1), (5, 1, 64, 12))
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=16)
    mask = Causal() & KeyPadding(np.arange(60) != np.array([[0], [20], [0], [0], [35]]))

    def run(name: str, metadata: OperationMetadata) -> jax.Array:
        operation = OperationRegistry.create(name, metadata)
        return jax.jit(lambda q, c: operation(q, c, mask=mask).attention_outputs)(query, cache)

    with target("v6e"):
        out = run("attnops-tpu:flash", metadata)
    native = run("vanilla", OperationMetadata())
    np.testing.assert_allclose(out, native, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), Lengths([20, 20])], ids=repr)
@pytest.mark.tier(every=2)
def test_tokens_of_pages_that_are_not_in_the_table_are_not_seen(mask: Mask) -> None:
    table = np.array([[1, -1, 3, -1, 5, 7], [-1, 2, 4, 6, 99, -1]])
    cache = PagedCache.create(batch=2, pages=8, page_size=4, max_pages=6, kv_heads=1, head_dim=8, dtype=jnp.float32,
                              table=jnp.asarray(table))  # fmt: skip
    pages = jax.random.normal(jax.random.key(0), cache.store.key.shape).at[0].set(jnp.nan)
    store = dataclasses.replace(cache.store, key=to_bits(pages))
    cache = dataclasses.replace(cache, store=store, lengths=jnp.array([23, 18]))
    query = jax.random.normal(jax.random.key(2), (2, 1, 2, 8))
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", interpret=True))
    out = jax.jit(lambda q, c: operation(q, c, mask=mask).attention_outputs)(query, cache)
    keys, values, positions, _ = cache.read()
    held = np.repeat((table >= 0) & (table < 8), 4, axis=1) & (positions < np.array([[23], [18]]))
    keys, values = (jnp.where(held[..., None, None], x, 0) for x in (keys, values))
    vanilla = OperationRegistry.create("vanilla", OperationMetadata())
    given = mask.at(cache.lengths[:, None] - 1, None) & KeyPadding(held)
    expected = vanilla(query, keys, values, mask=given).attention_outputs
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def reasons(subject: Subject, features: tuple[str, ...]) -> list[Reason]:
    """Why a problem is not read in place."""
    problem = cache_problem(subject, features)
    operation = subject.make(problem.metadata)
    query, _, _, _, rows = problem.arguments
    given = {"rows": rows} if isinstance(rows, Rows) else {}
    request = operation.request(query, problem.after.cache(), **problem.options, **given)
    return in_place_reasons(operation, "tpu", request)


@pytest.mark.slow
def test_what_is_an_array_by_query_and_key_is_not_read_in_place() -> None:
    assert {r.argument for r in reasons(SUBJECT, ("paged", "Dense", "4 queries"))} == {"mask"}
    assert {r.argument for r in reasons(SUBJECT, ("paged", "RelativePosition"))} == {"bias"}
    assert {r.argument for r in reasons(SUBJECT, ("paged", "array bias", "4 queries"))} == {"bias"}
    assert {r.argument for r in reasons(SUBJECT, ("paged", "Dense", "packed rows"))} == {"mask"}
    assert not reasons(SUBJECT, ("packed rows", "Causal", "19 queries"))


def test_masks_of_packed_rows_are_read_in_place_unless_they_look_up_by_query_and_key() -> None:
    for mask in ("Segments", "KeyPadding", "Lengths", "MaskFn", "window per batch"):
        assert not reasons(SUBJECT, ("packed rows", mask)), mask
    cache = PagedCache.create(batch=2, pages=4, page_size=16, max_pages=2, kv_heads=1, head_dim=128)
    seen = jnp.ones((32, 32), bool)
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
    query = jax.ShapeDtypeStruct((1, 3, 1, 128), jnp.bfloat16)
    mask = MaskFn(lambda b, h, q, kv: seen[q, kv])
    request = operation.request(query, cache, mask=mask, rows=Rows([0, 1, 3], [1, 0]))
    (reason,) = in_place_reasons(operation, "tpu", request)
    assert (reason.argument, reason.limit) == ("mask", "this kernel can't compute it for each score")


@pytest.mark.slow
def test_packed_queries_of_fewer_tiles_than_the_cache_has_rows_have_their_own_values_by_key() -> None:
    cache = PagedCache.create(batch=4, pages=8, page_size=4, max_pages=2, kv_heads=1, head_dim=8, dtype=jnp.float32,
                              table=jnp.arange(8).reshape(4, 2))  # fmt: skip
    key = jax.random.normal(jax.random.key(0), (4, 8, 1, 8))
    cache = cache.append(key, key)
    query, is_token = jax.random.normal(jax.random.key(1), (4, 1, 2, 8)), np.arange(32).reshape(4, 8) % 7 > 2
    packed, rows = query[jnp.array([3, 1]), 0][None], Rows([0, 1, 2], [3, 1])
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", interpret=True))
    mask = KeyPadding(is_token)
    out = jax.jit(lambda q, c: operation(q, c, mask=mask, rows=rows).attention_outputs)(packed, cache)
    vanilla = OperationRegistry.create("vanilla", OperationMetadata())
    wanted = jax.jit(lambda q, k: vanilla(q, k, k, mask=mask).attention_outputs)(query, key)
    np.testing.assert_allclose(out[0], wanted[jnp.array([3, 1]), 0], rtol=1e-5, atol=1e-6)


def not_in_place(cache: Cache, T: int = 1, **options: object) -> list[Reason]:
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
    query = jax.ShapeDtypeStruct((2, T, 4, cache.head_dim), jnp.bfloat16)
    request = operation.request(query, cache, mask=Causal(), **options)
    return in_place_reasons(operation, "tpu", request)


def told(cache: Cache, T: int = 1, **options: object) -> list[str]:
    return [r.argument for r in not_in_place(cache, T, **options)]


def test_layouts_that_a_tpu_would_copy_are_not_read_in_place() -> None:
    def pages(page_size: int, head_dim: int = 128, value_head_dim: int | None = None, **options: int) -> Cache:
        return PagedCache.create(batch=2, pages=4, page_size=page_size, max_pages=2, kv_heads=2, head_dim=head_dim,
                                 value_head_dim=value_head_dim, **options)  # fmt: skip

    assert told(pages(16)) == told(pages(48)) == told(pages(256, 256, 128)) == told(pages(16, 64)) == []
    assert told(pages(8)) == ["page_size"]
    assert told(pages(16, 80)) == told(pages(16, 576, latent=512)) == ["width"]
    assert told(pages(16, 80, width=256)) == told(pages(16, 576, latent=512, width=640)) == []
    assert told(DenseCache.create(batch=2, length=80, kv_heads=2, head_dim=64)) == ["head_dim", "value_head_dim"]
    assert told(DenseCache.create(batch=2, length=80, kv_heads=2, head_dim=64, width=128)) == []
    assert told(DenseCache.create(batch=2, length=100, kv_heads=2, head_dim=128)) == ["length"]
    assert told(DenseCache.create(batch=2, length=80, kv_heads=2, head_dim=128)) == []

    (reason,) = not_in_place(pages(16, 80))
    assert reason.hint == "create the cache with width=256"


def test_what_no_step_of_one_kernel_writes_is_told() -> None:
    def told(cache: Cache, T: int = 1, rows: Rows | None = None) -> list[str]:
        operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
        query = jax.ShapeDtypeStruct((1 if rows else 2, T, 4, 128), jnp.bfloat16)
        request = operation.request(query, cache, mask=Causal(), rows=rows)
        return [r.argument for r in step_reasons(operation, "tpu", request)]

    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 128}
    cache = DenseCache.create(length=1024, **sizes)
    assert told(cache) == told(cache, 128) == []
    with target("v5p"):  # whose two cores would each have some of the tiles
        assert told(cache, 512) == []
        assert told(cache, 513) == ["query"]
    with target("v6e"):
        assert told(cache, 513) == told(cache, 1 << 14) == []
        assert told(cache, 1 << 20) == ["query"]
    assert told(DenseCache.create(length=1024, codec=Quantized("int8", "token_head"), **sizes)) == []
    ring = WindowCache.create(window=128, max_append=129, **sizes)
    assert told(ring) == told(ring, 128) == []
    assert told(WindowCache.create(window=1, max_append=128, **sizes), 128) == ["query"]
    assert told(cache, 2, Rows([0, 1, 2], [0, 1])) == []
    with target("v5p"):  # of rows of several tiles the tokens are written before
        assert told(cache, 1024, Rows([0, 1, 2], [0, 1])) == []


def test_scales_of_tokens_fill_the_lanes() -> None:
    def pages(page_size: int, scales: str) -> Cache:
        given = {} if scales == "token_head" else {"key_scale": [1.0, 1.0], "value_scale": [1.0, 1.0]}
        return PagedCache.create(batch=2, pages=4, page_size=page_size, max_pages=2, kv_heads=2, head_dim=128,
                                 codec=Quantized("int8", scales), **given)  # fmt: skip

    assert told(pages(128, "token_head")) == told(pages(32, "head")) == []
    assert told(pages(64, "token_head")) == told(pages(16, "head")) == ["page_size"]


def test_a_row_of_more_tiles_of_queries_than_scalar_memory_holds_is_not_read_in_place() -> None:
    cache = PagedCache.create(batch=2, pages=4, page_size=16, max_pages=2, kv_heads=2, head_dim=128)
    assert told(cache, 1 << 23) == []
    assert "query" in told(cache, 1 << 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        ("paged", "window per batch", "4 queries", "sinks", "GQA", "op.step"),
        ("packed rows", "KeyPadding", "19 queries"),
    ],
)
@pytest.mark.tier(every=2)
def test_rows_that_do_not_fit_scalar_memory_together_are_right(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    following = batches.following
    monkeypatch.setattr(batches, "rows_a_call", lambda nq, words, shared: 1)
    monkeypatch.setattr(batches, "following", lambda *given: (calls.append(given), following(*given))[1])
    with target("v6e"):
        outcome = check_cache(SUBJECT, features)
    assert len(calls) > 1
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
def test_a_dense_mask_of_one_query_is_an_array_by_key() -> None:
    cache = DenseCache.create(batch=2, length=16, kv_heads=2, head_dim=128)
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
    query = jax.ShapeDtypeStruct((2, 1, 4, 128), jnp.bfloat16)
    request = operation.request(query, cache, mask=Dense(jnp.ones((2, 1, 1, 16), bool)))
    assert not in_place_reasons(operation, "tpu", request)
