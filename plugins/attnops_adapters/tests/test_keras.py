"""`attnops_adapters.keras`: Keras' attention layers and `keras.ops.dot_product_attention` on the JAX backend."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import inspect

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from framework_attention import assert_same, normal
from keras.src import backend

import attnops_adapters.jax_nn
import attnops_adapters.keras
from attnops_adapters.keras import use

pytestmark = pytest.mark.slow

QUERY, KEY, VALUE = normal(2, 5, 4, 8), normal(2, 7, 4, 8), normal(2, 7, 4, 8, seed=1)
SEEN = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.7
SEEN[..., 0] = True
INPUTS = normal(2, 6, 16)
OF_KERAS = backend.nn.dot_product_attention


def ours(*arrays, operation: str = "vanilla", **options):
    with use(operation, on_unsupported="error"):
        return keras.ops.dot_product_attention(*arrays, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"mask": SEEN},
        {"mask": np.repeat(SEEN, 4, 1)},
        {"mask": SEEN, "is_causal": True, "bias": normal(1, 4, 5, 7)},
    ],
    ids=["plain", "scale", "causal", "mask", "mask by head", "all"],
)
@pytest.mark.tier(every=2)
def test_values_and_gradients_are_those_of_keras(options) -> None:
    assert_same(lambda *a: ours(*a, **options), lambda *a: OF_KERAS(*a, **options), QUERY, KEY, VALUE)


def layers() -> dict[str, keras.layers.Layer]:
    return {
        "MHA": keras.layers.MultiHeadAttention(4, 8, seed=0),
        "GQA": keras.layers.GroupQueryAttention(8, 4, 2, seed=0),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["MHA", "GQA"])
def test_layers_have_the_same_values_and_gradients(kind: str, causal: bool) -> None:
    layer = layers()[kind]
    layer.build(INPUTS.shape, INPUTS.shape)
    calls = []

    def attend(x):
        mask = np.tril(np.ones((2, 6, 6), bool), 1)
        return layer.stateless_call(
            [v.value.astype(x.dtype) for v in layer.trainable_variables],
            [v.value for v in layer.non_trainable_variables],
            x, x, attention_mask=mask, use_causal_mask=causal,
        )[0]  # fmt: skip

    def counted(x):
        with use("flash", on_unsupported="error"):
            inner = backend.nn.dot_product_attention
            backend.nn.dot_product_attention = lambda *a, **kw: (calls.append(1), inner(*a, **kw))[1]
            return attend(x)

    found, expected = (jax.vjp(f, jnp.asarray(INPUTS)) for f in (counted, attend))
    assert calls == [1]
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)
    cotangent = normal(*expected[0].shape, seed=3)
    np.testing.assert_allclose(found[1](cotangent)[0], expected[1](cotangent)[0], atol=1e-5)


def test_masks_are_of_each_row() -> None:
    """Keras' path for TPUs keeps the mask of row 0 alone."""
    mask = np.zeros((2, 1, 5, 7), bool)
    mask[0, ..., 1] = mask[1, ..., 4] = True
    out = ours(QUERY, KEY, VALUE, mask=mask)
    for row, key in ((0, 1), (1, 4)):
        np.testing.assert_allclose(out[row], np.broadcast_to(VALUE[row, key], (5, 4, 8)), atol=1e-6)


def test_the_soft_cap_is_computed() -> None:
    with use("vanilla"):
        capped = backend.nn.dot_product_attention(QUERY, KEY, VALUE, scale=1.0, attn_logits_soft_cap=0.5)
    scores = 0.5 * np.tanh(np.einsum("btnh,bsnh->bnts", QUERY, KEY) / 0.5)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(capped, np.einsum("bnts,bsnh->btnh", weights, VALUE), atol=1e-5)


def test_a_fully_masked_row_is_0() -> None:
    assert (np.asarray(ours(QUERY, KEY, VALUE, mask=np.zeros((1, 1, 5, 7), bool))) == 0).all()


def test_within_use_of_jax_nn_keras_is_as_before() -> None:
    """Keras calls `jax.nn.dot_product_attention` with implementation="xla", which is honoured."""
    options = {"mask": np.zeros((1, 1, 5, 7), bool)}
    with attnops_adapters.jax_nn.use("vanilla"):
        found = keras.ops.dot_product_attention(QUERY, KEY, VALUE, **options)
    np.testing.assert_array_equal(found, OF_KERAS(QUERY, KEY, VALUE, **options))


def test_the_parameters_are_those_of_keras() -> None:
    with use("vanilla"):
        found = inspect.signature(backend.nn.dot_product_attention).parameters
    expected = inspect.signature(OF_KERAS).parameters
    assert {n: p.default for n, p in found.items()} == {n: p.default for n, p in expected.items()}
    assert backend.nn.dot_product_attention is OF_KERAS


def test_what_is_not_served_is_refused(monkeypatch) -> None:
    with use("vanilla"), pytest.raises(ValueError, match=r"attn_logits_soft_cap=2.0 with a bias"):
        backend.nn.dot_product_attention(QUERY, KEY, VALUE, bias=normal(5, 7), attn_logits_soft_cap=2.0)
    with use("vanilla"), pytest.raises(ValueError, match="mask has shape"):
        backend.nn.dot_product_attention(QUERY, KEY, VALUE, mask=np.ones((1, 1, 1, 5, 7)))
    with pytest.raises(ValueError, match="flsh"), use("flsh"):
        pass
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="'torch', but must be 'jax'"), use("flash"):
        pass
    assert "keras" in attnops_adapters.keras.__doc__
