"""How checkpoints of each family describe a model's sizes, and name its weights.

A `Family` reads the fields of a Hugging Face ``config.json`` that only this family has; `config_from_hf` reads the
fields that all families share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from attnops_lm.config import Config, Experts, LayerType, LinearSizes
from attnops_lm.rotary import SCALINGS, RotaryConfig, RotaryScaling

# The fields of sizes, from our names to Hugging Face's.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
}
# Activations, from transformers' names to ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: the class in transformers.
        fields: a function from a Hugging Face config to fields of `Config` in addition to `SIZES`.
        to_hf: the inverse of ``fields``.
        defaults: transformers' defaults of fields that a config.json may leave out, if they change the computation but
            no weight's shape.
        activation: the field with the activation.
    """

    architecture: str
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"


def _llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias}


def _gemma(hf: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(hf) | {
        "unit_offset": True,
        "post_norms": True,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "softmax_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": hf.get("attn_logit_softcapping"),
        "final_soft_cap": hf.get("final_logit_softcapping"),
    }


def _gemma_to_hf(config: Config) -> dict[str, Any]:
    assert config.softmax_scale is not None
    return {
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(config.softmax_scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
    }


def _gpt_oss(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = Experts(
        count=hf["num_local_experts"], per_token=hf["num_experts_per_tok"], limit=hf.get("swiglu_limit", 7.0),
        alpha=hf.get("swiglu_alpha", 1.702),
    )  # fmt: skip
    return _llama(hf) | {"sinks": True, "experts": experts}


def _gpt_oss_to_hf(config: Config) -> dict[str, Any]:
    assert config.experts is not None
    return {
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
        "swiglu_limit": config.experts.limit,
        "swiglu_alpha": config.experts.alpha,
        "attention_bias": config.qkv_bias,
    }


# Fields of Qwen3-Next's linear layers, from our names.
_DELTA_RULE = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim", "width": "linear_conv_kernel_dim",
}  # fmt: skip
_SHARED_EXPERTS = {
    "count": "num_experts", "per_token": "num_experts_per_tok", "shared_size": "shared_expert_intermediate_size",
    "normalised": "norm_topk_prob",
}  # fmt: skip


def _qwen3_next(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["decoder_sparse_step"] != 1:
        raise ValueError(f"decoder_sparse_step={hf['decoder_sparse_step']}, but every layer must have experts: 1")
    return _llama(hf) | {
        "unit_offset": True,
        "qk_norm": True,
        "attention_gate": True,
        "intermediate_size": hf["moe_intermediate_size"],
        "experts": Experts(**{ours: hf[theirs] for ours, theirs in _SHARED_EXPERTS.items()}),
        "linear": LinearSizes(rule="delta", **{ours: hf[theirs] for ours, theirs in _DELTA_RULE.items()}),
    }


def _qwen3_next_to_hf(config: Config) -> dict[str, Any]:
    sizes = {theirs: getattr(config.linear, ours) for ours, theirs in _DELTA_RULE.items()}
    experts = {theirs: getattr(config.experts, ours) for ours, theirs in _SHARED_EXPERTS.items()}
    return {"attention_bias": config.qkv_bias, "moe_intermediate_size": config.intermediate_size} | sizes | experts


_MAMBA = {
    "value_heads": "mamba_n_heads", "key_heads": "mamba_n_groups", "head_dim": "mamba_d_state", "width": "mamba_d_conv",
    "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip


def _bamba(hf: Mapping[str, Any]) -> dict[str, Any]:
    given = hf.get("time_step_limit") or (0.0, math.inf)
    # transformers writes a float that JSON lacks as {"__float__": "Infinity"}.
    limit = tuple(float(x["__float__"] if isinstance(x, Mapping) else x) for x in given)
    if limit != (0.0, math.inf):
        raise ValueError(f"time_step_limit={limit} must be (0, inf): steps here have no limits")
    sizes = {ours: hf[theirs] for ours, theirs in _MAMBA.items()}
    values, heads = hf["mamba_expand"] * hf["hidden_size"], sizes["value_heads"]
    given_dim = hf.get("mamba_d_head", "auto")
    if values % heads or given_dim not in ("auto", values // heads):
        raise ValueError(
            f"mamba_d_head={given_dim} must be mamba_expand * hidden_size={values} over mamba_n_heads={heads}, a whole "
            f"number"
        )
    sizes["value_head_dim"] = values // heads
    return _llama(hf) | {"linear": LinearSizes(rule="mamba2", **sizes)}


def _bamba_to_hf(config: Config) -> dict[str, Any]:
    assert config.linear is not None
    expand, rest = divmod(config.linear.values, config.hidden_size)
    if rest:
        raise ValueError(f"Mamba-2 has {config.linear.values} values, but needs a multiple of {config.hidden_size}")
    attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    sizes = {theirs: getattr(config.linear, ours) for ours, theirs in _MAMBA.items()}
    more = {"mamba_expand": expand, "mamba_d_head": config.linear.value_head_dim, "attn_layer_indices": attention}
    return {"attention_bias": config.qkv_bias} | sizes | more


_BAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_proj_bias": False,
    "mamba_conv_bias": True, "mamba_expand": 2, "partial_rotary_factor": 0.5,
}  # fmt: skip
_QWEN3_NEXT = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "moe_intermediate_size": 512, "decoder_sparse_step": 1, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}  # fmt: skip
_WINDOW = {"sliding_window": 4096}
_GEMMA = _WINDOW | {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_QWEN = _WINDOW | {"max_window_layers": 28}
_GPT_OSS = {"sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0}
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, lambda c: {"attention_bias": c.qkv_bias}),
    "mistral": Family("MistralForCausalLM", lambda hf: {}, lambda c: {}, _WINDOW),
    "qwen2": Family("Qwen2ForCausalLM", lambda hf: {"qkv_bias": True}, lambda c: {}, _QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM", lambda hf: {**_llama(hf), "qk_norm": True}, lambda c: {"attention_bias": c.qkv_bias}, _QWEN
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", _gemma, _gemma_to_hf,
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, "hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", lambda hf: {**_gemma(hf), "qk_norm": True}, _gemma_to_hf,
        {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4}, "hidden_activation",
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", _qwen3_next, _qwen3_next_to_hf, _QWEN3_NEXT),
    "bamba": Family("BambaForCausalLM", _bamba, _bamba_to_hf, _BAMBA),
    "gpt_oss": Family("GptOssForCausalLM", _gpt_oss, _gpt_oss_to_hf, _GPT_OSS),
}  # fmt: skip


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """The config of a Hugging Face ``config.json``.

    Raises:
        ValueError: a model_type that is not in `FAMILIES`, or an option that this decoder does not support.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type={name!r} must be one of {sorted(FAMILIES)}; others need a mapping in families.py")
    hf = {**FAMILIES[name].defaults, **hf}
    if name == "gpt_oss" and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_scaling"] = _GPT_OSS_ROPE
    for field in _NOT_COMPUTED:
        if hf.get(field):
            raise ValueError(f"{field}={hf[field]!r} is not supported: {_NOT_COMPUTED[field]}")
    if hf.get("is_causal") is False:
        raise ValueError("is_causal=False is not supported: attention here is causal")
    values = {ours: hf[theirs] for ours, theirs in SIZES.items() if hf.get(theirs) is not None}
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_heads"])
    eos = hf.get("eos_token_id")
    types = _layer_types(name, hf)
    values |= {
        "family": name,
        "layer_types": types,
        "activation": _activation(name, hf),
        "sliding_window": hf.get("sliding_window") if "sliding_attention" in types else None,
        "rotary": tuple(
            (kind, _rotary(hf, kind, values["head_dim"])) for kind in dict.fromkeys(types) if kind != "linear_attention"
        ),
        "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    }
    return Config(**(values | FAMILIES[name].fields(hf)))


# Fields for computations that this decoder does not have.
_NOT_COMPUTED = {
    "mlp_only_layers": "every layer must have experts",
    "mlp_bias": "an MLP here has no biases",
    "use_bidirectional_attention": "attention here is causal",
    "quantization_config": "write the checkpoint in floating point",
}


def _activation(name: str, hf: Mapping[str, Any]) -> str:
    field = FAMILIES[name].activation
    given = hf.get(field) or ("silu" if field == "hidden_act" else "gelu_pytorch_tanh")
    # The experts of GPT-OSS have a special activation; SiLU follows the convolutions of linear layers.
    known = ["silu"] if name in ("bamba", "gpt_oss", "qwen3_next") else sorted(ACTIVATIONS)
    if given not in known:
        raise ValueError(f"{field}={given!r} must be one of {known} for {name}")
    return ACTIVATIONS[given]


def _layer_types(name: str, hf: Mapping[str, Any]) -> tuple[LayerType, ...]:
    default, given = _default_layer_types(name, hf), tuple(hf.get("layer_types") or ())
    if not given:
        return default
    if name in ("bamba", "llama", "mistral") and given != default:
        raise ValueError(f"layer_types={given} must be {default} for {name}, or left out")
    if name in ("qwen2", "qwen3") and "sliding_attention" in given and not hf.get("use_sliding_window"):
        raise ValueError(f"layer_types={given} has windows, but use_sliding_window is not true: change one of them")
    return given


def _default_layer_types(name: str, hf: Mapping[str, Any]) -> tuple[LayerType, ...]:
    count = hf["num_hidden_layers"]
    if name == "mistral" and hf.get("sliding_window"):
        return ("sliding_attention",) * count
    if name in ("qwen2", "qwen3") and hf.get("use_sliding_window"):
        first = hf["max_window_layers"]
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(count))
    if name == "bamba":
        attention = hf.get("attn_layer_indices") or ()
        return tuple("full_attention" if i in attention else "linear_attention" for i in range(count))
    if name == "qwen3_next":
        every = hf["full_attention_interval"]
        return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(count))
    if pattern := {"gemma2": 2, "gpt_oss": 2, "gemma3_text": hf.get("sliding_window_pattern") or 6}.get(name):
        return tuple("full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count))
    return ("full_attention",) * count


def _rotary(hf: Mapping[str, Any], kind: LayerType, head_dim: int) -> RotaryConfig:
    local = hf.get("rope_local_base_freq")
    if kind == "sliding_attention" and local is not None and not hf.get("rope_parameters"):
        return RotaryConfig(head_dim=head_dim, rotary_dim=head_dim, base=local)
    return RotaryConfig.from_config(hf, layer_type=kind, head_dim=head_dim)


def config_to_hf(config: Config) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a config: the inverse of `config_from_hf`.

    Raises:
        ValueError: an option that a checkpoint of its family can't express.
    """
    family = FAMILIES[config.family]
    by_kind = {kind: _rope_parameters(family, rotary) for kind, rotary in config.rotary}
    nested = config.family == "gemma3_text"
    hf = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    hf |= {
        "model_type": config.family,
        "architectures": [family.architecture],
        "rope_parameters": by_kind if nested else next(iter(by_kind.values())),
        family.activation: "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else "silu",
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    # With layer_types, transformers reads mistral as ministral; bamba's are computed.
    if config.family not in ("bamba", "llama", "mistral"):
        hf["layer_types"] = list(config.layer_types)
    if config.sliding_window is not None:
        hf |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
    elif config.family == "mistral":
        hf["sliding_window"] = None
    hf |= family.to_hf(config)
    _check_read_back(config, hf)
    return hf


def _check_read_back(config: Config, hf: Mapping[str, Any]) -> None:
    def fields(config: Config) -> dict[str, Any]:
        values = dataclasses.asdict(config) | {"has_head": True}  # which the names of the weights say
        values["rotary"] = {kind: dataclasses.replace(x, rotary_dim=x.rotated_dim) for kind, x in config.rotary}
        values["softmax_scale"] = config.softmax_scale or config.head_dim**-0.5
        values["sliding_window"] = config.sliding_window if "sliding_attention" in config.layer_types else None
        return values

    given, read = fields(config), fields(config_from_hf(hf))
    for name, value in given.items():
        if value != read[name]:
            raise ValueError(
                f"{name}={value!r} can't be expressed in a config.json of {config.family}, where it is {read[name]!r}"
            )


def _rope_parameters(family: Family, rotary: RotaryConfig) -> dict[str, Any]:
    scaling: RotaryScaling = rotary.scaling
    kind = next(name for name, cls in SCALINGS.items() if type(scaling) is cls)
    given = {k: v for k, v in dataclasses.asdict(scaling).items() if v is not None}  # type: ignore[call-overload]
    if "partial_rotary_factor" in family.defaults or rotary.rotated_dim != rotary.head_dim:
        given["partial_rotary_factor"] = rotary.rotated_dim / rotary.head_dim
    return {"rope_type": kind, "rope_theta": rotary.base, **given}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight: its path in the model, its name in a checkpoint, and whether its two last axes are swapped there.

    If files have a matrix per expert, ``parts`` are the matrices' names; they are joined along the first axis.
    """

    path: str
    name: str
    swapped: bool = False
    parts: tuple[str, ...] = ()
    experts: int = 0

    @property
    def files(self) -> list[str]:
        """The names in a checkpoint's files, one expert after the other."""
        folder = self.name.rpartition(".")[0]
        names = [f"{folder}.{e}.{part}.weight" for e in range(self.experts) for part in self.parts]
        return names or [self.name]

    def joined(self, values: list[Any]) -> Any:
        """The weight, from the values of `files`."""
        if not self.parts:
            return values[0]
        count = len(self.parts)
        return jnp.stack([jnp.concatenate(values[i : i + count]) for i in range(0, len(values), count)])

    def split(self, value: Any) -> list[Any]:
        """The values of `files`: the inverse of `joined`."""
        return [part for expert in value for part in jnp.split(expert, len(self.parts))] if self.parts else [value]


def weights(config: Config, *, lm_head: bool = True) -> Iterator[Weight]:
    """Every weight of a model of this config."""
    yield Weight("embed", "model.embed_tokens.weight")
    for i in range(config.num_layers):
        yield from _layer(config, i, f"layers.{i}", f"model.layers.{i}")
    yield Weight("norm.scale", "model.final_layernorm.weight" if config.family == "bamba" else "model.norm.weight")
    if lm_head and config.has_head and not config.tie_word_embeddings:
        yield Weight("head.kernel", "lm_head.weight", swapped=True)


def _linear_layer(config: Config, ours: str, theirs: str) -> Iterator[Weight]:
    assert config.linear is not None
    is_mamba = config.linear.rule == "mamba2"
    theirs = f"{theirs}.{'mamba' if is_mamba else 'linear_attn'}"
    kernels = {"inputs": "in_proj"} if is_mamba else {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba"}
    for name, their_name in (kernels | {"o": "out_proj"}).items():
        yield Weight(f"{ours}.{name}.kernel", f"{theirs}.{their_name}.weight", swapped=True)
        if config.linear.bias:
            yield Weight(f"{ours}.{name}.bias", f"{theirs}.{their_name}.bias")
    names = {"conv": "conv1d.weight", "log_rate": "A_log", "step_bias": "dt_bias"}
    names |= {"skip": "D", "scale": "norm.weight"} if is_mamba else {"norm.scale": "norm.weight"}
    names |= {"conv_bias": "conv1d.bias"} if config.linear.conv_bias else {}
    for name, their_name in names.items():
        yield Weight(f"{ours}.{name}", f"{theirs}.{their_name}")


def _layer(config: Config, layer: int, ours: str, theirs: str) -> Iterator[Weight]:
    if config.layer_types[layer] == "linear_attention":
        yield from _linear_layer(config, f"{ours}.attention", theirs)
    for name in "qkvo" if config.layer_types[layer] != "linear_attention" else "":
        yield Weight(f"{ours}.attention.{name}.kernel", f"{theirs}.self_attn.{name}_proj.weight", swapped=True)
        if config.output_bias if name == "o" else config.qkv_bias:
            yield Weight(f"{ours}.attention.{name}.bias", f"{theirs}.self_attn.{name}_proj.bias")
    if config.qk_norm and config.layer_types[layer] != "linear_attention":
        for name in "qk":
            yield Weight(f"{ours}.attention.{name}_norm.scale", f"{theirs}.self_attn.{name}_norm.weight")
    if config.sinks:
        yield Weight(f"{ours}.attention.sinks", f"{theirs}.self_attn.sinks")
    yield Weight(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight")
    if config.post_norms:
        yield Weight(f"{ours}.attention_post_norm.scale", f"{theirs}.post_attention_layernorm.weight")
        yield Weight(f"{ours}.mlp_norm.scale", f"{theirs}.pre_feedforward_layernorm.weight")
        yield Weight(f"{ours}.mlp_post_norm.scale", f"{theirs}.post_feedforward_layernorm.weight")
    else:
        name = "pre_ff_layernorm" if config.family == "bamba" else "post_attention_layernorm"
        yield Weight(f"{ours}.mlp_norm.scale", f"{theirs}.{name}.weight")
    if config.experts is None:
        mlp = "feed_forward" if config.family == "bamba" else "mlp"
        for name in ("gate", "up", "down"):
            yield Weight(f"{ours}.mlp.{name}.kernel", f"{theirs}.{mlp}.{name}_proj.weight", swapped=True)
        return
    if config.experts.shared_size is not None:
        yield from _shared_experts(config.experts.count, f"{ours}.mlp", f"{theirs}.mlp")
        return
    yield Weight(f"{ours}.mlp.router.kernel", f"{theirs}.mlp.router.weight", swapped=True)
    yield Weight(f"{ours}.mlp.router.bias", f"{theirs}.mlp.router.bias")
    for name in ("gate_up", "down"):
        yield Weight(f"{ours}.mlp.{name}", f"{theirs}.mlp.experts.{name}_proj")
        yield Weight(f"{ours}.mlp.{name}_bias", f"{theirs}.mlp.experts.{name}_proj_bias")


def _shared_experts(count: int, ours: str, theirs: str) -> Iterator[Weight]:
    yield Weight(f"{ours}.router.kernel", f"{theirs}.gate.weight", swapped=True)
    for name, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
        yield Weight(f"{ours}.{name}", f"{theirs}.experts.{name}_proj", swapped=True, parts=parts, experts=count)
    for name in ("gate", "up", "down"):
        yield Weight(f"{ours}.shared.{name}.kernel", f"{theirs}.shared_expert.{name}_proj.weight", swapped=True)
    yield Weight(f"{ours}.shared_gate.kernel", f"{theirs}.shared_expert_gate.weight", swapped=True)
