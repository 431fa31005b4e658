"""Reverse mode by a given function, all other derivatives by plain JAX."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.kernels import equally_varying
from attnops_linear import LinearArguments, LinearAttention, LinearOutput, Reverse
from attnops_linear.derivatives import differentiable
from attnops_linear.testing import problem

X, Y = np.float32([0.5, -1.5, 2.0]), np.float32([3.0, 0.25, -2.0])


def plain(arrays: dict[str, jax.Array]) -> jax.Array:
    x, y = arrays["x"], arrays["y"]
    return jnp.where(arrays["sign"], x * x * y, 0.0)


def function(x: jax.Array, y: jax.Array, sign: jax.Array | None = None) -> jax.Array:
    def forward(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return plain(arrays), jax.lax.stop_gradient(2 * arrays["x"])

    def backward(arrays: dict[str, jax.Array], kept: jax.Array, d: jax.Array) -> list[jax.Array]:
        # Seven times too large, so that it shows.
        d = 7 * jnp.where(arrays["sign"], d, 0.0)
        return [d * kept * arrays["y"], d * kept * kept / 4]

    sign = jnp.ones(x.shape, bool) if sign is None else sign
    return differentiable(forward, backward, plain, {"x": x, "y": y, "sign": sign})


def slope(x: jax.Array, y: jax.Array = Y) -> jax.Array:
    return jax.grad(lambda x: function(x, y).sum())(x)


def test_gradients_are_those_of_the_kernel() -> None:
    sign = np.array([True, False, True])
    dx, dy = jax.jit(jax.grad(lambda x, y: function(x, y, sign).sum(), (0, 1)))(X, Y)
    np.testing.assert_allclose(dx, 7 * 2 * X * Y * sign)
    np.testing.assert_allclose(dy, 7 * X * X * sign)


def test_other_derivatives_are_those_of_plain_jax() -> None:
    @jax.jit
    def run(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        def pulled(d: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: function(x, y), x)[1](d)[0]

        twice = jax.grad(lambda x: (y * slope(x, y)).sum())(x)
        return [*jax.jvp(lambda x: function(x, y), (x,), (y,)), jax.jvp(slope, (x,), (x,))[1], twice,
                jax.jvp(pulled, (y,), (x,))[1]]  # fmt: skip

    expected = X * X * Y, 2 * X * Y * Y, 2 * X * Y, 2 * Y * Y, 2 * X * Y * X
    np.testing.assert_allclose(run(X, Y), expected)


def test_slices_of_a_vmap_share_arrays() -> None:
    xs = np.stack([X, 2 * X])

    @jax.jit
    def run(xs: jax.Array, y: jax.Array) -> list[jax.Array]:
        each = jax.vmap(jax.grad(lambda x, y: function(x, y).sum(), (0, 1)), (0, None))(xs, y)
        return [*each, jax.grad(lambda y: jax.vmap(function, (0, None))(xs, y).sum())(y)]

    expected = 7 * 2 * xs * Y, 7 * xs * xs, 7 * (xs * xs).sum(axis=0)
    for found, x in zip(run(xs, Y), expected, strict=True):
        np.testing.assert_allclose(found, x)


def test_checkpoints_and_scans() -> None:
    def loss(x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda c, y: (function(c, y), None))
        return jax.lax.scan(layer, x, np.stack([Y, Y]))[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), 7 * 2 * X * X * Y * Y * 7 * 2 * X * Y, rtol=1e-6)


class AsAKernel(LinearAttention):
    """The native forward and its gradients in place of kernels, whose results vary over all mesh axes."""

    def forward_cpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[LinearArguments]
    ) -> LinearOutput:
        """See `attnops_linear.LinearAttention.forward_native`."""

        def forward(metadata: Any, **given: Any) -> LinearOutput:
            arrays = equally_varying({name: x for name, x in given.items() if isinstance(x, jax.Array)})
            return self.forward_native(**(given | arrays))

        def kept(metadata: Any, **given: Any) -> tuple[LinearOutput, list[jax.Array]]:
            return forward(metadata, **given), []

        def backward(metadata: Any, _: Any, d: LinearOutput, scale: Any, **given: Any) -> dict[str, jax.Array]:
            given, d = equally_varying((given, d))
            pull_back = jax.vjp(lambda x: self.forward_native(**x, return_state=True), given)[1]
            (found,) = pull_back(d)
            return {name: 7 * x for name, x in found.items()}  # so that it shows

        return self.with_derivatives(forward, Reverse(kept, backward), query, key, value, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_gradients_of_arrays_that_devices_share_are_sums(kind: AxisType) -> None:
    (query, key, value), given = problem(6, B=2, K=1, H=2)(np.random.default_rng(0))
    given = {"query": query, "key": key, "value": value} | given | {"decay": np.array([-0.1, -0.4])}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}

    def loss(operation: LinearAttention, arrays: dict[str, jax.Array]) -> jax.Array:
        outputs, state = operation(**arrays, return_state=True)  # type: ignore[arg-type]
        return jnp.sin(outputs).sum() + jnp.cos(state).sum()  # type: ignore[arg-type]

    expected = jax.jit(jax.grad(lambda x: loss(LinearAttention(), x)))(arrays)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        specs = {name: P() if name == "decay" else P("dp") for name in arrays}
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        found = jax.jit(jax.grad(lambda x: loss(AsAKernel(), x)))(placed)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], 7 * x, atol=1e-5 * float(jnp.abs(x).max()), err_msg=name)
