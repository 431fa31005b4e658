"""Where these kernels went wrong: caches by generation, derivatives of one's own, many heads, more tiles than fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.biases import ScoreFn
from attnops.masks import Causal, Segments
from attnops_testing import attention, attention_gradients
from attnops_testing.features import combine
from attnops_tpu.aot import compile_for
from attnops_tpu.flash import forward, tile_schedule, tile_sizes
from attnops_tpu.generations import generation, target

FIELDS: dict[str, Any] = {"on_unsupported": "error", "block_q": 16, "block_k": 16}
TPU = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", interpret=True, **FIELDS))


def test_a_generation_is_part_of_what_is_cached() -> None:
    seen = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        seen.append(generation().name)
        return x

    for name in ("v6e", "v4", "v6e"):
        with target(name):
            f(jnp.ones(2))
    assert seen == ["v6e", "v4"]


def test_a_custom_vjp_is_refused_for_each_score() -> None:
    """What is inlined would lose it; vanilla keeps it."""
    rounded = jax.custom_vjp(lambda x: jnp.round(x))
    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, d: (d,))
    x = jnp.ones((1, 24, 1, 8))
    with pytest.raises(UnsupportedError, match=r"custom_vjp_call: .* or define its derivative by jax.custom_jvp"):
        TPU(x, x, x, bias=ScoreFn(lambda s, b, h, q, kv: rounded(s)))


@pytest.mark.slow
@pytest.mark.parametrize("features", [["MQA", "Causal"], ["GQA", "mask per head", "D ≠ Dv"]])
@pytest.mark.tier(every=2)
def test_heads_that_take_turns(features: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = tile_sizes._candidates
    monkeypatch.setattr(
        tile_sizes,
        "_candidates",
        lambda metadata, problem, *options: problem.G == 1 and candidates(metadata, problem, *options),
    )
    problem = combine(features).problem(TPU.metadata)
    problem.check(OperationRegistry.create("attnops-tpu:flash", problem.metadata))


def test_many_heads_fit_the_least_memory() -> None:
    problem = tile_sizes.Problem(T=1024, S=1024, G=128, D=576, Dv=512, itemsize=2, out_itemsize=2)
    for name in ("v4", "v5p", "v6e"):
        with target(name):
            tiles = tile_sizes.choose(OperationMetadata(), problem, lambda *sizes: tile_sizes.Work(1, 1, 1))
        assert problem.G % tiles.split == 0
    assert tiles.split == 1 or tiles.split < 128


@pytest.mark.slow
@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_more_tiles_than_scalar_memory_holds(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are then computed some at a time, and so are the gradients of a bias."""
    monkeypatch.setattr(tile_schedule, "MAX_ENTRIES", 4)
    monkeypatch.setattr(tile_sizes, "MAX_ENTRIES", 4)
    spec = dataclasses.replace(combine(["Segments", "ScoreFn", "GQA"]), traced_mask=traced)
    problem = spec.problem(TPU.metadata)
    problem.check(OperationRegistry.create("attnops-tpu:flash", problem.metadata))


@pytest.mark.slow
def test_rows_that_fit_scalar_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_schedule, "MAX_ENTRIES", 10)
    causal = np.tril(np.ones((1, 2, 6, 6), np.int8))
    assert tile_schedule.row_chunks(causal) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert tile_schedule.row_chunks(jnp.asarray(causal[:, :1])) == [(i, i + 1) for i in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "entries", "most"), [(1, 10, 2), pytest.param(2, 40, 4, marks=pytest.mark.slow)], ids=["one", "joined"]
)
@pytest.mark.tier(every=2)
def test_slices_that_scalar_memory_does_not_hold_take_turns(
    B: int, entries: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jax.vmap` multiplies the tile schedules: here two of four slices fit, with one or two batches each."""
    ids = np.stack([np.arange(32) // size for size in (4, 8, 16, 32, 16, 4, 32, 32)[: 4 * B]]).reshape(4, B, 32)
    q, k, v, d = np.random.default_rng(0).normal(size=(4, 4, B, 32, 2, 8)).astype(np.float32)
    batches: list[int] = []
    rows = forward._kernel
    monkeypatch.setattr(forward, "_kernel", lambda plan, *args: (batches.append(plan.B), rows(plan, *args))[1])
    monkeypatch.setattr(tile_schedule, "MAX_ENTRIES", entries)

    def gradients(ids: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> tuple[jax.Array, Any]:
        out, pull_back = jax.vjp(lambda *qkv: TPU(*qkv, mask=Causal() & Segments(ids)).attention_outputs, q, k, v)
        return out, pull_back(d)

    out, computed = jax.jit(jax.vmap(gradients))(jnp.asarray(ids), q, k, v, d)
    assert max(batches) == most
    seen = (ids[..., :, None] == ids[..., None, :]) & np.tril(np.ones((32, 32), bool))
    for i in range(4):
        qkv = q[i], k[i], v[i]
        np.testing.assert_allclose(out[i], attention(*qkv, mask=seen[i][:, None]).out, atol=5e-6)
        expected = attention_gradients(*qkv, mask=seen[i][:, None], d_out=d[i])
        for x, y in zip(computed, (expected.values[name] for name in ("query", "key", "value")), strict=True):
            np.testing.assert_allclose(x[i], y, atol=2e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_gradients_of_32_mapped_sequences_of_131072_tokens_compile() -> None:
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu"))
    x, ids = (
        jax.ShapeDtypeStruct((32, 1, 131072, 1, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((32, 1, 131072), jnp.int32),
    )

    def gradient(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: operation(x, x, x, mask=Causal() & Segments(ids)).attention_outputs, x)[1](x)[0]

    compile_for(jax.vmap(gradient), (x, ids), "v5e")
