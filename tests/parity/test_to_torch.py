"""The language models of the examples as transformers' models in PyTorch, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from attnops_lm.model import CausalLM, SequenceClassifier
from attnops_lm.testing import small

IDS = np.random.default_rng(0).integers(1, 96, (2, 20))
FAMILIES = {
    "llama": {},
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 30.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "gpt_oss": {},
}


def of_family(family: str) -> CausalLM:
    """A small model; families that `small` has no sizes of its own for are Llama's with another type."""
    known = family in ("llama", "mistral", "gemma2", "gpt_oss")
    return small(family if known else "llama", model_type=family, **FAMILIES[family])


def logits_of(model: nnx.Module, **options: Any) -> np.ndarray:
    graphdef, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s: nnx.merge(graphdef, s)(jnp.asarray(IDS), **options).logits)(state))


def theirs(model: Any, **options: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS), use_cache=False, **options).logits.float().numpy()


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_model_in_torch_has_the_same_logits_and_the_same_weights_back(family: str) -> None:
    model = of_family(family)
    made = model.to_torch()
    assert type(made).__name__.lower() == f"{family.removesuffix('_text').replace('_', '')}forcausallm"
    expected = theirs(made)
    close(logits_of(model), expected)
    shapes = CausalLM.lazy_init(model.config)
    for transform in (model.transform_fn, shapes.pure_transform_fn):
        params = transform(made.state_dict())
        assert jax.tree.structure(params) == jax.tree.structure(nnx.to_pure_dict(model.graphstate))
        for a, b in zip(*map(jax.tree.leaves, (params, model.graphstate)), strict=True):
            assert np.array_equal(a, b)
    close(logits_of(shapes.merge_params_dict(params)), expected)


def test_a_saved_model_is_read_by_transformers(tmp_path: Any) -> None:
    model = small("gpt_oss")
    model.save_pretrained(tmp_path, step=3)
    loaded = model.get_torch_loader().from_pretrained(tmp_path / "checkpoint-3", dtype=torch.float32)
    close(logits_of(model), theirs(loaded))


def test_a_classifier_in_torch_has_the_same_logits() -> None:
    config = small(pad_token_id=0).config
    model = SequenceClassifier(config, 5)
    assert model.get_torch_loader() is transformers.AutoModelForSequenceClassification
    made = model.to_torch()
    close(logits_of(model), theirs(made))
    params = model.transform_fn(made.state_dict())
    assert np.array_equal(params["score"]["kernel"], model.score.kernel[...])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_saved_classifier_is_read_by_transformers_and_back(family: str, tmp_path: Any) -> None:
    model = SequenceClassifier(of_family(family).config.replace(pad_token_id=0), 5)
    model.save_pretrained(tmp_path / "ours")
    loaded = model.get_torch_loader().from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert type(loaded).__name__ == loaded.config.architectures[0]
    close(logits_of(model), theirs(loaded))
    loaded.save_pretrained(tmp_path / "theirs")
    close(logits_of(SequenceClassifier.from_pretrained(tmp_path / "theirs")), logits_of(model))


def test_the_loss_is_that_of_transformers() -> None:
    model = small("gemma2")
    labels = IDS.copy()
    labels[0, :6] = -100
    with torch.no_grad():
        expected = model.to_torch()(input_ids=torch.tensor(IDS), labels=torch.tensor(labels)).loss
    np.testing.assert_allclose(model.compute_loss(jnp.asarray(IDS), labels)[1].loss, float(expected), rtol=1e-5)


def test_other_dtypes_are_kept_and_other_models_refused() -> None:
    model = small().to_dtype(jnp.bfloat16)
    made = model.to_torch()
    assert made.dtype == torch.bfloat16
    back = model.transform_fn(made.state_dict())["embed"]
    assert back.dtype == jnp.bfloat16
    assert np.array_equal(back, model.embed[...])
    with pytest.raises(ValueError, match=r"call unwrap_lora_to_layers\(\) for LoRA"):
        model.quantize().to_torch()
    with pytest.raises(ValueError, match=r"no model\.norm\.weight, which norm\.scale is read from"):
        model.transform_fn({k: v for k, v in made.state_dict().items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has shape \(96, 32\), but embed has \(97, 32\)"):
        small(vocab_size=97).transform_fn(made.state_dict())
