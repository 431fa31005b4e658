"""Several sinks per head, [H, n]: the dispatcher makes one of them, for every implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationRegistry
from attnops.masks import Causal
from attnops_testing.problem import Problem


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("operation", ["vanilla", "flash"])
def test_values_and_gradients(operation):
    sinks = normal(4, 3, seed=3) + np.array([0, 30, -30, 0], np.float32)[:, None]
    sinks[2, 1] = sinks[3] = -np.inf  # a head with fewer sinks, and one without any
    qkv = normal(1, 9, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    Problem(**dict(zip(("query", "key", "value"), qkv, strict=True)), options={
        "mask": Causal(), "sinks": sinks, "return_lse": True}).check(OperationRegistry.create(operation))  # fmt: skip


def test_a_sink_that_is_not_finite_makes_only_its_head_nan():
    q = normal(1, 5, 3, 8)
    sinks = jnp.array([[0.0, np.nan], [1.0, np.inf], [1.0, -np.inf]])
    out = OperationRegistry.create("vanilla")(q, q, q, sinks=sinks).attention_outputs
    assert np.isnan(out[:, :, :2]).all()
    one = OperationRegistry.create("vanilla")(q, q, q, sinks=jnp.array([0.0, 0.0, 1.0])).attention_outputs
    np.testing.assert_allclose(out[:, :, 2], one[:, :, 2], rtol=1e-6)
