"""Loads a model and its tokenizer for the server."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax

from attnops.sharding import create_mesh
from attnops_lm.checkpoint import config_of_directory
from attnops_lm.dtypes import floating
from attnops_lm.gguf_file import config_of_gguf, load_gguf, smollm2_path
from attnops_lm.model import CausalLM
from attnops_lm.quantize import QuantizationConfig
from attnops_lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from attnops_lm.config import Config

_log = logging.getLogger(__name__)
# What `--quantize` may be. With 4 bits, one scale for all inputs of an output is too coarse.
QUANTIZED: Final = {"int8": QuantizationConfig(bits=8), "int4": QuantizationConfig(bits=4, group=32)}
# The axes of `--mesh`: rows and tokens are not sharded, since they share pages.
AXES: Final = ("tp", "ep")


def load_model(
    checkpoint: str | None,
    operation: str,
    dtype: str = "float32",
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer.

    Args:
        checkpoint: a directory in Hugging Face's format, or a GGUF file; None: SmolLM2-135M-Instruct.
        operation: the name of the attention operation.
        dtype: of weights, keys, values and the computation, floating-point of at least 16 bits.
        quantize: how the weights of linear layers are stored, one of `QUANTIZED`; None: they have ``dtype``. The
            embedding and the head keep it.
        mesh: the mesh over which weights and caches are sharded, with axes of `attnops_lm.sharding.DEFAULT_RULES`;
            None: one device.

    Raises:
        FileNotFoundError: the directory lacks a file, such as the tokenizer.
        ModuleNotFoundError: SmolLM2, or qwix for ``quantize``, is not installed.
        ValueError: the model's type is not supported, its weights do not fit the config, ``dtype`` or ``quantize`` is
            unknown, a layer's inputs can't be quantised in groups, or the mesh is for experts that the model lacks.
    """
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"quantize={quantize!r} must be one of {', '.join(QUANTIZED)}")
    options: dict[str, Any] = {"operation": operation, "dtype": _dtype(dtype)}
    path = smollm2_path() if checkpoint is None else Path(checkpoint)
    is_gguf = path.is_file()
    tokenizer = None if is_gguf else Tokenizer.from_pretrained(path)  # first: weights take long to read
    if mesh is not None:
        check_mesh(config_of_gguf(path) if is_gguf else config_of_directory(path), mesh)
    if tokenizer is None:
        model, tokenizer = load_gguf(path, mesh=mesh, **options)
    else:
        model = CausalLM.from_pretrained(path, mesh=mesh, **options)
        tokenizer.eos_ids = model.config.eos_token_ids or tokenizer.eos_ids
    if quantize is not None:
        model = model.quantize(QUANTIZED[quantize])
        model = model if mesh is None else model.shard_model(mesh=mesh)
    return model, tokenizer


def _dtype(name: str) -> Any:
    try:
        return floating("dtype", name)
    except TypeError as error:
        raise ValueError(f"dtype={name!r} is no dtype; use float32, bfloat16 or float16") from error


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raise `ValueError` if a mesh is for experts that a model lacks; warn if its pages can't be shared."""
    tp, ep = (mesh.shape.get(name, 1) for name in AXES)
    if ep > 1 and config.experts is None:
        raise ValueError(f"ep={ep} must be 1 for a model without experts; leave it out of the mesh, or use tp")
    if config.num_kv_heads % tp:
        _log.warning(
            "num_kv_heads=%d is not divisible by tp=%d: each device holds the keys and values of all heads; use a "
            "divisor to share them",
            config.num_kv_heads,
            tp,
        )


def parse_mesh(text: str) -> Mesh:
    """The mesh of ``"tp=4"`` or ``"ep=2,tp=4"``, over the first devices.

    Raises:
        ValueError: the text is none of this form, an axis is unknown or given twice, or there are too few devices.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES or name in axes or not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r} must be axes and their sizes, such as 'tp=4' or 'ep=2,tp=4', each once and one of "
                f"{', '.join(AXES)}"
            )
        axes[name] = int(size)
    needed, devices = math.prod(axes.values()), jax.devices()
    if needed > len(devices):
        raise ValueError(f"mesh={text!r} needs {needed} devices, but JAX has {len(devices)} of {devices[0].platform}")
    return create_mesh(tuple(axes.values()), tuple(axes), devices=devices[:needed])
