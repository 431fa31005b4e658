"""One operation on the corpus: its agreement with the original, its time and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

import attnops
from attnops.sharding import MODE_PREFILL
from attnops_lm.sentence_embeddings.checkpoint import load_config, load_params, load_tokenizer, model_folder, tokenize
from attnops_lm.sentence_embeddings.model import EncoderAttention, EncoderConfig, EncoderParams, SentenceTokens, embed

# The largest difference, in any coordinate of any embedding, that rounding may explain. The original in float32 differs
# by 1.6e-7 from itself in float64, and this model on a CPU by 2.5e-7 from the original. The smallest mistakes that were
# tried: q, k and v rounded to TF32 6e-5, the tanh GELU 4e-4, attention in bfloat16 6e-4, no padding mask 2e-1.
TOLERANCE = 5e-6

# An encoder at inference: all its tokens at once, no gradient. An operation that can't serve this model must raise:
# otherwise the figures of the native forward would be shown under its name.
METADATA = attnops.OperationMetadata(mode=MODE_PREFILL, on_unsupported="error")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """All that `embed` needs except the attention."""

    config: EncoderConfig
    params: EncoderParams
    tokenizer: Tokenizer

    def jit(self, attention: EncoderAttention) -> jax.stages.Wrapped:
        """`embed` with this attention, compiled once per shape: (params, tokens [B, T]) -> [B, M]."""
        return jax.jit(lambda params, tokens: embed(params, self.config, tokens, attention))

    def tokenize(self, sentences: Sequence[str]) -> SentenceTokens:
        """Sentences -> tokens [B, T], padded to the longest."""
        return tokenize(self.tokenizer, sentences)


class SentenceBatch(NamedTuple):
    """Some sentences of the corpus."""

    rows: np.ndarray  # [B], the indices of the sentences
    tokens: SentenceTokens  # [B, T]


@dataclass(frozen=True, kw_only=True)
class EncoderMeasurement:
    """The result of one operation. Times and memory are of the last batch, which has the longest sentences."""

    embeddings: np.ndarray  # of all batches, [at least N, M]
    max_difference: float  # from the reference, over all coordinates
    min_cosine: float  # of an embedding with its reference
    batch_shape: tuple[int, int]  # B, T
    compile_seconds: float  # tracing included
    batch_seconds: float  # median
    temp_bytes: int | None  # XLA's allocation in addition to arguments and results; None where unknown

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference. NaN does not agree."""
        return self.max_difference <= TOLERANCE


def create_attention(name: str) -> EncoderAttention:
    """The installed operation of this name; `UnsupportedError` if it is not attention over query, key and value."""
    operation = attnops.OperationRegistry.create(name, METADATA)
    if not isinstance(operation, attnops.OperationImpl):
        raise attnops.UnsupportedError(f"{type(operation).__name__} needs more arguments than query, key and value")
    return operation


def load_model() -> Encoder:
    """Load the model from the installed weights; `MissingWeightsError` says what to install."""
    folder = model_folder()
    config = load_config(folder)
    return Encoder(config=config, params=load_params(folder), tokenizer=load_tokenizer(folder, config))


def make_batches(model: Encoder, sentences: Sequence[str], long: int = 8) -> list[SentenceBatch]:
    """Two batches, since a program is compiled for each: all other sentences, then the ``long`` longest ones."""
    order = np.argsort(model.tokenize(sentences).mask.sum(axis=1), kind="stable")
    return [
        SentenceBatch(rows, model.tokenize([sentences[row] for row in rows])) for rows in (order[:-long], order[-long:])
    ]


def measure(
    attention: EncoderAttention,
    model: Encoder,
    batches: Sequence[SentenceBatch],
    reference: np.ndarray,
    *,
    repeats: int = 3,
    on_batch: Callable[[], Any] = lambda: None,
) -> EncoderMeasurement:
    """Embed every batch with `attention`, compare the first N sentences with the reference [N, M], and time the last.

    `on_batch` is called after each batch. Exceptions of the attention are not caught.
    """
    forward = model.jit(attention)
    N, M = reference.shape
    embeddings = np.full((sum(len(batch.rows) for batch in batches), M), np.nan, reference.dtype)
    for batch in batches:
        start = time.perf_counter()
        compiled = forward.lower(model.params, batch.tokens).compile()
        compile_seconds = time.perf_counter() - start
        embeddings[batch.rows] = compiled(model.params, batch.tokens)
        on_batch()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        compiled(model.params, batch.tokens).block_until_ready()
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    B, T = batch.tokens.ids.shape
    return EncoderMeasurement(
        embeddings=embeddings,
        max_difference=float(np.abs(embeddings[:N] - reference).max()),
        min_cosine=_cosines(embeddings[:N], reference).min().item(),
        batch_shape=(B, T),
        compile_seconds=compile_seconds,
        batch_seconds=statistics.median(seconds),
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row: [N, M] and [N, M] -> [N] float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosines: np.ndarray = (a * b).sum(axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    return cosines
