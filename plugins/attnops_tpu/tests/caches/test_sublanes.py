"""Calls over caches on a chip with registers of 16 rows, which no generation of the table has, interpreted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import PagedCache, Rows, in_place_reasons
from attnops_testing.caches import cache_problem, check_cache
from attnops_testing.oracle import attention
from attnops_testing.runner import Status, Subject
from attnops_tpu import generations
from attnops_tpu.generations import GENERATIONS, target
from attnops_tpu.interpreter import detect_races

SUBJECT = Subject(operation="attnops-tpu:flash", platform="tpu", interpret=True)


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(generations.GENERATIONS, "tpu7x", GENERATIONS["tpu7x"]._replace(sublanes=16))
    with target("tpu7x"), detect_races():
        yield


def test_pages_are_whole_registers() -> None:
    """A page of 16 tokens is half of a register of bfloat16."""

    def told(page: int) -> list[str]:
        cache = PagedCache.create(batch=1, pages=4, page_size=page, max_pages=4, kv_heads=1, head_dim=128, width=256)
        operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
        request = operation.request(jnp.zeros((1, 1, 1, 128), jnp.bfloat16), cache, mask=Causal())
        return [str(reason) for reason in in_place_reasons(operation, "tpu", request)]

    assert ["must be a multiple of 32" in x for x in told(16)] == [True]
    assert not told(32)


FEATURES = (
    ("paged", "Causal", "GQA", "op.step", "left padding"),
    ("paged", "window per batch", "19 queries", "GQA", "sinks", "soft cap", "logsumexp"),
    ("paged", "joined", "19 queries", "GQA", "float8_e4m3fn by head", "op.step", "bfloat16"),
    ("paged", "packed rows", "Segments", "GQA", "19 queries", "logsumexp", "op.step"),
    ("paged", "packed rows", "19 queries", "ALiBi", "int8 by token_head", "op.step"),
    ("ring", "bfloat16", "3 queries", "op.step"),
    ("paged", "latent", "GQA", "3 queries"),
    ("paged", "int4 by token_head", "19 queries", "GQA", "op.step"),
)


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.tier(every=4)
def test_features_are_right(features: tuple[str, ...]) -> None:
    problem = cache_problem(SUBJECT, features)
    if "int4 by token_head" in features:
        dataclasses.replace(problem, head_dim=128).check(SUBJECT.make(problem.metadata), SUBJECT.compiler_options)
    else:
        outcome = check_cache(SUBJECT, features)
        assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(("D", "page"), [(32, 16), (24, 16), (12, 4)])
def test_mixed_batches_are_right(D: int, page: int) -> None:
    """For features that 16 does not divide, reductions have fewer rows; single tokens are written by the kernel."""
    random = np.random.default_rng(0)
    held, H, K = (40, 23, 60), 4, 2
    key, value = random.normal(size=(2, 3, 64, K, D)).astype(np.float32)
    query, new, added = (random.normal(size=(1, 35, n, D)).astype(np.float32) for n in (H, K, K))
    table = np.random.default_rng(1).permutation(3 * 96 // page).reshape(3, -1)
    cache = PagedCache.create(batch=3, pages=table.size, page_size=page, max_pages=table.shape[1], kv_heads=K,
                              head_dim=D, dtype=jnp.float32, table=table)  # fmt: skip
    cache = cache.append(key, value, np.array(held))
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    given = Rows(jnp.array([0, 1, 34, 35]), jnp.array([1, 2, 0]))
    output, after = operation.step(query, new, added, cache, mask=Causal(), rows=given)
    for row, start, stop in (1, 0, 1), (2, 1, 34), (0, 34, 35):
        n, own = held[row], slice(start, stop)
        keys, values = (np.concatenate([x[row, :n], y[0, own]])[None] for x, y in ((key, new), (value, added)))
        seen = np.arange(keys.shape[1]) <= n + np.arange(stop - start)[:, None]
        wanted = attention(query[:, own], keys, values, mask=seen[None, None]).out
        np.testing.assert_allclose(output.attention_outputs[:, own], wanted, atol=2e-6)
    for x, y in zip(after.read()[:2], (key, value), strict=True):
        np.testing.assert_array_equal(x[0, :40], y[0, :40])
    np.testing.assert_array_equal(after.read()[0][2, 60:93], new[0, 1:34])
