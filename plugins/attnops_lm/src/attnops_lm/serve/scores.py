"""Penalties, masks of grammars and log-probabilities of a step's logits, for requests that ask for them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_LIKELY = 20  # the most tokens per position whose log-probabilities a request can ask for


class Logprobs(NamedTuple):
    """Log-probabilities at the last token of each row; zeros if no row asks for them.

    Attributes:
        sampled: float32 [R], of the token that was drawn.
        ids: int32 [R, K], the most likely tokens, the most likely first; K is `MOST_LIKELY`, at most the vocabulary.
        values: float32 [R, K], of these tokens.
    """

    sampled: jax.Array
    ids: jax.Array
    values: jax.Array


def logprobs_of(logits: jax.Array, tokens: jax.Array, is_asked: jax.Array) -> Logprobs:
    """The logarithms of the model's probabilities, before penalties, temperature, top-k and top-p.

    Args:
        logits: float32 [R, V].
        tokens: int32 [R], the tokens that were drawn.
        is_asked: bool [R], the rows that ask for them; nothing is computed if none does.
    """
    most = min(MOST_LIKELY, logits.shape[-1])

    def computed() -> Logprobs:
        logs = jax.nn.log_softmax(logits)
        values, ids = lax.top_k(logs, most)
        return Logprobs(jnp.take_along_axis(logs, tokens[:, None], -1)[:, 0], ids, values)

    shapes = jax.eval_shape(computed)
    return lax.cond(is_asked.any(), computed, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def penalised(logits: jax.Array, generated: jax.Array, frequency: jax.Array, presence: jax.Array) -> jax.Array:
    """Logits less ``frequency`` for each time that a token was generated, and ``presence`` once if it was.

    The formula of OpenAI's API, in which tokens of the prompt don't count; nothing is computed if all are 0.

    Args:
        logits: float32 [R, V].
        generated: int32 [R, L], the tokens that each row generated; V where there are fewer.
        frequency: float32 [R].
        presence: float32 [R].
    """

    def computed() -> jax.Array:
        rows = jnp.arange(logits.shape[0])[:, None]
        counts = jnp.zeros_like(logits).at[rows, generated].add(1, mode="drop")
        return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)

    return lax.cond(((frequency != 0) | (presence != 0)).any(), computed, lambda: logits)


def masked(logits: jax.Array, allowed: jax.Array, has_grammar: jax.Array) -> jax.Array:
    """Logits, −inf for tokens that a row's grammar does not allow; nothing is computed if no row has a grammar.

    Args:
        logits: float32 [R, V].
        allowed: uint32 [R, ceil(V / 32)], a bit per token, the lowest first.
        has_grammar: bool [R]; other rows stay as they are.
    """

    def computed() -> jax.Array:
        bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        is_allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[-1]] == 1
        return jnp.where(is_allowed | ~has_grammar[:, None], logits, -jnp.inf)

    return lax.cond(has_grammar.any(), computed, lambda: logits)
