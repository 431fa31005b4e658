"""A few queries over every slot of a float32 cache at once: values, and when it is done."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache
from attnops_caches.flash import attention as cached
from attnops_caches.flash import whole
from attnops_testing import oracle
from attnops_testing.cache_features import CacheSpec
from attnops_testing.cache_problem import CacheProblem
from attnops_testing.tolerance import OUTPUT_FACTOR, assert_close, tolerance

FLASH = OperationRegistry.create("flash", OperationMetadata(block_k=8))


class WithoutNaN(CacheProblem):
    """A problem whose slots that were never written hold 0."""

    @property
    def cache(self) -> Cache:
        return jax.tree.map(lambda x: jnp.nan_to_num(x) if x.dtype == jnp.float32 else x, super().cache)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What computes each call: "whole" or "tiles". Nothing is compiled once for several tests."""
    found: list[str] = []
    monkeypatch.setattr(cached, "_compiled", cached._forward)

    def cond(predicate: Any, yes: Any, no: Any) -> Any:
        is_second = yes.__closure__ is not None and "found" in yes.__code__.co_freevars
        if is_second:
            found.append("whole" if predicate else "tiles")
        return yes() if predicate else no()

    monkeypatch.setattr(whole.lax, "cond", cond)
    return found


SPECS = [
    *(CacheSpec(mask=mask, T=T, return_lse=True) for mask, T in (
        (None, 1), ("Causal", 4), ("SlidingWindow", 1), ("window per batch", 3), ("window per head", 3),
        ("Segments", 4), ("Dense", 4), ("MaskFn", 3), ("~mask", 1), ("Ancestors", 4),
    )),
    CacheSpec(T=2, kv_heads=1, sinks=True, logits_soft_cap=2.0, softmax_scale=-0.7, mask="Causal",
              return_max_logits=True),
    CacheSpec(T=4, kv_heads=2, rows="ragged", starts=True, mask="Causal", sinks=True, return_lse=True,
              return_max_logits=True),
    CacheSpec(T=3, content="Dv", mask="KeyPadding", logits_soft_cap=3.0),
    CacheSpec(storage="ring", T=4, mask="Causal"),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.mask}-{spec.T}-{spec.storage}-{spec.rows}")
def test_it_equals_the_oracle(spec: CacheSpec, monkeypatch: pytest.MonkeyPatch):
    computed: list[bool] = []

    def attend(plan: Any, query: Any, store: Any, arrays: Any, *_: Any) -> Any:
        computed.append(True)
        return whole.attend(plan, query, store, arrays)

    monkeypatch.setattr(cached, "_compiled", cached._forward)
    monkeypatch.setattr(whole, "attend_or", attend)
    WithoutNaN(spec).check(FLASH)
    assert computed


def over(lengths: list[int], hidden: float = 0.0, T: int = 1, S: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """The output over a cache of rows of so many tokens, and the oracle's; slots beyond hold ``hidden``."""
    rng = np.random.default_rng(0)
    B, K, D = len(lengths), 2, 16
    key, value = (rng.standard_normal((B, S, K, D)).astype(np.float32) for _ in range(2))
    query = rng.standard_normal((B, T, K, D)).astype(np.float32)
    is_seen = np.arange(S) < np.array(lengths)[:, None]
    empty = DenseCache.create(batch=B, length=S, kv_heads=K, head_dim=D, dtype=jnp.float32)
    stored = (np.where(is_seen[..., None, None], x, hidden).swapaxes(1, 2) for x in (key, value))
    store = dataclasses.replace(empty.store, **dict(zip(("key", "value"), map(jnp.asarray, stored), strict=True)))
    cache = dataclasses.replace(empty, store=store, lengths=jnp.asarray(lengths, jnp.int32))
    found = FLASH(jnp.asarray(query), cache, mask=Causal()).attention_outputs
    positions = np.array(lengths)[:, None] - T + np.arange(T)
    mask = (np.arange(S) <= positions[..., None])[:, None]
    exact = oracle.attention(query, key, value, mask=mask)
    return np.asarray(found), exact.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "by"),
    [([64, 64], "whole"), ([64, 33], "whole"), ([64, 32], "whole"), ([64, 24], "tiles"), ([9], "tiles")],
)
def test_most_tiles_must_be_active(lengths: list[int], by: str, called: list[str]):
    found, exact = over(lengths)
    assert called == [by]
    np.testing.assert_allclose(found, exact, atol=2e-6)


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
@pytest.mark.slow
def test_what_is_not_finite_in_a_slot_that_nothing_sees_is_left_out(hidden: float, called: list[str]):
    found, exact = over([60, 64], hidden)
    assert called == ["tiles"]
    np.testing.assert_allclose(found, exact, atol=2e-6)


@pytest.mark.slow
def test_bfloat16_biases_and_many_queries_are_computed_in_tiles(called: list[str]):
    for dtype, T, options in (("bfloat16", 1, {}), ("float32", 12, {}), ("float32", 1, {"bias": True})):
        cache = DenseCache.create(batch=1, length=64, kv_heads=2, head_dim=16, dtype=dtype)
        cache = dataclasses.replace(cache, lengths=jnp.array([64], jnp.int32))
        given = {name: jnp.zeros((1, 1, T, 64)) for name in options}
        FLASH(jnp.ones((1, T, 2, 16), dtype), cache, mask=Causal(), **given)
    assert not called


@pytest.mark.slow
def test_a_long_row_is_within_the_tolerance_rule(called: list[str]):
    rng = np.random.default_rng(0)
    S, D = 32768, 16
    key, value = (rng.standard_normal((1, S, 1, D)).astype(np.float32) for _ in range(2))
    query = rng.standard_normal((1, 1, 1, D)).astype(np.float32)
    cache = DenseCache.create(batch=1, length=S, kv_heads=1, head_dim=D, dtype=jnp.float32).append(key, value)
    found = FLASH(jnp.asarray(query), cache, mask=Causal()).attention_outputs
    assert called == ["whole"]
    exact, narrow = (oracle.attention(query, key, value, dtype=dtype) for dtype in (np.float64, np.float32))
    assert_close(
        "output", found, exact.out, tolerance(exact.out, narrow.out, exact.out_magnitude, np.float32, OUTPUT_FACTOR)
    )
