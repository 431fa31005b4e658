"""Transposed scores in several units and parts, which the interpreter's small problems have only of small sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import PagedCache, Rows
from attnops_testing.caches import check_cache
from attnops_testing.runner import Status, Subject
from attnops_tpu.caches import transposed
from attnops_tpu.generations import target
from attnops_tpu.interpreter import detect_races

SUBJECT = Subject(operation="attnops-tpu:flash", platform="tpu", interpret=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()  # its keys lack these sizes
    monkeypatch.setattr(transposed, "SUB_ROWS", 16)
    monkeypatch.setattr(transposed, "SUB_KEYS", 16)


@pytest.mark.slow
@pytest.mark.parametrize("features", [
    ("paged", "window per batch", "19 queries", "GQA", "sinks", "soft cap", "logsumexp", "left padding"),
    ("paged", "window per head", "19 queries", "GQA", "ALiBi", "op.step"),
    ("KeyPadding", "ScoreFn", "19 queries", "GQA", "int8 by token_head"),
    ("paged", "joined", "19 queries", "GQA", "float8_e4m3fn by head", "op.step", "bfloat16"),
    ("paged", "packed rows", "Segments", "GQA", "19 queries", "logsumexp", "op.step"),
], ids="+".join)  # fmt: skip
@pytest.mark.tier(every=3)
def test_features_are_right(features: tuple[str, ...]) -> None:
    with detect_races(), target("v6e"):
        outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "mask"), [
    ("v4", Causal()), ("v6e", Causal()), ("tpu7x", Causal()), ("tpu7x", Causal() & SlidingWindow(10, 0)),
], ids=repr)  # fmt: skip
@pytest.mark.tier(every=2)
def test_units_share_masks_and_unmasked_tiles_are_computed_whole_or_in_a_loop(generation: str, mask: Mask) -> None:
    """On v6e the interpreter's plan has a loop over chunks, on tpu7x chunks of masked tiles alone, on v4 none."""
    shape = 2, 80, 2, 8
    table = np.random.default_rng(0).permutation(40).reshape(2, 20)
    cache = PagedCache.create(batch=2, pages=40, page_size=4, max_pages=20, kv_heads=2, head_dim=8, dtype=jnp.float32,
                              table=table)  # fmt: skip
    key, value = jax.random.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(1), shape)
    append = jax.jit(lambda cache, *tokens: cache.append(*tokens, lengths=np.array([80, 70])))
    cache = append(cache, key, value.at[1, 75:].set(jnp.nan))
    query = jax.random.normal(jax.random.key(2), (2, 32, 4, 8))
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)
    operation, vanilla = (OperationRegistry.create(*x) for x in
                          (("attnops-tpu:flash", metadata), ("vanilla", OperationMetadata())))  # fmt: skip
    rows = Rows([0, 32, 35], [1, 0])
    with target(generation):
        result = jax.jit(lambda q, c: operation(q, c, mask=mask, return_lse=True))(query, cache)
        run = jax.jit(lambda q, c: operation(q, c, mask=mask, rows=rows))
        packed = run(query.reshape(1, 64, 4, 8)[:, :35], cache)
    expected = jax.jit(lambda q, c: vanilla(q, c, mask=mask, return_lse=True))
    wanted = expected(query, cache)
    np.testing.assert_allclose(result.attention_outputs, wanted.attention_outputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.logsumexp, wanted.logsumexp, rtol=1e-5, atol=1e-6)
    of_row = expected(query[::-1], cache).attention_outputs[1]
    np.testing.assert_allclose(packed.attention_outputs[0, :32], of_row, rtol=1e-5, atol=1e-6)
    single = expected(jnp.concatenate([query[1:, :3]] * 2), cache).attention_outputs[0]
    np.testing.assert_allclose(packed.attention_outputs[0, 32:], single, rtol=1e-5, atol=1e-6)
