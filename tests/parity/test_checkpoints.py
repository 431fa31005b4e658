"""Checkpoints of every family: transformers writes and `attnops_lm` reads, and the other way round.

Logits of padded batches, in float32, on the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from attnops_lm import CausalLM
from attnops_lm.families import FAMILIES, SIZES, config_from_hf

T = 24
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN | {"truncate": False}, **WINDOW}
# The family, the config class in transformers, and what differs from `SMALL`.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}),
    "llama, tied, llama3 scaling": ("llama", "LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama, biases": ("llama", "LlamaConfig", {"attention_bias": True}),
    "mistral": ("mistral", "MistralConfig", WINDOW),
    "mistral, no window": ("mistral", "MistralConfig", {"sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2Config", {}),
    "qwen2, windows": ("qwen2", "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "qwen3": ("qwen3", "Qwen3Config", {}),
    "gemma2": ("gemma2", "Gemma2Config", {"query_pre_attn_scalar": 24, **WINDOW}),
    "gemma3": ("gemma3_text", "Gemma3TextConfig", {"query_pre_attn_scalar": 24, **WINDOW}),
    "gpt_oss": ("gpt_oss", "GptOssConfig", GPT_OSS),
}


def torch_model(config_class: str, changes: dict[str, Any]) -> Any:
    """A random model with weights far enough from 0 that logits are of the order of 1."""
    config = getattr(transformers, config_class)(**(SMALL | changes), attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.1) + (weight if "norm" in name else 0)
            )
    return model


def logits_of(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return model(**{name: torch.tensor(x) for name, x in given.items()}).logits.numpy()


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [2, T]; the second row has left padding."""
    ids = np.random.default_rng(0).integers(3, 96, (2, T))
    mask = np.ones((2, T), np.int64)
    mask[1, :5] = 0
    return ids, mask


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, batch: tuple[np.ndarray, np.ndarray]) -> None:
    family, config_class, changes = CASES[case]
    reference = torch_model(config_class, changes)
    reference.save_pretrained(tmp_path / "theirs")
    ids, mask = batch
    seen = mask.astype(bool)
    expected = logits_of(reference, ids, mask)[seen]
    assert expected.std() > 0.3

    model = CausalLM.from_pretrained(tmp_path / "theirs")
    assert model.config.family == family
    found = np.asarray(model(jnp.asarray(ids), attention_mask=jnp.asarray(mask)).logits)[seen]
    np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()))

    model.save_pretrained(tmp_path / "ours")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(loaded) is type(reference)
    np.testing.assert_allclose(logits_of(loaded.eval(), ids, mask)[seen], expected, atol=1e-6 * np.abs(expected).max())
    assert CausalLM.from_pretrained(tmp_path / "ours").config == model.config


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(family: str) -> None:
    theirs = transformers.CONFIG_MAPPING[family](num_hidden_layers=30).to_dict()
    given = {name: theirs[name] for name in SIZES.values() if name in theirs and name != "tie_word_embeddings"}
    left_out = given | {name: theirs[name] for name in ("model_type", "eos_token_id")}
    if family == "gpt_oss":
        left_out |= {name: theirs[name] for name in ("num_local_experts", "num_experts_per_tok")}
    assert config_from_hf(left_out) == config_from_hf(theirs)


def test_every_family_has_a_case() -> None:
    assert {family for family, _, _ in CASES.values()} == set(FAMILIES)
