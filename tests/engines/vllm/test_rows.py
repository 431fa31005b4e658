"""Attention over vLLM's pages, through its hook and on its meshes, against a plain computation in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_pages import PAGE, PAGES, Batch, N, batch, check, plain, problem
from jax.sharding import Mesh
from tpu_inference.layers.common.attention_interface import attention
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh

from attnops import OperationMetadata, UnsupportedError
from attnops_caches.engines import Scores, attend
from attnops_vllm.backend import EngineAttention

TPU = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")
INTERPRETED = (
    "plain",
    "both directions, window",
    "cap, sinks, D 128",
    "shared, both directions, sinks",
    "bfloat16, one kv head",
    "float8",
)


@pytest.mark.parametrize("case", INTERPRETED)
def test_values_and_pages_of_the_interpreted_kernel(case: str) -> None:
    with jax.enable_x64(True):
        given, scores, sinks = problem(case)
    args = given.args if sinks is None else (*given.args, sinks.astype(jnp.float32))
    out, pages = jax.jit(functools.partial(attend, TPU, scores))(*args)
    with jax.enable_x64(True):
        check(given, scores, sinks, out, pages)


def mesh_of(data: int, model: int, **others: int) -> Mesh:
    sizes = {"data": data, "model": model} | others
    shape = [sizes.get(name, 1) for name in MESH_AXIS_NAMES]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), MESH_AXIS_NAMES)


def through_the_engine(given: Batch, mesh: Mesh, scores: Scores, sinks: Any = None) -> tuple[Any, Any]:
    """`attention` of tpu-inference with this backend; the output and the pages."""
    md = AttentionMetadata(
        input_positions=jnp.zeros((N,), jnp.int32), block_tables=given.table, seq_lens=given.lengths,
        query_start_loc=given.starts, request_distribution=given.distribution,
    )  # fmt: skip

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pages: Any, query: Any, key: Any, value: Any, md: Any) -> Any:
        return attention(
            pages, query, key, value, md, mesh, sm_scale=scores.scale, attention_chunk_size=scores.window,
            attn_logits_soft_cap=scores.soft_cap, sinks=sinks, update_kv_cache=scores.updates,
            use_causal_mask=scores.causal, k_scale=scores.k_scale, v_scale=scores.v_scale, decode_query_size=4,
            attention_backend=EngineAttention(),
        )  # fmt: skip

    pages, out = run(given.pages, given.query, given.key, given.value, md)
    return out, pages


def test_a_mesh_shards_heads_and_rows() -> None:
    scores, sinks = Scores(scale=0.3, window=30), jnp.linspace(-1, 2, 4).astype(jnp.float32)
    parts = [batch(seed=seed) for seed in (0, 1)]
    with jax.enable_x64(True):
        wanted = [plain(part, scores, sinks) for part in parts]
    joined = Batch(*(jnp.concatenate(x) for x in zip(*(part.args for part in parts), strict=True)))
    mesh = mesh_of(2, 2)
    shape = get_kv_cache_shape_with_mesh(mesh, 2 * PAGES, PAGE, 2, 64, jnp.float32, attention_backend=EngineAttention())
    assert joined.pages.shape == tuple(shape)
    out, pages = through_the_engine(joined, mesh, scores, sinks)
    np.testing.assert_allclose(out, np.concatenate([x for x, _ in wanted]), atol=2e-5)
    np.testing.assert_array_equal(pages, np.concatenate([x for _, x in wanted]).astype(np.float32))


def test_fewer_kv_heads_than_shards_are_repeated() -> None:
    given = batch(K=1)
    with jax.enable_x64(True):
        wanted, pages_wanted = plain(given, Scores(scale=0.3))
    twice = dataclasses.replace(given, pages=jnp.repeat(given.pages, 2, axis=2))
    out, pages = through_the_engine(twice, mesh_of(1, 2), Scores(scale=0.3))
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_array_equal(pages, np.repeat(pages_wanted, 2, axis=2).astype(np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda given, mesh: (dataclasses.replace(given, key=given.key.astype(jnp.bfloat16)), mesh),
            "pages' dtype float32",
        ),
        (lambda given, mesh: (given, mesh_of(1, 1, dcp=2)), "shards the context by dcp"),
        (lambda given, mesh: (batch(H=6, K=3), mesh_of(1, 2)), "shards heads in 2, and the layer has 3 kv heads"),
    ],
)
def test_what_is_not_served_is_refused(change: Any, words: str) -> None:
    given, mesh = change(batch(), mesh_of(1, 1))
    with pytest.raises(UnsupportedError, match=words):
        through_the_engine(given, mesh, Scores(scale=0.3))


def test_a_dtype_that_is_not_stored_is_refused_when_pages_are_made() -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache_dtype=float4_e2m1fn: must be one of"):
        EngineAttention().get_kv_cache_shape(8, 16, 2, 64, jnp.float4_e2m1fn)
