"""Attention over the engine's pages against a plain computation in float64, and the pages after it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tpu_inference.layers.common.attention_interface import attention
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh

from attnops import OperationMetadata, UnsupportedError
from attnops_vllm.backend import EngineAttention
from attnops_vllm.pages import pages_shape
from attnops_vllm.rows import Scores, attend

PAGE, MAX_PAGES, PAGES, N = 16, 5, 24, 64
# New tokens and tokens of each row: a decoded one, a chunk of a prompt, a whole prompt, drafts; and rows of padding.
ROWS = ((1, 41), (19, 50), (23, 23), (3, 17))
B = 6
KERNELS = {
    "native": OperationMetadata(),
    "TPU": OperationMetadata(platform="tpu", interpret=True, on_unsupported="error"),
}


@dataclasses.dataclass
class Batch:
    """What the engine gives a layer."""

    pages: Any
    query: Any
    key: Any
    value: Any
    lengths: Any
    table: Any
    starts: Any
    distribution: Any

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, x.name) for x in dataclasses.fields(self))


def batch(H: int = 4, K: int = 2, D: int = 64, dtype: Any = jnp.float32, seed: int = 0) -> Batch:
    """Rows with tokens at random pages; NaN in pages that no row has, and after the tokens of a page."""
    rng = np.random.default_rng(seed)
    shape = pages_shape(PAGES, PAGE, K, D, dtype)
    numbers = rng.permutation(PAGES).astype(np.int32)
    table, tokens = np.zeros((B, MAX_PAGES), np.int32), rng.standard_normal(shape)
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    held = np.zeros((PAGES, PAGE), bool)
    for row, (new, length) in enumerate(ROWS):
        count = -(-length // PAGE)
        table[row, :count], numbers = numbers[:count], numbers[count:]
        for i in range(length - new):
            held[table[row, i // PAGE], i % PAGE] = True
    tokens = tokens if is_float else np.clip(40 * tokens, -127, 127)
    tokens = np.where(held[:, None, None, :, None], tokens, np.nan if is_float else 0)
    tokens[..., D : shape[-1] - D] = np.where(held[:, None, None, :, None], 0, tokens[..., D : shape[-1] - D])
    starts = np.zeros(B + 1, np.int32)
    starts[1 : len(ROWS) + 1] = np.cumsum([new for new, _ in ROWS])
    lengths = np.full(B, 7, np.int32)  # of padding: any
    lengths[: len(ROWS)] = [length for _, length in ROWS]
    given = (rng.standard_normal((N, heads, D)) for heads in (H, K, K))
    query, key, value = (jnp.asarray(x, jnp.float32) for x in given)
    key, value = ((x if is_float else jnp.clip(40 * x, -127, 127)).astype(dtype) for x in (key, value))
    query = query.astype(dtype if jnp.dtype(dtype).itemsize > 1 else jnp.bfloat16)
    rows = map(jnp.asarray, (lengths, table.reshape(-1), starts))
    distribution = jnp.array([1, 1, len(ROWS)], jnp.int32)
    return Batch(jnp.asarray(tokens).astype(dtype), query, key, value, *rows, distribution)


def plain(given: Batch, scores: Scores, sinks: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The output and the pages, in float64; 0 for queries of padding."""
    pages, query, key, value, lengths, table, starts, _ = (
        np.asarray(x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x) for x in given.args
    )
    pages, D, H = pages.astype(np.float64).copy(), query.shape[2], query.shape[1]
    out, K = np.zeros(query.shape), key.shape[1]
    for row in range(len(ROWS)):
        T, first = starts[row + 1] - starts[row], lengths[row] - (starts[row + 1] - starts[row])
        at = [(table.reshape(B, -1)[row, i // PAGE], 0, slice(None), i % PAGE) for i in range(lengths[row])]
        for t in range(T if scores.updates else 0):
            pages[at[first + t]] = 0
            pages[at[first + t]][:, :D] = key[starts[row] + t]
            pages[at[first + t]][:, pages.shape[-1] - D :] = value[starts[row] + t]
        tokens = np.stack([pages[x] for x in at]) if at else np.zeros((0, K, pages.shape[-1]))
        keys, values = (
            tokens[..., :D] * (scores.k_scale or 1),
            tokens[..., tokens.shape[-1] - D :] * (scores.v_scale or 1),
        )
        for t in range(T):
            i, j = first + t, np.arange(lengths[row])
            sees = (j <= i) | (not scores.causal)
            sees &= (j > i - scores.window) if scores.window else True
            for h in range(H):
                s = keys[:, h * K // H] @ query[starts[row] + t, h] * scores.scale
                s = scores.soft_cap * np.tanh(s / scores.soft_cap) if scores.soft_cap else s
                s = np.where(sees, s, -np.inf)
                most = max(s.max(), -np.inf if sinks is None else float(sinks[h]))
                weights = np.exp(s - most)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - most))
                out[starts[row] + t, h] = weights @ values[:, h * K // H] / total
    return out, pages


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, False),
    "window, D 80": ({"D": 80}, {"window": 9}, False),
    "both directions, window": ({}, {"causal": False, "window": 6}, False),
    "cap, sinks, D 128": ({"D": 128}, {"soft_cap": 3.0}, True),
    "shared, D 64": ({}, {"updates": False}, False),
    "shared, both directions, sinks": ({}, {"updates": False, "causal": False}, True),
    "bfloat16, one kv head": ({"K": 1, "dtype": jnp.bfloat16}, {"window": 20}, False),
    "int8": ({"dtype": jnp.int8}, {"k_scale": 0.02, "v_scale": 0.03}, False),
    "float8": ({"dtype": jnp.float8_e4m3fn}, {"k_scale": 0.7, "v_scale": 1.5}, True),
}
INTERPRETED = (
    "plain",
    "both directions, window",
    "cap, sinks, D 128",
    "shared, both directions, sinks",
    "bfloat16, one kv head",
    "float8",
)


def problem(case: str) -> tuple[Batch, Scores, Any]:
    of_batch, of_scores, has_sinks = CASES[case]
    given, scores = batch(**of_batch), Scores(**{"scale": 0.3} | of_scores)
    if not scores.updates:  # another layer has written the tokens
        pages = plain(given, dataclasses.replace(scores, updates=True))[1]
        given = dataclasses.replace(given, pages=jnp.asarray(pages).astype(given.pages.dtype))
    return given, scores, jnp.linspace(-1, 2, given.query.shape[1]) if has_sinks else None


def check(given: Batch, scores: Scores, sinks: Any, out: Any, pages: Any) -> None:
    wanted, wanted_pages = plain(given, scores, sinks)
    tolerance = 2e-5 if given.query.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.asarray(pages.astype(jnp.float32)), wanted_pages.astype(np.float32))


@pytest.mark.parametrize(("kernel", "case"), [*(("native", x) for x in CASES), *(("TPU", x) for x in INTERPRETED)])
def test_values_and_pages(kernel: str, case: str) -> None:
    with jax.enable_x64(True):
        given, scores, sinks = problem(case)
    args = given.args if sinks is None else (*given.args, sinks.astype(jnp.float32))
    out, pages = jax.jit(functools.partial(attend, KERNELS[kernel], scores))(*args)
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
