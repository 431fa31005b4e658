"""Which calls over caches the kernel computes, and why native `flash` computes the others."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry, Reason
from attnops.biases import ALiBi
from attnops.masks import Causal
from attnops_caches import DenseCache, PagedCache, Quantized, in_place_reasons
from attnops_cpu.caches.reader import kernel_reasons
from attnops_cpu.library import Library, library
from attnops_testing.cache_features import CACHE_FEATURES
from attnops_testing.caches import cache_problem, check_cache
from attnops_testing.runner import Status, Subject

SUBJECT = Subject(operation="attnops-cpu:flash", platform="cpu")
# Combinations that together have each storage, codec, content and number of heads.
QUICK = (
    ("paged", "int8 by token_head", "Causal", "GQA", "4 queries", "bfloat16", "logsumexp", "left padding", "sinks"),
    ("ring", "window per head", "MQA", "3 queries", "soft cap", "query_lengths", "op.step"),
)
SLOW = (
    ("paged", "KeyPadding", "GQA", "5 queries", "D ≠ Dv", "array bias", "logsumexp"),
    ("float8_e4m3fn by head", "latent", "MQA", "Causal", "float16"),
    ("paged", "float8_e5m2 by tensor", "joined", "GQA", "MaskFn", "bfloat16"),
    ("window per batch", "ALiBi", "4 queries", "softmax_scale", "bfloat16"),
    ("paged", "latent", "int8 by token_head", "GQA", "3 queries", "bfloat16", "~mask"),
    ("packed rows", "paged", "Causal", "GQA", "bfloat16", "logsumexp", "op.step", "sinks"),
    ("packed rows", "window per batch", "int4 by token_head", "GQA", "left padding"),
    ("packed rows", "ring", "window per head", "19 queries", "soft cap"),
    ("packed rows", "KeyPadding", "array bias", "GQA", "D ≠ Dv", "logsumexp"),
    ("19 queries", "paged", "Causal", "GQA", "int4 by head", "latent", "logsumexp"),
    ("19 queries", "Dense", "int8 by token_head", "MQA", "float16", "sinks"),
    ("19 queries", "~mask", "float8_e4m3fn by token_head", "joined", "bfloat16", "query_lengths"),
)


def reasons(features: tuple[str, ...]) -> list[Reason]:
    """Why the kernel does not compute a problem."""
    problem = cache_problem(SUBJECT, features)
    operation = SUBJECT.make(problem.metadata)

    found: list[Reason] = []

    def trace(query: Any, _key: Any, _value: Any, cache: Any, rows: Any) -> None:
        given = {} if rows is None else {"rows" if problem.spec.rows == "packed" else "query_lengths": rows}
        request = operation.request(query, cache, **problem.options, **given)
        assert [x.argument for x in in_place_reasons(operation, "cpu", request)] == ["bias"] * ("ScoreFn" in features)
        found.extend(kernel_reasons(request))

    jax.eval_shape(trace, *problem.arguments)
    return found


@pytest.mark.parametrize("feature", CACHE_FEATURES)
def test_features_are_of_the_kernel(feature: str) -> None:
    assert not reasons((feature,))


@pytest.mark.parametrize("bias", ["ALiBi", "RelativePosition", "array bias"])
def test_a_bias_of_many_queries_is_of_native_flash(bias: str) -> None:
    assert [reason.argument for reason in reasons(("19 queries", bias))] == ["query"]


@pytest.mark.parametrize("features", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids="+".join)
def test_combinations_are_of_the_kernel_and_right(features: tuple[str, ...]) -> None:
    assert not reasons(features)
    outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


def described(cache: Any, T: int = 1, **options: Any) -> str:
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata())
    query = jax.ShapeDtypeStruct((2, T, 4, 16), cache.dtype)
    request = operation.request(query, cache, mask=Causal(), **options)
    return str(attnops.explain(request, "attnops-cpu:flash"))


def test_explain_has_the_reader_and_its_instruction_set() -> None:
    cache = jax.eval_shape(lambda: DenseCache.create(batch=2, length=32, kv_heads=2, head_dim=16))
    assert "reads the cache in place (forward_cpu)" in described(cache)
    assert f"kernels in C++ for {library().isa}" in described(cache)
    assert f"kernels in C++ for {library().isa}" in described(cache, T=17)
    text = described(cache, T=17, bias=ALiBi(np.ones(4, np.float32)))
    assert "reads the cache in place (forward_cpu)" in text
    assert "in plain JAX, as native flash: query=17: must be at most 16 tokens a row with a bias" in text


def test_rows_are_read_by_themselves() -> None:
    make = functools.partial(PagedCache.create, batch=2, pages=8, page_size=16, max_pages=4, kv_heads=2, head_dim=16)
    cache = jax.eval_shape(make)
    assert "is read row by row by attnops-cpu's kernel" in described(cache)


def test_without_a_library_native_flash_reads_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Library("", (), Reason("attnops-cpu's library", "missing", "must be there", "install a compiler"))
    monkeypatch.setattr("attnops_cpu.caches.reader.library", lambda: missing)
    monkeypatch.setattr("attnops_cpu.flash.operation.library", lambda: missing)
    make = functools.partial(DenseCache.create, batch=1, length=8, kv_heads=1, head_dim=8, codec=Quantized("int8"))
    cache = jax.eval_shape(make)
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata())
    request = operation.request(jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.bfloat16), cache)
    assert {reason.argument for reason in in_place_reasons(operation, "cpu", request)} == {"attnops-cpu's library"}
