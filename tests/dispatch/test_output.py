"""OperationOutput as a pytree and as a document."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationOutput


def example(dtype=jnp.bfloat16):
    out = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 4)), dtype)
    lse = jnp.array([[[0.5, -jnp.inf]]], jnp.float32)
    return OperationOutput(out, None, lse)


def assert_same(a, b):
    assert a.attention_weights is None
    assert b.attention_weights is None
    for x, y in ((a.attention_outputs, b.attention_outputs), (a.logsumexp, b.logsumexp)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_an_output_round_trips_as_dict_and_pytree(dtype):
    output = example(dtype)
    assert_same(OperationOutput.from_dict(output.to_dict()), output)
    text = output.to_json(indent=1)
    assert json.loads(text)["attention_outputs"]["shape"] == [1, 2, 3, 4]
    assert_same(OperationOutput.from_json(text), output)
    assert_same(jax.jit(lambda x: x)(output), output)
    assert_same(jax.tree.map(lambda x: x, output), output)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), output)
    assert_same(jax.tree.map(lambda x: x[1], jax.vmap(lambda x: x)(stacked)), output)


def test_replace_changes_a_copy_and_refuses_unknown_fields():
    output = example()
    changed = output.replace(logsumexp=None)
    assert changed.logsumexp is None
    assert output.logsumexp is not None
    with pytest.raises(TypeError, match="logsum"):
        output.replace(logsum=None)
    with pytest.raises(TypeError, match="weights"):
        OperationOutput.from_dict({"attention_outputs": output.attention_outputs, "weights": None})
    with pytest.raises(AttributeError):
        output.logsumexp = None
