"""Text that a trained model writes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .attention import Attention
from .model import Config, Params, logits
from .packing import END, PackedRows


def generate(params: Params, config: Config, attention: Attention, prompt: str, count: int) -> str:
    """``prompt`` and up to ``count`` more bytes, each the most probable one, until the document ends.

    Each byte needs a pass over all bytes, without a cache: good for a line or two.
    """
    start = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    tokens = jnp.asarray(np.pad(start, (0, count)))[None]  # [1, T]
    written = bytes(np.asarray(_continue(params, tokens, len(start), config, attention))[0].astype(np.uint8))
    return written.partition(bytes([END]))[0].decode(errors="replace")


@functools.partial(jax.jit, static_argnames=("start", "config", "attention"))
def _continue(params: Params, tokens: jax.Array, start: int, config: Config, attention: Attention) -> jax.Array:
    """Tokens [1, T], of which the first ``start`` are given, to [1, T]. No token sees those after it."""
    one_document = jnp.zeros_like(tokens)
    positions = jnp.arange(tokens.shape[1])[None]

    def write(i: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = PackedRows(tokens=tokens, segments=one_document, positions=positions, predicts=None)
        scores = logits(params, config, rows, attention)[:, i - 1]
        return tokens.at[:, i].set(scores.argmax(axis=-1).astype(tokens.dtype))

    written: jax.Array = jax.lax.fori_loop(start, tokens.shape[1], write, tokens)
    return written
