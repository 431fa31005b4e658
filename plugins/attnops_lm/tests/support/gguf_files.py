"""GGUF files of small models, written by the rules of llama.cpp's ``convert_hf_to_gguf.py``, apart from the reader."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from attnops_lm.model import CausalLM
from attnops_lm.testing import small
from attnops_lm.tokenizer import _BYTES

# A byte each, merges, and four added tokens.
PIECES = [*_BYTES, "12", "123", "Ġa", "<|eot_id|>", "<|begin|>", "<|end|>", "<tool_call>"]
CONTROL, USER_DEFINED = 3, 4
SPLITS = {"qwen2": "qwen2", "qwen3": "qwen2", "gpt-oss": "gpt-4o"}
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen3_next": "qwen3next", "bamba": "granitehybrid",
}  # fmt: skip
_LIKE = {"qwen2": "llama", "qwen3": "llama", "gemma3_text": "gemma2"}  # families that `small` does not make
_CHANGES: dict[str, dict[str, Any]] = {
    # The softmax scale follows from the heads' size in GGUF.
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 15.0, "tie_word_embeddings": True},
    "gemma3_text": {
        "query_pre_attn_scalar": 8, "num_hidden_layers": 7, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "attn_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"num_hidden_layers": 3, "attention_bias": True, "hidden_act": "silu"},
    "qwen3_next": {"num_hidden_layers": 4, "hidden_size": 32},
    "bamba": {"num_hidden_layers": 3},
}  # fmt: skip


def model_of(family: str, **changes: Any) -> CausalLM:
    """A small model with a token for each of `PIECES`, whose norms, biases and rates are random too."""
    changes = {"tie_word_embeddings": False, **_CHANGES.get(family, {}), **changes}
    changes |= {"model_type": family, "vocab_size": len(PIECES)}
    model = small(_LIKE.get(family, family), **changes)
    graphdef, state = nnx.split(model)
    random = np.random.default_rng(0)

    def change(path: Any, x: jax.Array) -> jax.Array:
        is_small = x.ndim == 1 or "bias" in jax.tree_util.keystr(path)
        return x + jnp.asarray(0.3 * random.normal(size=x.shape), x.dtype) if is_small else x

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(change, state))


def write(
    path: Path,
    model: CausalLM,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    split_max_tensors: int = 0,
    **fields: Any,
) -> Path:
    """The model's GGUF file.

    Args:
        path: the file; the folder gets the model's safetensors too.
        model: the model.
        tensors: in place of the model's, or more, perhaps with their types.
        split_max_tensors: tensors in each part; 0: one file.
        **fields: set last, or left out if None; ``__`` is a dot.
    """
    model.save_pretrained(path.parent)
    hf = json.loads((path.parent / "config.json").read_text())
    name = ARCHITECTURES[hf["model_type"]]
    values = {f"{name}.{x}": y for x, y in fields_of(hf).items()} | _tokenizer(name)
    values |= {x.replace("__", "."): y for x, y in fields.items()}
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    for field, value in values.items():
        if value is None or field == "general.architecture":
            for data in writer.kv_data:
                data.pop(field, None)
        if value is not None:
            writer.add_key_value(field, value, gguf.GGUFValueType.get_type(value))
    found: dict[str, Any] = {}
    for theirs, value in load_file(path.parent / "model.safetensors").items():
        found |= dict(converted(hf, theirs, value))
    found |= stacked_experts(found)
    for tensor, value in (found | dict(tensors or {})).items():
        given, kind = value if isinstance(value, tuple) else (value.astype(np.float32), None)
        writer.add_tensor(tensor, np.ascontiguousarray(given), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(name: str) -> dict[str, Any]:
    types = [1] * (len(PIECES) - 4) + [CONTROL] * 3 + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": SPLITS.get(name, "llama-bpe"),
        "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a"], "tokenizer.ggml.eos_token_id": PIECES.index("<|end|>"),
    }  # fmt: skip


def fields_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture's fields, without its name, from a config.json."""
    family, D, layers = hf["model_type"], hf["head_dim"], hf["num_hidden_layers"]
    rope = hf["rope_parameters"].get("full_attention", hf["rope_parameters"])
    rotated = int(D * rope.get("partial_rotary_factor", 1))
    fields = {
        "context_length": hf["max_position_embeddings"], "embedding_length": hf["hidden_size"], "block_count": layers,
        "feed_forward_length": hf["intermediate_size"], "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"], "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
    }  # fmt: skip
    if family in ("llama", "mistral", "bamba"):
        fields |= {"vocab_size": hf["vocab_size"], "rope.dimension_count": rotated}
    if family != "bamba":
        fields |= {"attention.key_length": D, "attention.value_length": D}
    if family != "gemma2":
        fields["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        fields |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }  # fmt: skip
    if family in ("gemma2", "gemma3_text", "gpt_oss"):
        fields["attention.sliding_window"] = hf["sliding_window"]
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            fields |= {cap: hf[cap]} if hf.get(cap) else {}
    if family == "gemma3_text":
        fields["rope.freq_base_swa"] = hf["rope_parameters"]["sliding_attention"]["rope_theta"]
    if family in ("gpt_oss", "qwen3_next"):
        experts = hf.get("num_local_experts", hf.get("num_experts"))
        fields |= {"expert_count": experts, "expert_used_count": hf["num_experts_per_tok"]}
        fields["expert_feed_forward_length"] = hf.get("moe_intermediate_size", hf["intermediate_size"])
    if family == "qwen3_next":
        values, size = hf["linear_num_value_heads"], hf["linear_value_head_dim"]
        fields |= {
            "ssm.conv_kernel": hf["linear_conv_kernel_dim"], "ssm.state_size": hf["linear_key_head_dim"],
            "ssm.group_count": hf["linear_num_key_heads"], "ssm.time_step_rank": values,
            "ssm.inner_size": values * size, "rope.dimension_count": rotated, "full_attention_interval": 4,
            "attention.recurrent_layers": [x == "linear_attention" for x in hf["layer_types"]],
            "expert_shared_feed_forward_length": hf["shared_expert_intermediate_size"],
        }  # fmt: skip
    if family == "bamba":
        kv = [hf["num_key_value_heads"] if i in hf["attn_layer_indices"] else 0 for i in range(layers)]
        fields |= {
            "ssm.conv_kernel": hf["mamba_d_conv"], "ssm.state_size": hf["mamba_d_state"],
            "ssm.group_count": hf["mamba_n_groups"], "ssm.time_step_rank": hf["mamba_n_heads"],
            "ssm.inner_size": hf["mamba_expand"] * hf["hidden_size"], "attention.head_count_kv": kv,
            "rope.scaling.finetuned": True,
        }  # fmt: skip
    return fields


def converted(hf: Mapping[str, Any], name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one weight of a checkpoint, by GGUF's names; experts are still apart."""
    family = hf["model_type"]
    (architecture,) = (x for x, y in gguf.MODEL_ARCH_NAMES.items() if y == ARCHITECTURES[family])
    table = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])

    def named(name: str) -> str:
        module, _, kind = name.rpartition(".")
        return f"{table.get_name(module)}.{kind}" if kind in ("weight", "bias") else str(table.get_name(name))

    if family in ("llama", "mistral", "bamba") and (".q_proj." in name or ".k_proj." in name):
        heads = hf["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        half = value.shape[0] // heads // 2
        value = value.reshape(heads, 2, half, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if name.endswith("norm.weight") and family in ("gemma2", "gemma3_text", "qwen3_next"):
        value = value + (0 if name.endswith("linear_attn.norm.weight") else 1)
    if name.endswith("A_log"):
        value = -np.exp(value)
    if name.endswith("conv1d.weight"):
        value = value.squeeze()
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith(("mamba.A_log", "mamba.D")):
        value = value.reshape(-1, 1)
    if name.endswith("mamba.norm.weight"):
        value = value.reshape(hf["mamba_n_groups"], -1)
    if name.endswith("sinks"):
        name += ".weight"
    if family == "gpt_oss" and ".experts." in name:
        start, is_bias = name.rpartition(".")[0], name.endswith("_bias")
        kind = "bias" if is_bias else "weight"
        value = value if is_bias else value.swapaxes(1, 2)
        if "gate_up" in name:
            yield named(f"{start}.gate_proj.{kind}"), value[:, ::2]
            yield named(f"{start}.up_proj.{kind}"), value[:, 1::2]
        else:
            yield named(f"{start}.down_proj.{kind}"), value
    elif family == "qwen3_next" and ".experts." in name:
        start, expert, which, _ = name.rsplit(".", 3)
        yield f"{named(f'{start}.{which}.weight')}/{int(expert):03d}", value
    elif name.endswith("in_proj_qkvz.weight"):
        K, D, Dv = (hf[f"linear_{x}"] for x in ("num_key_heads", "key_head_dim", "value_head_dim"))
        values = hf["linear_num_value_heads"] // K * Dv
        by_head = value.reshape(K, -1, value.shape[1])
        q, k, v, z = np.split(by_head, np.cumsum([D, D, values]), axis=1)
        block = named(name).removesuffix("ssm_in.weight")
        yield f"{block}attn_qkv.weight", np.concatenate([x.reshape(-1, value.shape[1]) for x in (q, k, v)])
        yield f"{block}attn_gate.weight", z.reshape(-1, value.shape[1])
    else:
        yield named(name), value


def stacked_experts(found: dict[str, Any]) -> dict[str, Any]:
    """The experts' matrices, which are taken out of ``found``, in one tensor each."""
    names = sorted(x for x in found if "/" in x)
    by_name: dict[str, list[Any]] = {}
    for name in names:
        by_name.setdefault(name.partition("/")[0], []).append(found.pop(name))
    return {name: np.stack(values) for name, values in by_name.items()}
