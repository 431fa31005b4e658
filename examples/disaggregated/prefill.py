"""The process that computes prompts: it answers a prompt with its first token, and its keys and values by layer."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnops_caches import CacheRows

CHUNK = 32  # prompts are padded to multiples of it, so that few programs are compiled


class Prefill:
    """Computes prompts of at most ``max_length`` tokens, one at a time."""

    def __init__(self, model: Any, max_length: int) -> None:
        self.max_length, self.lock = max_length, threading.Lock()
        graph, self.state = nnx.split(model)

        def compute(state: Any, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, tuple[CacheRows, ...]]:
            model, T = nnx.merge(graph, state), tokens.shape[1]
            out = model(
                tokens, past_key_values=model.init_cache(1, T), query_lengths=count, logits_at=count[:, None] - 1
            )
            return out.logits[0, 0].argmax(), tuple(cache.take([0]) for cache in out.past_key_values)

        self.compute = jax.jit(compute)

    def __call__(self, tokens: list[int]) -> bytes:
        """The first token and the rows of all layers, as bytes."""
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(f"{len(tokens)} tokens must be from 1 to {self.max_length}")
        padded = jnp.asarray([tokens + [0] * (-len(tokens) % CHUNK)])
        with self.lock:
            token, rows = self.compute(self.state, padded, jnp.asarray([len(tokens)]))
        return to_bytes(int(token), rows)


def to_bytes(token: int, rows: tuple[CacheRows, ...]) -> bytes:
    """A token and rows; before each row, how many bytes it has."""
    parts = [x.to_bytes(multiple=CHUNK) for x in rows]
    return token.to_bytes(8, "big") + b"".join(len(x).to_bytes(8, "big") + x for x in parts)


def from_bytes(data: bytes) -> tuple[int, tuple[CacheRows, ...]]:
    """The inverse of `to_bytes`; raises a `ValueError` where the bytes are cut."""
    token, at, rows = int.from_bytes(data[:8], "big"), 8, []
    while at < len(data):
        size, at = int.from_bytes(data[at : at + 8], "big"), at + 8
        rows.append(CacheRows.from_bytes(data[at : at + size]))
        at += size
    return token, tuple(rows)
