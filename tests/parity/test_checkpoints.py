"""Checkpoints of every family: transformers writes and `attnops_lm` reads, and the other way round.

Logits of padded batches, in float32, on the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from attnops_lm import CausalLM
from attnops_lm.families import FAMILIES, SIZES, config_from_hf
from attnops_lm.params import by_path

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
# The delta rule's outputs are normalised. Where a query is nearly orthogonal to the keys they are near 0, and with a
# small eps float32's errors are large, those of transformers too.
QWEN3_NEXT = {
    "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
BAMBA = {
    "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
}  # fmt: skip
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
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", QWEN3_NEXT),
    "bamba": ("bamba", "BambaConfig", BAMBA),
    "bamba, without a bias": ("bamba", "BambaConfig", BAMBA | {"mamba_conv_bias": False, "mamba_n_groups": 1}),
    "qwen3_next, weights as they are": ("qwen3_next", "Qwen3NextConfig", QWEN3_NEXT | {"norm_topk_prob": False}),
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
    more = {"attn_layer_indices": [9]} if family == "bamba" else {}
    theirs = transformers.CONFIG_MAPPING[family](num_hidden_layers=30, **more).to_dict()
    given = {name: theirs[name] for name in SIZES.values() if name in theirs and name != "tie_word_embeddings"}
    left_out = given | more | {name: theirs[name] for name in ("model_type", "eos_token_id")}
    if family == "gpt_oss":
        left_out |= {name: theirs[name] for name in ("num_local_experts", "num_experts_per_tok")}
    assert config_from_hf(left_out) == config_from_hf(theirs)


@pytest.mark.parametrize("case", ["qwen3_next", "bamba"])
def test_gradients_of_linear_layers_are_those_of_transformers(case: str, batch: tuple[np.ndarray, np.ndarray]) -> None:
    reference = torch_model(*CASES[case][1:])
    ids, mask = batch
    weight = np.random.default_rng(1).normal(size=(2, T, 96)).astype(np.float32) * mask[:, :, None]
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    outputs = reference(**{name: torch.tensor(x) for name, x in given.items()}).logits
    (outputs * torch.tensor(weight)).sum().backward()
    model = CausalLM(config_from_hf(reference.config.to_dict()))
    model = model.merge_params_dict(model.transform_fn(reference.state_dict()))
    slopes = {name: x.grad for name, x in reference.named_parameters()}
    expected = by_path(model.transform_fn(slopes))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any) -> Any:
        return (nnx.merge(graphdef, params, rest)(ids, attention_mask=mask).logits * weight).sum()

    found = by_path(jax.jit(jax.grad(loss))(params))
    assert set(found) == set(expected)
    for path, x in expected.items():
        assert np.abs(x).max() > 0, path
        # transformers' in float32 are up to 2.1e-5 off those in float64.
        np.testing.assert_allclose(found[path], x, atol=5e-5 * np.abs(x).max(), err_msg=path)


def test_every_family_has_a_case() -> None:
    assert {family for family, _, _ in CASES.values()} == set(FAMILIES)
