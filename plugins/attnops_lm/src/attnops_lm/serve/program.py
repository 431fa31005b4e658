"""The program of a step: one call of the model on the tokens of all rows, and a token drawn for each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attnops_caches import Rows
from attnops_linear import StateCache
from attnops_lm.caching import counted, with_table
from attnops_lm.generation.sampling import Sampling, sample
from attnops_lm.serve.scores import Logprobs, logprobs_of, masked, penalised

# Which hidden states of a text are its embedding: its last token's, or the mean of all.
POOLING: Final = ("last", "mean")


class StepBatch(NamedTuple):
    """The inputs of one step for R rows. An idle row has count 0."""

    tokens: Any  # int32 [N], the tokens of all rows, packed; [R] if no row has more than one
    counts: Any  # int32 [R], tokens per row
    lengths: Any  # int32 [R], tokens that the row's pages hold already
    table: Any  # int32 [R, M], the pages of each row
    temperature: Any  # float32 [R]; 0 is greedy
    top_k: Any  # int32 [R]
    top_p: Any  # float32 [R]
    seed: Any  # uint32 [R]
    index: Any  # int32 [R], how many tokens were generated before this one
    frequency: Any  # float32 [R], penalties; 0: none
    presence: Any  # float32 [R]
    generated: Any  # int32 [R, L], the tokens that rows with penalties generated, then V; L: tokens of a request
    has_logprobs: Any  # bool [R], the rows whose log-probabilities are asked for
    allowed: Any  # uint32 [R, ceil(V / 32)], a bit for each token that a row's grammar allows
    has_grammar: Any  # bool [R]


class StepResult(NamedTuple):
    """The outputs of one step for R rows."""

    tokens: Any  # int32 [R], drawn after each row's last token
    has_overflowed: Any  # bool [], whether a token had no page
    logprobs: Logprobs
    pooled: Any  # float32 [R, width], the sum of the hidden states of a row's tokens, or the last one's


def step_program(
    graph: Any, rows: int, pooling: str, traced: Callable[[], None]
) -> Callable[..., tuple[StepResult, Any]]:
    """The compiled function ``(state, caches, batch) -> result, caches``.

    Args:
        graph: the graph of the model, from `nnx.split`.
        rows: R.
        pooling: one of `POOLING`.
        traced: is called whenever the function is traced, once for each size of ``batch.tokens``.
    """

    def step(state: Any, caches: Any, batch: StepBatch) -> tuple[StepResult, Any]:
        traced()
        # Lengths and the table come from the host with every step; the tokens stay on the device.
        is_new = (batch.lengths == 0) & (batch.counts > 0)
        caches = tuple(c.reset(is_new) if isinstance(c, StateCache) else c for c in with_table(caches, batch.table))
        caches = tuple(dataclasses.replace(c, lengths=batch.lengths) for c in caches)
        ends = jnp.cumsum(batch.counts)
        if batch.tokens.shape[0] > rows:
            slots = jnp.arange(rows, dtype=jnp.int32)
            options: dict[str, Any] = {"rows": Rows(jnp.concatenate([jnp.zeros(1, ends.dtype), ends]), slots)}
            tokens, last = batch.tokens[None], jnp.maximum(ends - 1, 0)[None]
        else:
            options = {"query_lengths": batch.counts}
            tokens, last = batch.tokens[:, None], jnp.zeros((rows, 1), jnp.int32)
        out = nnx.merge(graph, state)(tokens, past_key_values=caches, logits_at=last, **options)
        keys = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(batch.seed, batch.index)
        sampling = Sampling(batch.temperature, batch.top_k, batch.top_p, jnp.zeros(rows))
        logits = out.logits.reshape(rows, -1)
        scores = penalised(logits, batch.generated, batch.frequency, batch.presence)
        drawn = sample(masked(scores, batch.allowed, batch.has_grammar), keys, sampling)
        assert out.past_key_values is not None
        has_overflowed = counted(out.past_key_values).overflowed.any()
        logprobs = logprobs_of(logits, drawn, batch.has_logprobs)
        pooled = _pooled(out.last_hidden_state, ends, last, pooling)
        return StepResult(drawn, has_overflowed, logprobs, pooled), out.past_key_values

    return jax.jit(step, donate_argnums=1)


def _pooled(hidden: jax.Array, ends: jax.Array, last: jax.Array, pooling: str) -> jax.Array:
    """Hidden states [1, N, width], packed, or [R, 1, width], as `StepResult.pooled`."""
    x = hidden.astype(jnp.float32)
    if x.shape[1] == 1:
        return x[:, 0]
    if pooling == "last":
        return x[0, last[0]]
    row = jnp.searchsorted(ends, jnp.arange(x.shape[1]), side="right")  # R for padding, which no row adds
    return jax.ops.segment_sum(x[0], row, ends.shape[0], indices_are_sorted=True)
