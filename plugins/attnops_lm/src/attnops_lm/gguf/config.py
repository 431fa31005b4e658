"""The config of a GGUF file: what each architecture's fields mean, as Hugging Face's fields.

llama.cpp's converter leaves some out; they follow from others here as in llama.cpp, such as Gemma's softmax scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attnops_lm.config import Config
from attnops_lm.families import config_from_hf
from attnops_lm.gguf.fields import Fields
from attnops_lm.gguf.file import GGUFFile, required
from attnops_lm.gguf.rope import rope
from attnops_lm.gguf.tokens import eos_ids_of

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_GEMMA_27B: Final = {"gemma2": 46, "gemma3": 62}  # layers of the models whose softmax scale is by width / heads


def config_of(file: GGUFFile) -> Config:
    """The config of a GGUF file.

    Raises:
        ValueError: an architecture that is not in `ARCHITECTURES`, a field that is missing, or one that says that
            something is computed which is not computed here.
    """
    kind = file.architecture
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={kind!r} must be one of {', '.join(ARCHITECTURES)}; read others from safetensors"
        )
    if (holds := file.fields.get("general.type", "model")) != "model":
        raise ValueError(f"general.type={holds!r} must be 'model': the file holds no whole model")
    fields, tensors = Fields(file), file.tensors
    heads, width = fields.positive("attention.head_count"), fields.positive("embedding_length")
    D, blocks = fields.positive("attention.key_length", width // heads), fields.positive("block_count")
    fields.check("attention.value_length", D)
    # Without an output, a file that says how embeddings are pooled is taken for one without a head, else it is tied.
    has_head = "output.weight" in tensors or not fields.get("pooling_type", 0)
    hf = {
        "vocab_size": len(required(file.fields, "tokenizer.ggml.tokens")),
        "hidden_size": width, "head_dim": D, "num_attention_heads": heads,
        "num_hidden_layers": blocks - fields.one("nextn_predict_layers", 0),
        "max_position_embeddings": fields.positive("context_length"),
        "rms_norm_eps": fields.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": has_head and "output.weight" not in tensors,
        "attention_bias": any(f"blk.{i}.attn_{x}.bias" in tensors for i in range(blocks)
                              for x in ("q", "qkv")),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_ids_of(file.fields)),
    }  # fmt: skip
    hf |= rope(fields, D)
    hf |= ARCHITECTURES[kind](fields, hf)
    if "num_key_value_heads" not in hf:
        hf["num_key_value_heads"] = fields.positive("attention.head_count_kv", heads)
    if "intermediate_size" not in hf:
        hf["intermediate_size"] = fields.positive("feed_forward_length")
    fields.check("rope.dimension_count", hf.get("rotary_dim", D))
    fields.check("rope.freq_base_swa", hf.get("rope_local_base_freq", hf["rope_theta"]))
    fields.check_all_read()
    return config_from_hf(hf).replace(has_head=has_head)


def _llama(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    if window := fields.one("attention.sliding_window", 0):
        return {"model_type": "mistral", "sliding_window": window}
    return {"model_type": "llama"}


def _windows(fields: Fields, window: int, count: int, default: int) -> dict[str, Any]:
    """The window, and which layers have it: by a list, or all but the last of each ``default`` layers."""
    pattern = fields.get("attention.sliding_window_pattern", default)
    if not window:
        return {"sliding_window": None, "layer_types": [_GLOBAL] * count}
    if not isinstance(pattern, list):
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(count)]
    return {"sliding_window": window, "layer_types": [_LOCAL if x else _GLOBAL for x in pattern[:count]]}


def _gemma(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, is_second = hf["num_hidden_layers"], fields.name == "gemma2"
    window = fields.one("attention.sliding_window", 4096 if is_second else 0)
    is_27b = layers == _GEMMA_27B[fields.name]
    given: dict[str, Any] = {
        "query_pre_attn_scalar": hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"],
        "final_logit_softcapping": fields.one("final_logit_softcapping", 30.0 if is_second else 0.0) or None,
    }  # fmt: skip
    if is_second:
        cap = fields.one("attn_logit_softcapping", 50.0)
        given |= {"model_type": "gemma2", "attn_logit_softcapping": cap or None}
    else:
        local = fields.one("rope.freq_base_swa", 1e4)
        given |= {"model_type": "gemma3_text", "attn_logit_softcapping": None, "rope_local_base_freq": local}
        if hf.get("rope_scaling", {}).get("rope_type", "linear") != "linear":
            raise ValueError("gemma3.rope.scaling.type='yarn' must be none or linear; use safetensors")
    return given | _windows(fields, window, layers, 2 if is_second else 6)


def _experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts_per_tok": fields.one("expert_used_count"),
        "intermediate_size": fields.one("expert_feed_forward_length"),
    }


def _gpt_oss(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    fields.check("expert_gating_func", 3)  # softmax over the chosen experts
    given = _windows(fields, fields.one("attention.sliding_window"), hf["num_hidden_layers"], 2)
    given |= {"model_type": "gpt_oss", "num_local_experts": fields.one("expert_count")}
    # The ends of YaRN's ramp are not rounded in these models, which GGUF has no field for.
    scaling = hf.get("rope_scaling", {"rope_type": "default"})
    scaling = scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {})
    return given | _experts(fields) | {"rope_scaling": scaling}


def _qwen3_next(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = hf["num_hidden_layers"], fields.one("ssm.time_step_rank")
    every = fields.one("full_attention_interval", 4)
    linear = fields.get("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(layers)])
    fields.check("expert_gating_func", 1)  # softmax over all experts
    experts = _experts(fields)
    return experts | {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention" if x else _GLOBAL for x in linear[:layers]],
        "rotary_dim": fields.one("rope.dimension_count", hf["head_dim"]),
        "num_experts": fields.one("expert_count"), "moe_intermediate_size": experts["intermediate_size"],
        "shared_expert_intermediate_size": fields.one("expert_shared_feed_forward_length"),
        "norm_topk_prob": fields.one("expert_weights_norm", True),
        "linear_num_key_heads": fields.one("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.one("ssm.state_size"),
        "linear_value_head_dim": _divided(fields, "ssm.inner_size", heads),
        "linear_conv_kernel_dim": fields.one("ssm.conv_kernel"),
    }  # fmt: skip


def _bamba(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    fields.check("rope.scaling.finetuned", True)  # False: attention has no positions, as in Granite 4
    layers, heads = hf["num_hidden_layers"], fields.one("ssm.time_step_rank")
    by_layer = fields.need("attention.head_count_kv")  # 0 in layers with a state
    by_layer = by_layer if isinstance(by_layer, list) else [by_layer] * layers
    attention = [i for i, count in enumerate(by_layer) if count]
    if len(kv_heads := {by_layer[i] for i in attention}) != 1:
        raise ValueError(f"{fields.name}.attention.head_count_kv={by_layer} must be 0 or one other number")
    states = [i for i in range(layers) if i not in attention]
    tensors = fields.file.tensors
    return {
        "model_type": "bamba", "num_key_value_heads": kv_heads.pop(), "attn_layer_indices": attention,
        "rotary_dim": fields.one("rope.dimension_count", hf["head_dim"]),
        "mamba_n_heads": heads, "mamba_d_head": _divided(fields, "ssm.inner_size", heads),
        "mamba_expand": _divided(fields, "ssm.inner_size", hf["hidden_size"]),
        "mamba_n_groups": fields.one("ssm.group_count"), "mamba_d_state": fields.one("ssm.state_size"),
        "mamba_d_conv": fields.one("ssm.conv_kernel"),
        "mamba_conv_bias": any(f"blk.{i}.ssm_conv1d.bias" in tensors for i in states),
        "mamba_proj_bias": any(f"blk.{i}.ssm_in.bias" in tensors for i in states),
    }  # fmt: skip


def _divided(fields: Fields, name: str, by: int) -> int:
    value, rest = divmod(fields.one(name), by)
    if rest:
        raise ValueError(f"{fields.name}.{name}={fields.one(name)} must be a multiple of {by}")
    return int(value)


# By GGUF's name, the fields that a family has besides the ones that all have.
ARCHITECTURES: dict[str, Callable[[Fields, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,  # and Mistral
    "qwen2": lambda fields, hf: {"model_type": "qwen2"},
    "qwen3": lambda fields, hf: {"model_type": "qwen3"},
    "gemma2": _gemma,
    "gemma3": _gemma,
    "qwen3next": _qwen3_next,
    "granitehybrid": _bamba,  # Bamba; Granite 4 has more
    "gpt-oss": _gpt_oss,
}
