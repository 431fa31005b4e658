"""Derivatives: reverse mode runs a kernel, what it does not compute is native."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata
from attnops_linear import LinearAttention
from attnops_linear.testing import documents, problem
from attnops_tpu.linear.operation import TPULinearAttention

TPU = TPULinearAttention(OperationMetadata(platform="tpu", interpret=True))
NATIVE = LinearAttention()
NAME = "linear_attention_backward"


def arrays(T: int, **options: Any) -> dict[str, Any]:
    (query, key, value), given = problem(T, B=1, K=1, H=2, **options)(np.random.default_rng(0))
    return {
        name: np.asarray(x, np.float32) for name, x in ({"query": query, "key": key, "value": value} | given).items()
    }


def loss(operation: LinearAttention, arrays: dict[str, jax.Array], mask: Any = None) -> jax.Array:
    outputs, state = operation(**arrays, mask=mask, return_state=True)  # type: ignore[arg-type]
    return jnp.sin(outputs).sum() + jnp.cos(state).sum()  # type: ignore[arg-type]


def same(function: Callable[[LinearAttention], Any]) -> None:
    found, expected = (jax.tree.leaves(function(operation)) for operation in (TPU, NATIVE))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()))


@pytest.mark.parametrize(("T", "decay", "kernels"), [(5, "head", 1), (4, "head", 0), (5, "channel", 0)])
def test_gradients_of_more_than_four_tokens_are_a_kernel_unless_decays_are_by_channel(
    T: int, decay: str, kernels: int
) -> None:
    given = arrays(T, decay=decay)
    operation = TPULinearAttention(OperationMetadata(platform="tpu"))
    program = str(jax.make_jaxpr(jax.grad(lambda x: loss(operation, x)))(given))
    assert program.count(f"name={NAME}") == kernels, program
    # The native gradient has the native forward in it.
    assert ("pallas_call" in program) == bool(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, documents(1, 66)])
def test_second_derivatives_are_native(mask: Any) -> None:
    operation, given = TPULinearAttention(OperationMetadata(platform="tpu")), arrays(66)

    def slopes(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.grad(lambda x: loss(operation, x, mask))(x)

    def second(x: dict[str, jax.Array]) -> Any:
        return jax.jvp(slopes, (x,), (x,))[1], jax.grad(lambda x: sum(y.sum() for y in jax.tree.leaves(slopes(x))))(x)

    # Pallas would refuse to differentiate the kernel.
    assert f"name={NAME}" in str(jax.make_jaxpr(second)(given))


@pytest.mark.exhaustive
def test_gradients_inside_vmap_of_arrays_that_slices_share() -> None:
    given = arrays(9)
    mapped = {name: np.stack([given[name], 0.5 * given[name]]) for name in ("query", "value", "beta")}
    axes = ({name: 0 if name in mapped else None for name in given},)

    def both(operation: LinearAttention, given: dict[str, Any], mapped: dict[str, Any]) -> Any:
        def total(x: dict[str, jax.Array]) -> jax.Array:
            return jax.vmap(lambda x: loss(operation, x, documents(1, 9)), axes)(x).sum()

        return jax.vmap(jax.grad(lambda x: loss(operation, x)), axes)(given | mapped), jax.grad(total)(given | mapped)

    same(lambda operation: jax.jit(both, static_argnums=0)(operation, given, mapped))


@pytest.mark.exhaustive
def test_gradients_of_checkpoints_in_a_scan() -> None:
    given = arrays(9)

    def run(operation: LinearAttention) -> Any:
        @jax.checkpoint
        def layer(value: jax.Array, rate: jax.Array) -> tuple[jax.Array, None]:
            return operation(**(given | {"value": rate * value})).attention_outputs, None  # type: ignore[arg-type]

        return jax.grad(lambda x: jax.lax.scan(layer, x, jnp.arange(1.0, 3.0))[0].sum())(given["value"])

    same(lambda operation: jax.jit(lambda: run(operation))())


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_devices_may_share_arrays_that_have_gradients(kind: AxisType) -> None:
    """Traced: values are in attnops_linear's tests, since the interpreter would wait for all devices in each call."""
    given = arrays(9)
    given = {name: np.concatenate([x, x]) for name, x in given.items()}  # two rows
    given["decay"] = np.float32([-0.1, -0.4])
    operation = TPULinearAttention(OperationMetadata(platform="tpu"))
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        specs = {name: P() if name == "decay" else P("dp") for name in given}
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in given.items()}
        program = jax.make_jaxpr(jax.grad(lambda x: loss(operation, x)))(placed)
    assert str(program).count(f"name={NAME}") == 1
    assert "psum" in str(program)
