"""Several sinks per head, [H, n]: the dispatcher makes one of them, for every implementation."""

import jax
import numpy as np
import pytest

from attnops import OperationRegistry
from attnops.masks import Causal
from attnops_testing import oracle


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


SINKS = normal(4, 3, seed=3) + np.array([0, 30, -30, 0], np.float32)[:, None]
SINKS[2, 1] = SINKS[3] = -np.inf  # a head with fewer sinks, and one without any
QKV = normal(1, 9, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
D_OUT, D_LSE = normal(1, 9, 4, 8, seed=4), normal(1, 4, 9, seed=5)


@pytest.mark.parametrize("name", ["vanilla", "flash"])
def test_values_and_gradients(name):
    operation = OperationRegistry.create(name)

    def total(sinks, q, k, v):
        out = operation(q, k, v, mask=Causal(), sinks=sinks, return_lse=True)
        return (out.attention_outputs * D_OUT).sum() + (out.logsumexp * D_LSE).sum(), out.attention_outputs

    (_, out), d_sinks = jax.jit(jax.value_and_grad(total, has_aux=True))(SINKS, *QKV)
    options = {"mask": np.tri(9, dtype=bool)[None, None], "sinks": SINKS}
    exact = oracle.attention(*QKV, **options)
    np.testing.assert_allclose(out, exact.out, rtol=1e-5, atol=1e-6)
    gradients = oracle.attention_gradients(*QKV, d_out=D_OUT, d_logsumexp=D_LSE, **options)
    np.testing.assert_allclose(d_sinks, gradients.values["sinks"], rtol=1e-5, atol=1e-5)
    assert (np.asarray(d_sinks)[3] == 0).all()


def test_a_sink_that_is_not_finite_makes_only_its_head_nan():
    operation = OperationRegistry.create("vanilla")
    run = jax.jit(lambda sinks: operation(*QKV, sinks=sinks).attention_outputs)
    given = np.array([[0.0, np.nan], [1.0, np.inf], [1.0, -np.inf], [1.0, 2.0]], np.float32)
    out = np.asarray(run(given))
    assert np.isnan(out[:, :, :2]).all()
    one = np.asarray(run(np.where(np.isfinite(given), given, -np.inf)))
    np.testing.assert_allclose(out[:, :, 2:], one[:, :, 2:], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "flash"])
def test_tangents_are_those_of_one_sink(name):
    """A head without any sink has tangents, too, of its output and of its gradient."""

    def along(sinks, tangent):
        def total(sinks, q):
            out = OperationRegistry.create(name)(q, *QKV[1:], mask=Causal(), sinks=sinks).attention_outputs
            return (jax.numpy.sin(out) * D_OUT).sum()

        return jax.jit(lambda *x: jax.jvp(jax.grad(total, 1), *x))((sinks, QKV[0]), (tangent, D_OUT))

    m = np.maximum(SINKS.max(axis=1, keepdims=True), -1e9)
    weights = np.exp(SINKS - m)
    with np.errstate(divide="ignore"):
        one = m[:, 0] + np.log(weights.sum(axis=1))
    tangent = normal(4, 3, seed=6)
    of_one = (weights * tangent).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-30)
    for x, y in zip(along(SINKS, tangent), along(one, of_one), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
