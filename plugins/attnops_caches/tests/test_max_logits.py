"""The largest score that each query sees over a cache: in place by native `flash`, through read() by other kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import DenseCache, in_place_reasons
from attnops_testing.cache_features import cache_rows
from attnops_testing.caches import cache_problem
from attnops_testing.pairs import joined
from attnops_testing.runner import Subject

NATIVE = Subject(operation="attnops:flash", platform="cpu")
PACKED = "Causal", "int8 by token_head", "3 queries", "paged", "packed rows", "GQA", "left padding", "sinks", "soft cap"
READ = ("SlidingWindow", "5 queries", "ring", "GQA", "op.step", "sinks")


def check(subject: Subject, names: tuple[str, ...]) -> None:
    problem = cache_problem(subject, names)
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, return_max_logits=True))
    problem.check(subject.make(problem.metadata), subject.compiler_options)


@pytest.mark.parametrize("row", [PACKED, *cache_rows()], ids=joined)
@pytest.mark.tier(quick=[joined(PACKED)], every=3)
def test_native_flash_reads_it_in_place(row: tuple[str, ...]) -> None:
    check(NATIVE, row)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_kernels_read_the_cache_into_arrays(platform: str) -> None:
    check(Subject(operation="flash", platform=platform, interpret=True), READ)


@pytest.mark.parametrize("platform", ["cpu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("tpu", "cuda"))])
def test_what_a_reader_does_not_return_is_a_reason(platform: str) -> None:
    operation = OperationRegistry.create("flash", OperationMetadata(platform=platform, interpret=platform != "cpu"))
    cache = DenseCache.create(batch=1, length=128, kv_heads=2, head_dim=128, dtype=jnp.float32)
    query = jax.ShapeDtypeStruct((1, 1, 2, 128), np.float32)
    request = operation.request(query, cache, mask=Causal(), return_max_logits=True)
    reasons = in_place_reasons(operation, {"cpu": "native", "cuda": "gpu"}.get(platform, platform), request)
    assert [x.argument for x in reasons] == ([] if platform == "cpu" else ["return_max_logits"])
