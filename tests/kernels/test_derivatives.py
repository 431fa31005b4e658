"""Derivatives of every order and mode, through what JAX does with functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import Bias, ScoreFn
from attnops.masks import Causal, Segments

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


B, T, S, H, K, D = 2, 21, 37, 4, 2, 8
INPUTS = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, 5), normal(1, H, T, S), normal(H, 2)
TANGENTS = tuple(normal(*x.shape) for x in INPUTS)
D_OUT, D_LSE = normal(B, T, H, 5), normal(B, H, T)

Call = Callable[..., tuple[jax.Array, jax.Array]]


def call(name: str) -> Call:
    """Output and logsumexp; the query is longer than a tile, and some of its last rows see no key."""
    operation = OperationRegistry.create(name, OperationMetadata(block_q=16, block_k=16))

    def run(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
        ids = jnp.arange(S)[None] // 15
        mask = Causal() & Segments(jnp.where(jnp.arange(T) > 17, 7, ids[:, S - T :]), ids)
        output = operation(
            query, key, value, mask=mask, bias=bias, sinks=sinks, logits_soft_cap=5.0, return_lse=True
        )  # fmt: skip
        lse = output.logsumexp
        return output.attention_outputs, jnp.where(lse == -jnp.inf, 0, lse)

    return run


def loss(attend: Call, *inputs: jax.Array) -> jax.Array:
    out, lse = attend(*inputs)
    return (jnp.sin(out) * D_OUT).sum() + (jnp.sin(lse) * D_LSE).sum()


def scaled(attend: Call, t: jax.Array) -> jax.Array:
    return loss(attend, *(x + s * d for x, s, d in zip(INPUTS, t, TANGENTS, strict=True)))


def all_gradients(attend: Call) -> Callable[..., Any]:
    return jax.grad(lambda *x: loss(attend, *x), (0, 1, 2, 3, 4))


def along(attend: Call, *inputs: jax.Array) -> jax.Array:
    return sum((d * t).sum() for d, t in zip(all_gradients(attend)(*inputs), TANGENTS, strict=True))


def of_jvp(attend: Call, *inputs: jax.Array) -> jax.Array:
    return (jnp.sin(jax.jvp(attend, inputs, TANGENTS)[1][0]) * D_OUT).sum()


def in_scan(attend: Call, query: jax.Array) -> jax.Array:
    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return carry + jnp.pad(attend(carry, *INPUTS[1:])[0], ((0, 0), (0, 0), (0, 0), (0, 3))), None

    return (jax.lax.scan(step, query, None, length=2)[0] ** 2).sum()


ALL = (0, 1, 2, 3, 4)
# By name, a derivative of a call.
DERIVATIVES: dict[str, Callable[[Call], Any]] = {
    "jvp": lambda f: jax.jvp(f, INPUTS, TANGENTS),
    "linearize": lambda f: jax.linearize(f, *INPUTS)[1](*TANGENTS),
    "jvp of grad": lambda f: jax.jvp(all_gradients(f), INPUTS, TANGENTS),
    "grad of grad": lambda f: jax.grad(lambda *x: along(f, *x), ALL)(*INPUTS),
    "grad of jvp": lambda f: jax.grad(lambda *x: of_jvp(f, *x), ALL)(*INPUTS),
    "jvp of jvp": lambda f: jax.jvp(lambda *x: jax.jvp(f, x, TANGENTS)[1], INPUTS, TANGENTS)[1],
    "third": lambda f: jax.jvp(lambda *x: jax.jvp(all_gradients(f), x, TANGENTS)[1], INPUTS, TANGENTS)[1],
    "jacfwd": lambda f: jax.jacfwd(lambda t: scaled(f, t))(jnp.ones(5)),
    "hessian": lambda f: jax.hessian(lambda t: scaled(f, t))(jnp.ones(5)),
    "vmap": lambda f: jax.grad(lambda q: jax.vmap(lambda s: along(f, s * q, *INPUTS[1:]))(jnp.ones(2)).sum())(
        INPUTS[0]
    ),
    "checkpoint": lambda f: jax.jvp(jax.grad(jax.checkpoint(lambda *x: loss(f, *x)), ALL), INPUTS, TANGENTS)[1],
    "scan": lambda f: jax.jvp(jax.grad(lambda q: in_scan(f, q)), INPUTS[:1], TANGENTS[:1])[1],
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.tier(
    slow=[name for name in DERIVATIVES if name not in ("jvp", "linearize", "hessian")],
    exhaustive=["linearize", "hessian"],  # of which "jvp", "jvp of grad" and "jacfwd" have the parts
)
def test_derivatives_are_those_of_vanilla(name: str) -> None:
    found, expected = jax.jit(lambda: [DERIVATIVES[name](call(operation)) for operation in ("flash", "vanilla")])()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-6 * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.slow
def test_parameters_of_a_score_function_and_dropout() -> None:
    def derivative(name: str) -> Any:
        operation = OperationRegistry.create(name, OperationMetadata(dropout_prob=0.3))

        def run(query: jax.Array, factors: jax.Array) -> jax.Array:
            bias = ScoreFn(lambda score, b, h, q, kv, factors: score * jnp.sin(factors[h]), (factors,))
            output = operation(query, *INPUTS[1:3], bias=bias, dropout_key=jax.random.key(1))
            return (output.attention_outputs * D_OUT).sum()

        given, tangents = (INPUTS[0], INPUTS[4][:, 0]), (TANGENTS[0], TANGENTS[4][:, 0])
        return jax.jvp(jax.grad(run, (0, 1)), given, tangents)

    for x, y in zip(
        *(jax.tree.leaves(jax.jit(derivative, static_argnums=0)(n)) for n in ("flash", "vanilla")), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["jvp", "jvp of grad", "grad of grad"])
def test_memory_is_linear_in_the_length(order: str) -> None:
    attend = OperationRegistry.create("flash")

    def temporaries(T: int) -> int:
        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)

        def total(*qkv: jax.Array) -> jax.Array:
            return (attend(*qkv, mask=Causal()).attention_outputs ** 2).sum()

        gradient = jax.grad(total, (0, 1, 2))
        functions = {
            "jvp": lambda *x: jax.jvp(total, x, x),
            "jvp of grad": lambda *x: jax.jvp(gradient, x, x),
            "grad of grad": jax.grad(lambda *x: sum((d**2).sum() for d in gradient(*x)), (0, 1, 2)),
        }
        size: int = jax.jit(functions[order]).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
        return size

    assert temporaries(16384) < 2.2 * temporaries(8192)


def test_reverse_mode_runs_no_other_pass() -> None:
    gradient = all_gradients(call("flash"))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in INPUTS]
    assert "_contribution" not in str(jax.make_jaxpr(gradient)(*shapes))
    assert "_contribution" not in str(jax.make_jaxpr(lambda *x: jax.jvp(gradient, x, x))(*shapes))
    second = jax.grad(functools.partial(along, call("flash")))
    assert "_contribution" in str(jax.make_jaxpr(second)(*shapes))


@pytest.mark.slow
def test_the_transpose_of_reverse_mode_is_forward_mode() -> None:
    attend, sizes = call("flash"), np.float32([1, -2])

    def jvp(*tangents: jax.Array) -> Any:
        pull_back = jax.vjp(lambda *x: attend(*x)[0], *INPUTS)[1]
        return jax.linear_transpose(pull_back, D_OUT)(tangents)[0]

    @jax.jit
    def run() -> Any:
        mapped = jax.vmap(lambda size: jvp(*(size * t for t in TANGENTS)))(sizes)
        return jvp(*TANGENTS), mapped, jax.jvp(lambda *x: attend(*x)[0], INPUTS, TANGENTS)[1]

    one, mapped, wanted = run()
    np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(mapped, sizes[:, None, None, None, None] * wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("moving", [(0,), (1, 2), (3, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 3e-6), (jnp.bfloat16, 0.03)])
def test_tangents_of_some_gradients(moving: tuple[int, ...], dtype: Any, tolerance: float) -> None:
    def tangents(name: str, dtype: Any) -> Any:
        attend, given = call(name), [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in INPUTS]

        def gradients(*values: jax.Array) -> Any:
            new = dict(zip(moving, values, strict=True))
            return jax.grad(lambda *x: loss(attend, *x), (0, 2, 3))(*(new.get(i, x) for i, x in enumerate(given)))

        along = [jnp.asarray(TANGENTS[i], jnp.bfloat16).astype(dtype) for i in moving]
        return jax.jit(lambda: jax.jvp(gradients, [given[i] for i in moving], along)[1])()

    for x, y in zip(tangents("flash", dtype), tangents("vanilla", jnp.float32), strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.slow
def test_a_masked_score_without_a_finite_derivative_moves_nothing() -> None:
    def tangents(largest: float) -> Any:
        keys = jnp.abs(INPUTS[1][:, :T]).at[:, -1].set(largest)  # only the last query sees it

        def run(query: jax.Array, factor: jax.Array) -> jax.Array:
            bias = ScoreFn(lambda score, b, h, q, kv, factor: score + factor * jnp.exp(score), (factor,))
            operation = OperationRegistry.create("flash", OperationMetadata(block_q=16, block_k=16))
            output = operation(query, keys, INPUTS[2][:, :T], mask=Causal(), bias=bias)
            return (output.attention_outputs[:, :-1] * D_OUT[:, :-1]).sum()

        given = jnp.abs(INPUTS[0]).at[:, -1].set(0), jnp.float32(0.3)
        return jax.jit(lambda: jax.jvp(jax.grad(run, (0, 1)), given, (TANGENTS[0], jnp.float32(1)))[1])()

    for x, y in zip(tangents(1e3), tangents(0.0), strict=True):
        x, y = (z[:, :-1] if z.ndim else z for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes(Bias):
    """A bias by key and by query, with a field that holds nothing."""

    nothing: Any
    of_key: Any
    of_query: Any

    def apply(self, scores: jax.Array, b: Any, h: Any, q: Any, kv: Any) -> jax.Array:
        return scores + self.of_key * kv - self.of_query * q * kv


@pytest.mark.slow
def test_a_field_of_a_bias_that_is_none_has_no_gradient() -> None:
    def loss(name: str, *numbers: Any) -> jax.Array:
        out = OperationRegistry.create(name)(*INPUTS[:3], mask=Causal(), bias=Slopes(None, *numbers))
        return (jnp.sin(out.attention_outputs) * D_OUT).sum()

    for wanted in (0,), (1,), (0, 1):
        found, exact = (
            jax.grad(functools.partial(loss, name), wanted)(0.02, 0.003)
            for name in ("attnops:flash", "attnops:vanilla")
        )
        np.testing.assert_allclose(found, exact, rtol=1e-4)
