"""Derivatives: reverse mode runs kernels, what they do not compute is native."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnops
from attnops import OperationMetadata, UnsupportedWarning
from attnops_linear import LinearAttention, LinearRequest
from attnops_linear.testing import documents, padding, problem
from attnops_triton.aot import kernels
from attnops_triton.language.launch import recording
from attnops_triton.linear.forward import forward_with_states
from attnops_triton.linear.operation import TritonLinearAttention
from attnops_triton.targets import target

GPU = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True, on_unsupported="error"))
NATIVE = LinearAttention()
FORWARD = ["attnops_linear_scores", "attnops_linear_chunks"]
BACKWARD = ["attnops_linear_scores", "attnops_linear_chunks_backward", "attnops_linear_gradients"]
STRONG = (0.0, -1e4, -150.0, -np.inf)
# Chunks of float32 have 32 tokens.
PROBLEMS = {
    "gated delta rule": problem(37, B=1, K=1, H=2),
    "sums": problem(32, beta=False, K=2, H=2),
    "no decay": problem(37, B=1, decay="none"),
    "no decay, sums": problem(65, B=1, decay="none", beta=False),
    "constant decays": problem(33, decay="constant"),
    "documents without decay": problem(40, B=1, decay="none", mask=documents),
    "all corners": problem(
        70, K=1, H=2, decays=STRONG, betas=(0.0, 1.0, 2.0), mask=lambda B, T: documents(B, T) & padding(B, T)
    ),
    "sums of documents and padding": problem(
        70, B=1, H=2, beta=False, state=False, decays=STRONG, mask=lambda B, T: documents(B, T) & padding(B, T)
    ),
    "more columns and features than a block has": problem(33, B=1, K=1, H=1, D=40, Dv=72),
    "5 tokens": problem(5, scale=-0.7),
}


def arrays(draw: Any, dtype: Any = np.float32) -> tuple[dict[str, Any], Any]:
    """The arrays of a problem, and its other options."""
    (query, key, value), options = draw(np.random.default_rng(0))
    others = {name: options.pop(name) for name in ("mask", "scale") if name in options}
    narrow = {"query": query, "key": key, "value": value}
    found = {name: np.asarray(x).astype(dtype) for name, x in narrow.items()}
    return found | {name: np.asarray(x, np.float32) for name, x in options.items()}, others


def loss(operation: LinearAttention, x: dict[str, jax.Array], return_state: bool = True, **others: Any) -> jax.Array:
    outputs, state = operation(**x, return_state=return_state, **others)  # type: ignore[arg-type]
    total = jnp.sin(jnp.asarray(outputs, jnp.float32)).sum()
    return total + jnp.cos(state).sum() if return_state else total  # type: ignore[arg-type]


def same(function: Callable[[LinearAttention], Any], tolerance: float = 3e-6) -> None:
    """What the function gives of the kernels and natively differs by at most this part of an array's largest number."""
    found, expected = (jax.tree.leaves(function(operation)) for operation in (GPU, NATIVE))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * float(np.abs(y).max()))


def launches(T: int, decay: str = "head") -> list[str]:
    """The names of the kernels of a gradient."""
    x, _ = arrays(problem(T, B=1, K=1, H=2, decay=decay))
    operation = TritonLinearAttention(OperationMetadata(platform="cuda"))
    launched = kernels(jax.grad(lambda x: loss(operation, x)), (x,), "sm_90")
    return [launch.recipe.kernel.name for launch in launched]


@pytest.mark.parametrize(
    ("T", "decay", "names"),
    [(5, "head", FORWARD + BACKWARD), (4, "head", []), (5, "channel", [])],
)
def test_gradients_of_more_than_four_tokens_are_kernels_unless_they_are_refused(
    T: int, decay: str, names: list[str]
) -> None:
    expected = pytest.warns(UnsupportedWarning) if decay == "channel" else contextlib.nullcontext()
    with expected:
        assert launches(T, decay) == names


def test_explain_says_what_computes_derivatives() -> None:
    request = LinearRequest(batch=1, length=9, key_heads=1, value_heads=1, head_dim=8, value_head_dim=8)
    few, many = ([*GPU.details(request.replace(length=T))] for T in (4, 5))
    assert few[1:] == ["derivatives are those of the native forward, in plain JAX"]
    assert "gradients by kernels" in many[1]
    assert many[2:] == ["other derivatives are those of the native forward, in plain JAX"]


def test_what_reverse_mode_keeps_is_linear_in_the_tokens() -> None:
    def kept(T: int) -> int:
        x, _ = arrays(problem(T, B=1, K=1, H=2))
        with target("sm_90"), recording():
            found = jax.eval_shape(lambda x: forward_with_states(OperationMetadata(platform="cuda"), **x)[1], x)
        return sum(y.size for y in jax.tree.leaves(found))

    D, Dv, H = 16, 24, 2
    assert [kept(T) for T in (32, 33, 3200)] == [H * Dv * (D * N + T) for T, N in ((32, 1), (33, 2), (3200, 100))]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_devices_may_share_arrays_that_have_gradients(kind: AxisType) -> None:
    """Traced: values are in attnops_linear's tests."""
    given, _ = arrays(problem(9, B=2, K=1, H=2))
    given["decay"] = np.float32([-0.1, -0.4])
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", on_unsupported="error"))
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh), target("sm_90"), recording() as launched:
        specs = {name: P() if name == "decay" else P("dp") for name in given}
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in given.items()}
        program = jax.make_jaxpr(jax.grad(lambda x: loss(operation, x)))(placed)
    assert [x.recipe.kernel.name for x in launched][-3:] == BACKWARD
    assert "psum" in str(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients(name: str) -> None:
    x, others = arrays(PROBLEMS[name])
    same(lambda operation: jax.jit(jax.grad(lambda x: loss(operation, x, **others)))(x))


@pytest.mark.slow
def test_gradients_of_outputs_alone_and_of_the_state_alone() -> None:
    x, _ = arrays(problem(37, B=1, K=1, H=2))
    same(lambda operation: jax.jit(jax.grad(lambda x: loss(operation, x, return_state=False)))(x))
    same(lambda operation: jax.jit(jax.grad(lambda x: jnp.cos(operation(**x, return_state=True).state).sum()))(x))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_gradients_of_bfloat16(precision: Any) -> None:
    """Rounded as outputs are; that of the first state is as exact as the last state of the forward pass."""
    x, _ = arrays(problem(70, B=1, K=1, H=2), jnp.bfloat16)
    rng = np.random.default_rng(1)
    d = rng.normal(size=x["value"].shape).astype(jnp.bfloat16), rng.normal(size=x["initial_state"].shape)

    def slopes(operation: LinearAttention) -> dict[str, jax.Array]:
        def loss(x: dict[str, jax.Array]) -> jax.Array:
            outputs, state = operation(**x, return_state=True)  # type: ignore[arg-type]
            return (jnp.asarray(outputs, jnp.float32) * d[0]).sum() + (state * d[1]).sum()  # type: ignore[operator]

        return jax.jit(jax.grad(loss))(x)

    gpu = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True, precision=precision))
    found, exact = slopes(gpu), slopes(NATIVE)
    bounds = {"highest": 1e-5, "high": 1e-4, "default": 2e-2}
    for name, y in exact.items():
        assert found[name].dtype == y.dtype
        error = float(jnp.abs(found[name].astype(jnp.float32) - y.astype(jnp.float32)).max() / jnp.abs(y).max())
        assert error < (bounds[precision] if name == "initial_state" else 2e-2), (name, error)


@pytest.mark.slow
def test_gradients_of_mixed_dtypes() -> None:
    x, _ = arrays(problem(20, B=1, K=1, H=1))
    x["query"] = x["query"].astype(jnp.bfloat16)
    same(lambda operation: jax.jit(jax.grad(lambda x: loss(operation, x)))(x), 2**-8)


@pytest.mark.slow
def test_arrays_that_a_function_closes_over_may_be_constants() -> None:
    x, others = arrays(problem(20, B=1, K=1, H=2, mask=documents))
    fixed = {name: x.pop(name) for name in ("key", "beta")}

    def run(operation: LinearAttention) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: loss(operation, x | fixed, **others)))(x)

    same(run)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["head", "constant"])
def test_gradients_inside_vmap_of_arrays_that_slices_share(decay: str) -> None:
    given, others = arrays(problem(9, B=1, K=1, H=2, decay=decay, mask=documents))
    names = ("query", "value", "decay" if decay == "constant" else "beta")
    mapped = given | {name: jnp.stack([given[name], 0.5 * given[name]]) for name in names}
    axes = ({name: 0 if name in names else None for name in given},)

    def both(operation: LinearAttention) -> Any:
        def total(x: dict[str, jax.Array]) -> jax.Array:
            return jax.vmap(lambda x: loss(operation, x, **others), axes)(x).sum()

        return jax.vmap(jax.grad(lambda x: loss(operation, x, **others)), axes)(mapped), jax.grad(total)(mapped)

    same(both)


@pytest.mark.slow
def test_gradients_of_checkpoints_in_a_scan() -> None:
    given, _ = arrays(problem(9, B=1, K=1, H=2))

    def run(operation: LinearAttention) -> Any:
        @jax.checkpoint
        def layer(value: jax.Array, rate: jax.Array) -> tuple[jax.Array, None]:
            return operation(**(given | {"value": rate * value})).attention_outputs, None  # type: ignore[arg-type]

        return jax.grad(lambda x: jax.lax.scan(layer, x, jnp.arange(1.0, 3.0))[0].sum())(given["value"])

    same(lambda operation: jax.jit(lambda: run(operation))())


@pytest.mark.slow
def test_second_derivatives_are_native() -> None:
    x, _ = arrays(problem(20, B=1, K=1, H=2))

    def slopes(operation: LinearAttention, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.grad(lambda x: loss(operation, x))(x)

    same(lambda operation: jax.jit(lambda x: jax.jvp(lambda x: slopes(operation, x), (x,), (x,))[1])(x), 1e-5)


@pytest.mark.slow
def test_padding_has_the_gradient_0_where_it_holds_nan_and_a_state_is_infinite() -> None:
    T = 20
    x, _ = arrays(problem(T, B=1, K=1, H=1))
    is_token = np.arange(T)[None] % 2 == 0
    for name, y in x.items():
        if name != "initial_state":
            y[~is_token] = np.nan
    mask = attnops.masks.KeyPadding(is_token)
    found = jax.jit(jax.grad(lambda x: loss(GPU, x, mask=mask)))(x)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(found))
    x["initial_state"][0, 0, 0] = np.inf
    found = jax.jit(jax.grad(lambda x: loss(GPU, x, mask=mask)))(x)
    found.pop("initial_state")
    assert not any(np.asarray(y)[~is_token].any() for y in found.values())
