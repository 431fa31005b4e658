"""Quantised linear layers and products."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from lm_model import call, tokens

from attnops_lm.gguf_file import load_smollm2
from attnops_lm.loss import LossConfig, cross_entropy, next_tokens
from attnops_lm.model import CausalLM
from attnops_lm.params import bytes_of
from attnops_lm.quantize import QuantizationConfig, QuantizedLinear, QuantizedWeight, get_dot_general_by_bits
from attnops_lm.testing import small


def plain(family: str = "llama") -> CausalLM:
    """A small model whose weights are not scaled up, which would make much of small errors."""
    return CausalLM(small(family).config)


def loss_of(logits: jax.Array, ids: jax.Array) -> float:
    return float(cross_entropy(logits, next_tokens(ids), LossConfig()).loss)


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        (None, 0.03),
        (QuantizationConfig(activations=True), 0.04),
        (QuantizationConfig(bits=4), 0.5),
        (QuantizationConfig(bits=4, group=16), 0.3),
    ],
)
@pytest.mark.slow
def test_logits_and_perplexity_are_near(config: QuantizationConfig | None, bound: float) -> None:
    model, ids = plain(), tokens((4, 24))
    expected = call(model, ids).logits
    quantized = model.quantize(config)
    assert quantized.layers[1].mlp.down.qvalue.dtype == (jnp.int4 if config and config.bits == 4 else jnp.int8)
    found = call(quantized, ids).logits
    error = float(jnp.sqrt(jnp.square(found - expected).mean() / jnp.square(expected).mean()))
    assert 1e-4 < error < bound
    assert abs(loss_of(found, ids) / loss_of(expected, ids) - 1) < bound / 10


@pytest.mark.slow
@pytest.mark.exhaustive
def test_of_smollm2_the_perplexity_is_within_two_percent() -> None:
    model, tokenizer = load_smollm2()
    text = (Path(__file__).parents[3] / "README.md").read_text()
    ids = jnp.asarray(tokenizer.encode(text)[:512])[None]
    exact, quantized = (loss_of(call(m, ids).logits, ids) for m in (model, model.quantize()))
    assert abs(math.exp(quantized - exact) - 1) < 0.02


@pytest.mark.slow
def test_weights_are_stored_in_a_quarter(caplog: Any) -> None:
    model = small(hidden_size=64, intermediate_size=256)
    assert isinstance(model.quantize(verbose=True).layers[0].attention.q, QuantizedLinear)
    after, before = (sum(x.nbytes for x in jax.tree.leaves(nnx.state(m.layers))) for m in (model.quantize(), model))
    assert after < 0.3 * before
    assert f"{bytes_of(model)} bytes before" in caplog.text
    assert not jax.tree.leaves(nnx.state(model, QuantizedWeight))  # is as it was
    # bfloat16 keeps the scales' precision.
    scales = model.quantize().to_dtype(jnp.bfloat16).layers[0].mlp.up.scale
    assert scales.dtype == jnp.float32


def test_each_weight_is_within_half_a_step() -> None:
    model = small()
    layer = model.quantize().layers[0].mlp.gate
    kernel = model.layers[0].mlp.gate.kernel[...]
    assert float(jnp.abs(layer.qvalue[...] * layer.scale[...] - kernel).max() / layer.scale[...].max()) <= 0.51
    np.testing.assert_allclose(layer.scale[...][0], jnp.abs(kernel).max(axis=0) / 127.5, rtol=1e-5)


@pytest.mark.slow
def test_each_weight_of_a_group_is_within_half_a_step_of_its_group() -> None:
    model = small()
    layer = model.quantize(QuantizationConfig(bits=4, group=8)).layers[0].mlp.gate
    kernel = model.layers[0].mlp.gate.kernel[...]
    groups = kernel.reshape(4, 8, -1)
    step = jnp.abs(groups).max(axis=1) / 7.5
    np.testing.assert_allclose(layer.scale[...], step, rtol=1e-5)
    error = layer.qvalue[...].astype(jnp.float32).reshape(groups.shape) * step[:, None] - groups
    assert float((jnp.abs(error) / step[:, None]).max()) <= 0.51
    x = jnp.eye(32)
    np.testing.assert_allclose(layer(x), kernel + error.reshape(kernel.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("qwen3_next", "qkvz"), ("bamba", "inputs")])
def test_inputs_of_linear_attention_are_quantised(family: str, name: str) -> None:
    model, ids = plain(family), tokens((2, 9))
    quantized = model.quantize()
    assert isinstance(getattr(quantized.layers[0].attention, name), QuantizedLinear)
    expected, found = (call(x, ids).logits for x in (model, quantized))
    assert 1e-4 < float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.05


@pytest.mark.slow
def test_weights_that_stay_are_trained_through_rounding() -> None:
    model, ids = plain(), tokens((2, 9))
    aware = model.quantize(quantize_tensors=False)
    assert aware.layers[0].mlp.up.kernel[...] is model.layers[0].mlp.up.kernel[...]
    assert aware.head is None
    graphdef, state = nnx.split(aware)
    loss = jax.jit(jax.value_and_grad(lambda s: nnx.merge(graphdef, s).compute_loss(ids)[1].loss))
    exact = jax.jit(jax.value_and_grad(lambda s: nnx.merge(model.graphdef, s).compute_loss(ids)[1].loss))
    (value, found), (expected_value, expected) = loss(state), exact(state)
    assert 0 < abs(value - expected_value) < 0.01 * expected_value
    a, b = (g["layers"][0]["mlp"]["up"]["kernel"].get_value() for g in (found, expected))
    assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "serve"])
def test_a_product_of_any_dimensions_and_its_gradients_are_near(mode: Any) -> None:
    dot = get_dot_general_by_bits(8, mode)["dot_general_cls"]()
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, rhs = jax.random.normal(keys[0], (2, 5, 16, 3)), jax.random.normal(keys[1], (16, 4, 2, 6))
    numbers = (((2,), (0,)), ((0,), (2,)))

    def run(product: Any) -> Any:
        out, pull = jax.vjp(lambda a, b: product(a, b, numbers), lhs, rhs)
        return out, *pull(jax.random.normal(keys[2], out.shape))

    found, expected = run(dot), run(lambda *x: jax.lax.dot_general(*x, precision="highest"))
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == y.shape
        error = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
        quantized = mode == "train" or i == 0
        assert (1e-3 if quantized else 0) <= error < (0.02 if quantized else 1e-6)


@pytest.mark.slow
def test_flax_takes_it() -> None:
    given = get_dot_general_by_bits(8)
    x = jax.random.normal(jax.random.key(0), (3, 16))
    dense, plain = linen.Dense(8, **given), linen.Dense(8)
    params = plain.init(jax.random.key(1), x)
    error = jnp.linalg.norm(dense.apply(params, x) - plain.apply(params, x))
    assert 0 < error < 0.02 * jnp.linalg.norm(plain.apply(params, x))
    layer = nnx.Linear(16, 8, dot_general=given["dot_general_cls"](), rngs=nnx.Rngs(0))
    assert layer(x.astype(jnp.bfloat16)).shape == (3, 8)
    assert get_dot_general_by_bits() == {}


@pytest.mark.slow
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bits=9 must be an int, 2 to 8"):
        get_dot_general_by_bits(9)
    with pytest.raises(ValueError, match="mode='convert' stores weights"):
        get_dot_general_by_bits(8, "convert")
    with pytest.raises(ValueError, match="must be train, serve or eval"):
        get_dot_general_by_bits(8, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bits=16 must be an int, 2 to 8"):
        QuantizationConfig(bits=16)
    with pytest.raises(ValueError, match=r"bits=4\.0 must be an int"):
        QuantizationConfig(bits=4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group=0 must be at least 1"):
        QuantizationConfig(group=0)
    with pytest.raises(ValueError, match=r"group=8 .* activations=True must be False with groups"):
        QuantizationConfig(group=8, activations=True)
    with pytest.raises(ValueError, match="group=8 must be None with quantize_tensors=False"):
        small().quantize(QuantizationConfig(group=8), quantize_tensors=False)
    with pytest.raises(ValueError, match=r"has 32 inputs, which must be a multiple of group=7"):
        small().quantize(QuantizationConfig(group=7))
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.k is int8 already, and would be rounded twice"):
        small().quantize().quantize(QuantizationConfig(bits=4))
    with pytest.raises(ValueError, match="matches no linear layer"):
        small().quantize(QuantizationConfig(pattern="query"))
