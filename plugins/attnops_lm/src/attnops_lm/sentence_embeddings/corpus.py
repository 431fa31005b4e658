"""The sentences of `sentences.txt`, and the original model's embeddings of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SENTENCES = Path(__file__).with_name("sentences.txt")
REFERENCE = Path(__file__).with_name("reference.npz")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The original model's embeddings of `load_sentences()`, in that order; `make_reference.py` writes them."""

    embeddings: np.ndarray  # [N, M] float32: transformers and torch in float32, one sentence at a time, unpadded
    num_tokens: np.ndarray  # [N] int32: tokens per sentence by the original's tokenizer, truncated
    rounding_error: float  # max |difference| of `embeddings` from the same model's in float64
    note: str  # the versions of the packages that computed it


def load_sentences() -> list[str]:
    """The N sentences, one per line."""
    return SENTENCES.read_text(encoding="utf-8").splitlines()


def load_reference() -> Reference:
    """Read `reference.npz`; `ValueError` if it was made from other sentences."""
    with np.load(REFERENCE, allow_pickle=False) as arrays:
        if str(arrays["sentences_sha256"]) != sentences_digest():
            raise ValueError(f"{SENTENCES.name} has changed since {REFERENCE.name} was made: run make_reference.py")
        return Reference(
            embeddings=arrays["embeddings"],
            num_tokens=arrays["num_tokens"],
            rounding_error=float(arrays["rounding_error"]),
            note=str(arrays["note"]),
        )


def sentences_digest() -> str:
    """SHA-256 of the sentences, the same for all line endings; `reference.npz` stores it."""
    return hashlib.sha256("\n".join(load_sentences()).encode()).hexdigest()
