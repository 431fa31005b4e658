"""The training step of MeanFlow is the same through flash and vanilla, and it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops

from .mean_flow import init, loss, start, trainer

pytestmark = pytest.mark.slow


def test_the_gradient_is_that_of_vanilla() -> None:
    def gradient(name: str) -> object:
        of_params = functools.partial(loss, attnops.OperationRegistry.create(name))
        return jax.jit(jax.grad(of_params, has_aux=True))(init(jax.random.key(0)), jax.random.key(3))

    for x, y in zip(*(jax.tree.leaves(gradient(name)) for name in ("flash", "vanilla")), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * float(jnp.abs(y).max()))


def test_the_error_falls() -> None:
    step, state, errors = trainer("flash"), start(), []
    for i in range(80):
        *state, error = step(*state, i)
        errors.append(float(error))
    assert np.mean(errors[-20:]) < 0.8 * np.mean(errors[:5])
