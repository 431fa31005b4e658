"""What a config.json says is computed or refused, and what is written says the same."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from attnops_lm.config import Config
from attnops_lm.families import FAMILIES, config_from_hf, config_to_hf
from attnops_lm.rotary import RotaryConfig
from attnops_lm.testing import SIZES

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"full_attention_interval": 2, "attn_layer_indices": [1], "mamba_n_heads": 4}


def config(family: str = "llama", **changes: Any) -> Config:
    return config_from_hf({"model_type": family, **SIZES, **EXPERTS, **LINEAR, **changes})


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' must be one of"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' must be one of"),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}, "must be one of ['silu'] for gpt_oss"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("llama", {"is_causal": False}, "is_causal=False is not supported: attention here is causal"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types has ['chunked_attention'], but each must be",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "must be ('sliding_attention',"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is not true"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "must be one of ['silu'] for qwen3_next"),
        ("bamba", {"hidden_act": "gelu_pytorch_tanh"}, "must be one of ['silu'] for bamba"),
        ("bamba", {"mamba_d_head": 7}, "mamba_d_head=7 must be mamba_expand * hidden_size="),
        ("bamba", {"time_step_limit": [0.0, 1.0]}, "time_step_limit=(0.0, 1.0) must be (0, inf)"),
        ("bamba", {"layer_types": ["full_attention"] * 2}, "must be ('linear_attention', 'full_attention') for bamba"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' must be one of"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        config(family, **changes)


def test_an_infinite_limit_is_read_as_transformers_writes_it() -> None:
    read = config("bamba", time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert read == config("bamba")


def test_the_activation_is_that_of_the_config_in_every_family() -> None:
    assert config(hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    assert config("gemma2", hidden_activation="silu").activation == "silu"
    assert (config().activation, config("gemma2").activation) == ("silu", "gelu_tanh")


def test_fields_that_are_left_out_have_the_defaults_of_their_family() -> None:
    assert config("mistral").sliding_window == 4096
    assert config("mistral", sliding_window=None).sliding_window is None
    gemma = config("gemma2")
    assert (gemma.sliding_window, gemma.attention_soft_cap, gemma.final_soft_cap) == (4096, 50, 30)
    assert config("gemma2", attn_logit_softcapping=None).attention_soft_cap is None
    gemma3 = config("gemma3_text")
    assert {kind: rotary.base for kind, rotary in gemma3.rotary} == {"sliding_attention": 1e4}
    assert config("gemma3_text", num_hidden_layers=6).rotary_of("full_attention").base == 1e6
    oss = config("gpt_oss")
    assert oss.sliding_window == 128
    assert (oss.rotary_of("full_attention").base, type(oss.rotary[0][1].scaling).__name__) == (150000.0, "YarnScaling")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_says_what_was_read(family: str) -> None:
    for changes in ({}, {"attention_bias": family != "mistral"}, {"swiglu_alpha": 2.0}):
        read = config(family, **changes)
        assert config_from_hf(config_to_hf(read)) == read


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qk_norm": True}, "qk_norm=True can't be expressed in a config.json of llama, where it is False"),
        ({"softmax_scale": 0.5}, "softmax_scale=0.5 can't"),
        ({"rotary": (("full_attention", RotaryConfig(head_dim=8, interleaved=True)),)}, "rotary={'full_attention'"),
    ],
)
def test_a_choice_that_a_family_can_not_say_is_refused_when_it_is_written(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        config_to_hf(dataclasses.replace(config(), **changes))
