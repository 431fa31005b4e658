"""Rows and heads sharded over devices: by XLA, and by the types of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops_linear import CausalConv1d, LinearAttention
from attnops_linear.testing import documents, problem


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("K", [2, 1])
def test_each_device_computes_its_rows_and_heads(kind: AxisType, K: int) -> None:
    (query, key, value), options = problem(40, K=K, decay="channel" if K == 2 else "constant")(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def run(arrays: dict[str, Any]) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            output = LinearAttention()(**arrays, mask=documents(2, 40), return_state=True)
            return (output.attention_outputs**2).sum() + (output.state**2).sum(), output

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    expected = jax.jit(run)(arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))

    def place(name: str, x: jax.Array) -> jax.Array:
        heads = "tp" if x.shape[1 if name == "initial_state" else -1 if x.ndim == 1 else 2] > 1 else None
        spec = P("tp") if x.ndim == 1 else P("dp", heads) if name == "initial_state" else P("dp", None, heads)
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        program = jax.jit(run).lower({name: place(name, x) for name, x in arrays.items()}).compile()
        found = program({name: place(name, x) for name, x in arrays.items()})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-4), found, expected)
    if K == 2:
        assert "all-gather" not in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_convolution_on_a_mesh(kind: AxisType) -> None:
    rng = np.random.default_rng(0)
    x, weight, state = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 20, 4), (4, 3), (2, 2, 4)))

    def run(x: jax.Array, weight: jax.Array, state: jax.Array) -> Any:
        return CausalConv1d()(x, weight, state=state, mask=documents(2, 20), return_state=True)

    expected = jax.jit(run)(x, weight, state)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(y, NamedSharding(mesh, spec))
            for y, spec in ((x, P("dp", None, "tp")), (weight, P("tp")), (state, P("dp", None, "tp")))
        )
        found = jax.jit(run)(*placed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), tuple(found), tuple(expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_a_state_in_shard_map_and_by_types(kind: AxisType) -> None:
    (query, key, value), options = problem(20, decay="channel", state=False)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def run(arrays: dict[str, Any]) -> Any:
        return LinearAttention()(**arrays).attention_outputs

    expected = jax.jit(run)(arrays)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, P("dp"))) for name, x in arrays.items()}
        call = run if kind is AxisType.Explicit else jax.shard_map(run, in_specs=P("dp"), out_specs=P("dp"))
        found = jax.jit(call)(placed)
    np.testing.assert_allclose(found, expected, atol=1e-5)
