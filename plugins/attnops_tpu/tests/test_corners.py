"""Where kernels go wrong: what is shared, what nobody sees, ragged ends, many heads, functions of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attnops_tpu import tile_sizes, visits
from attnops_tpu.generations import generation, target

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.biases import ScoreFn
from attnops.masks import Causal, Lengths
from attnops.testing.features import combine

FIELDS: dict[str, Any] = {"on_unsupported": "error", "block_q": 16, "block_k": 16}
TPU = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", interpret=True, **FIELDS))
VANILLA = OperationRegistry.create("vanilla", OperationMetadata(**FIELDS))
RNG = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.uniform(-1.7, 1.7, shape), jnp.float32)


def agree(function: Any, *arguments: Any) -> None:
    """Values and gradients of ``function(operation, *arguments)`` are those of vanilla."""

    def run(operation: Any) -> list[jax.Array]:
        both = jax.value_and_grad(lambda *x: (function(operation, *x) ** 2).sum(), tuple(range(len(arguments))))
        return jax.tree.leaves(jax.jit(both)(*arguments))

    found, expected = run(TPU), run(VANILLA)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * max(1, float(np.abs(other).max())))


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, 0, 0)])
def test_vmap_over_some_of_the_arguments(mapped: tuple[int | None, ...]) -> None:
    shapes = (1, 24, 2, 8), (1, 24, 1, 8), (1, 24, 1, 8)
    qkv = [draw(*([3] * (axis is not None)), *shape) for axis, shape in zip(mapped, shapes, strict=True)]

    def call(operation: Any, *qkv: Any) -> Any:
        one = lambda *x: operation(*x, mask=Causal()).attention_outputs  # noqa: E731
        return jax.vmap(one, in_axes=mapped)(*qkv)

    agree(call, *qkv)


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


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_where_hidden_tokens_hold_nan(bias: bool) -> None:
    hidden = np.arange(40)[None, :] >= np.array([30, 40])[:, None]
    q, k, v, t = draw(2, 40, 2, 8), draw(2, 40, 2, 8), draw(2, 40, 2, 8), draw(40) + 3
    k, v = (jnp.where(hidden[:, :, None, None], jnp.nan, x) for x in (k, v))

    def call(operation: Any, q: Any, t: Any) -> Any:
        changed = {"bias": ScoreFn(lambda s, b, h, q, kv, t: s * t[q], (t,))} if bias else {"logits_soft_cap": 5.0}
        return operation(q, k, v, mask=Lengths(np.array([30, 40])), **changed).attention_outputs + 0 * t.sum()

    agree(call, q, t)


@pytest.mark.parametrize("by", ["q", "kv"])
def test_a_function_that_is_finite_at_every_index_there_is(by: str) -> None:
    def call(operation: Any, q: Any, k: Any, v: Any, t: Any) -> Any:
        bias = ScoreFn(lambda s, b, h, q, kv, t: s / t[q if by == "q" else kv] + jnp.sqrt((40.0 - kv) + q), (t,))
        return operation(q, k, v, bias=bias).attention_outputs

    agree(call, draw(1, 40, 1, 8), draw(1, 40, 1, 8), draw(1, 40, 1, 8), draw(40) + 3)


INNER = jnp.float32(1.7)
SCALED = jax.jit(lambda x: x * INNER)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, kv, t: 0 * s + t[kv],
        lambda s, b, h, q, kv, t: jnp.zeros_like(s) + t[0],
        lambda s, b, h, q, kv, t: SCALED(s) * t[q],
        lambda s, b, h, q, kv, t: s + jax.nn.relu(t[q]) * t[kv],
    ],
)
def test_functions_of_less_and_of_more(fn: Any) -> None:
    def call(operation: Any, q: Any, v: Any, t: Any) -> Any:
        return operation(q, q, v, bias=ScoreFn(fn, (t,)), mask=Causal()).attention_outputs

    agree(call, draw(1, 24, 1, 8), draw(1, 24, 1, 8), draw(24))


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_derivatives_of_ones_own_are_refused_for_each_score(kind: str) -> None:
    """What is inlined would lose them; vanilla keeps them."""
    if kind == "custom_jvp":
        rounded = jax.custom_jvp(lambda x: jnp.round(x))
        rounded.defjvp(lambda x, dx: (jnp.round(x[0]), dx[0]))
    else:
        rounded = jax.custom_vjp(lambda x: jnp.round(x))
        rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, d: (d,))
    x = draw(1, 24, 1, 8)
    with pytest.raises(UnsupportedError, match=kind):
        TPU(x, x, x, bias=ScoreFn(lambda s, b, h, q, kv: rounded(s)))


@pytest.mark.parametrize("features", [["MQA", "Causal"], ["GQA", "mask per head", "D ≠ Dv"]])
def test_heads_that_take_turns(features: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = tile_sizes._candidates
    monkeypatch.setattr(
        tile_sizes,
        "_candidates",
        lambda metadata, problem, *rest: problem.G == 1 and candidates(metadata, problem, *rest),
    )
    problem = combine(features).problem(TPU.metadata)
    problem.check(OperationRegistry.create("attnops-tpu:flash", problem.metadata))


def test_many_heads_fit_the_least_memory() -> None:
    problem = tile_sizes.Problem(T=1024, S=1024, G=128, D=576, Dv=512, itemsize=2)
    for name in ("v4", "v5p", "v6e"):
        with target(name):
            tiles = tile_sizes.choose(OperationMetadata(), problem, lambda bq, bk: None)
        assert problem.G % tiles.split == 0
    assert tiles.split == 1 or tiles.split < 128


@pytest.mark.parametrize("traced", [False, True])
def test_more_tiles_than_scalar_memory_holds(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are then computed some at a time, and so are the gradients of a bias."""
    monkeypatch.setattr(visits, "MOST_ENTRIES", 4)
    monkeypatch.setattr(tile_sizes, "MOST_ENTRIES", 4)
    spec = dataclasses.replace(combine(["Segments", "ScoreFn", "GQA"]), traced_mask=traced)
    problem = spec.problem(TPU.metadata)
    problem.check(OperationRegistry.create("attnops-tpu:flash", problem.metadata))


def test_rows_that_fit_scalar_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MOST_ENTRIES", 10)
    causal = np.tril(np.ones((1, 2, 6, 6), np.int8))
    assert visits.row_spans(causal) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert visits.row_spans(jnp.asarray(causal[:, :1])) == [(i, i + 1) for i in range(6)]
