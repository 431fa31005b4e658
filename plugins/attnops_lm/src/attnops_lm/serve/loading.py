"""Loads a model and its tokenizer for the server."""

from __future__ import annotations

from attnops_lm.gguf_file import load_smollm2
from attnops_lm.model import CausalLM
from attnops_lm.tokenizer import Tokenizer


def load_model(checkpoint: str | None, operation: str) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer, from a directory in Hugging Face's format; None: SmolLM2-135M-Instruct.

    Raises:
        FileNotFoundError: the directory lacks a file, such as the tokenizer.
        ModuleNotFoundError: SmolLM2 is not installed.
        ValueError: the model's type is not supported, or its weights do not fit the config.
    """
    if checkpoint is None:
        return load_smollm2(operation=operation)
    tokenizer = Tokenizer.from_pretrained(checkpoint)  # first: weights take long to read
    model = CausalLM.from_pretrained(checkpoint, operation=operation)
    tokenizer.eos_ids = model.config.eos_token_ids or tokenizer.eos_ids
    return model, tokenizer
