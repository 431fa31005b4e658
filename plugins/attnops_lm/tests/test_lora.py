"""Low-rank adaptation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lm_model import call, close, tokens

from attnops_lm.quantize import QuantizationConfig
from attnops_lm.testing import small


def trained(model: Any, ids: jax.Array, steps: int = 40) -> tuple[Any, list[float]]:
    """The model with its low-rank matrices fine-tuned to predict the tokens, and the losses."""
    graphdef, matrices, rest = nnx.split(model, nnx.LoRAParam, ...)
    optimizer = optax.adam(2e-2)

    @jax.jit
    def step(matrices: Any, state: Any) -> Any:
        def loss(matrices: Any) -> jax.Array:
            return nnx.merge(graphdef, matrices, rest).compute_loss(ids)[1].loss

        value, gradients = jax.value_and_grad(loss)(matrices)
        updates, state = optimizer.update(gradients, state, matrices)
        return optax.apply_updates(matrices, updates), state, value

    state, losses = optimizer.init(matrices), []
    for _ in range(steps):
        matrices, state, value = step(matrices, state)
        losses.append(float(value))
    return nnx.merge(graphdef, matrices, rest), losses


@pytest.mark.slow
def test_fine_tuned_its_loss_falls_and_merged_it_is_the_same() -> None:
    base, ids = small(), tokens((2, 10))
    model = base.apply_lora_to_layers(4)
    before = call(base, ids).logits
    close(call(model, ids).logits, before)
    tuned, losses = trained(model, ids)
    assert losses[-1] < 0.1 * losses[0], losses
    assert tuned.layers[0].attention.q.base_module.kernel[...] is base.layers[0].attention.q.kernel[...]
    expected = call(tuned, ids).logits
    assert float(jnp.abs(expected - before).max()) > 1
    merged = tuned.unwrap_lora_to_layers()
    assert merged.graphdef == base.graphdef
    close(call(merged, ids).logits, expected)
    close(call(model.merge_lora_params(tuned.split_lora_params()), ids).logits, expected)
    close(call(base, ids).logits, before)  # is as it was
    close(call(tuned, ids).logits, expected)


@pytest.mark.slow
def test_the_pattern_chooses_layers() -> None:
    model = small("gpt_oss").apply_lora_to_layers(2, r"attention\.(q|v)$", rngs=nnx.Rngs(5))
    split = model.split_lora_params()
    assert {name for layer in split["layers"].values() for name in layer["attention"]} == {"q", "v"}
    assert split["layers"][1]["attention"]["v"]["lora_b"].shape == (2, 16)
    assert set(model.split_params_dict()) == {"params", "lora_params"}
    everything = small(tie_word_embeddings=False).apply_lora_to_layers(1)
    assert set(everything.split_lora_params()) == {"layers"}  # not the head
    assert set(everything.split_lora_params()["layers"][0]["mlp"]) == {"gate", "up", "down"}
    assert model.half().split_lora_params()["layers"][0]["attention"]["q"]["lora_a"].dtype == jnp.float16
    assert small().split_lora_params() == {}


@pytest.mark.slow
def test_over_quantised_layers_only_the_matrices_are_trained() -> None:
    ids = tokens((2, 10))
    base = small().quantize(QuantizationConfig(bits=4))
    tuned, losses = trained(base.apply_lora_to_layers(4, r"mlp\.(gate|up)$"), ids, steps=12)
    assert losses[-1] < 0.8 * losses[0], losses
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate is quantised"):
        tuned.unwrap_lora_to_layers()
    again = small().apply_lora_to_layers(4).quantize()
    assert again.layers[0].mlp.up.base_module.qvalue.dtype == jnp.int8


@pytest.mark.slow
def test_matrices_are_computed_in_the_dtype_of_the_model() -> None:
    model = small().apply_lora_to_layers(2).to_dtype(jnp.bfloat16)
    x = jnp.ones((1, 32), jnp.bfloat16)
    assert model.layers[0].attention.q(x).dtype == jnp.bfloat16
    assert jax.eval_shape(model, tokens((1, 3))).last_hidden_state.dtype == jnp.bfloat16
    assert model.float().layers[0].attention.q(x.astype(jnp.float32)).dtype == jnp.float32


def test_what_does_not_fit_is_refused(tmp_path: Any) -> None:
    model = small()
    for rank in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"lora_rank={rank} must be an int of 1 or more"):
            model.apply_lora_to_layers(rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches no linear layer"):
        model.apply_lora_to_layers(1, "query")
    wrapped = model.apply_lora_to_layers(1)
    with pytest.raises(ValueError, match="has LoRA layers already"):
        wrapped.apply_lora_to_layers(1)
    with pytest.raises(ValueError, match=r"base_module\.kernel is not in a checkpoint of llama; call unwrap_lora"):
        wrapped.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="no LoRAParam"):
        model.merge_lora_params(wrapped.split_lora_params())


@pytest.mark.slow
def test_layers_are_logged_if_asked(caplog: Any) -> None:
    model = small().apply_lora_to_layers(3, r"\.o$", verbose=True)
    assert "layers.1.attention.o: LoRA of rank 3 on [32, 32]" in caplog.text
    caplog.clear()
    model.unwrap_lora_to_layers(verbose=True)
    assert len(caplog.records) == 2
    assert np.array_equal(model.unwrap_lora_to_layers().embed[...], model.embed[...])
