"""A small random model for tests, and a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from attnops_lm.families import config_from_hf
from attnops_lm.model import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8},
}  # fmt: skip


def small(family: str = "llama", operation: str = "flash", seed: int = 0, **changes: Any) -> CausalLM:
    """A model with two layers, a vocabulary of 96 and random weights, whose logits have a magnitude of about 3.

    Args:
        family: "llama"; "mistral", with a window of 8 in every layer; "gemma2", with one in every other layer;
            "gpt_oss", with sinks; "qwen3_next" or "bamba", with a gated delta rule or Mamba-2 in the
            first layer.
        operation: the name of the attention operation.
        seed: the seed of the weights.
        **changes: fields of a Hugging Face config.
    """
    hf = {"model_type": family} | SIZES | _FAMILIES[family] | changes
    model = CausalLM(config_from_hf(hf), operation, rngs=nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    # Larger weights, so that greedy choices have no near ties, and attention affects them.
    state = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, state)
    return nnx.merge(graphdef, state)


class Characters:
    """A tokenizer with one token per character; the ids start with 0 for the space."""

    eos_ids: Sequence[int] = ()
    special_ids: Sequence[int] = ()
    template: str | None = None
    tool_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(x) - 32 for x in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(32 + x) for x in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> str:
        return f"{tools or ''}" + "".join(f"<{x['role']}>{x.get('tool_calls', '')}{x['content']}" for x in messages)
