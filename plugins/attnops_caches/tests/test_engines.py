"""Attention of packed rows over an engine's pages, against a plain computation in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from engine_pages import CASES, check, problem

from attnops import OperationMetadata, UnsupportedError
from attnops_caches.engines import attend, pages_shape


@pytest.mark.parametrize("case", CASES)
@pytest.mark.tier(quick=[], slow=["plain", "cap, sinks, D 128", "shared, both directions, sinks", "float8"])
def test_values_and_pages(case: str) -> None:
    with jax.enable_x64(True):
        given, scores, sinks = problem(case)
    args = given.args if sinks is None else (*given.args, sinks.astype(jnp.float32))
    out, pages = jax.jit(functools.partial(attend, OperationMetadata(), scores))(*args)
    with jax.enable_x64(True):
        check(given, scores, sinks, out, pages)


def test_pages_that_are_not_stored_are_refused_when_they_are_made() -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache_dtype=float4_e2m1fn: must be one of"):
        pages_shape(8, 16, 2, 64, jnp.float4_e2m1fn)
