"""The arguments and results of a compiled step: the rows being generated, and the rules for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from attnops_lm.caching import LayerCache
from attnops_lm.generation.sampling import Sampling, row_keys, sample

# (tokens int32 [B, S] by index, −1 where there is none; scores float32 [B, V]; lengths int32 [B]) -> scores [B, V].
# Tokens of a row after its length are undefined.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerationRows:
    """B sequences being generated. The last token of each is not in the caches yet.

    Attributes:
        caches: one per layer.
        tokens: by their index in the caches, int32 [B, S]; −1 if the token is not known.
        lengths: the lengths of ``tokens``, int32 [B].
        first: the index of the first generated token, int32 [B].
        finished: whether a row has ended, bool [B].
        keys: a random key per row, [B].
        drafted: the number of tokens that were drafted, int32 [B].
        accepted: the number of drafted tokens that were right, int32 [B].
        steps: the number of calls of the model, int32 [].
    """

    caches: tuple[LayerCache, ...]
    tokens: jax.Array
    lengths: jax.Array
    first: jax.Array
    finished: jax.Array
    keys: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    steps: jax.Array

    @classmethod
    def create(
        cls, caches: tuple[LayerCache, ...], tokens: ArrayLike, lengths: ArrayLike, key: jax.Array | None
    ) -> Self:
        """Rows before the first step. ``key`` is one for all rows or one per row; None if no tokens are drawn."""
        return cls(caches, *_first(tokens, lengths, key))

    def last(self) -> jax.Array:
        """The last token of each row, int32 [B, 1]."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)


@jax.jit
def _first(tokens: jax.Array, lengths: jax.Array, key: jax.Array | None) -> tuple[jax.Array, ...]:
    """The fields of `GenerationRows` after the caches, in one program; each needs a separate buffer, since all are
    donated.
    """
    zeros = jnp.zeros_like(lengths)
    keys = jax.random.clone(row_keys(jax.random.key(0) if key is None else key, len(lengths)))
    return tokens, lengths, lengths + 0, zeros.astype(bool), keys, zeros + 0, zeros + 0, jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """What may differ between calls of one program.

    Attributes:
        sampling: how tokens are drawn.
        penalty: float32 [], the repetition penalty; 1 for none.
        least: int32 [], the fewest tokens before an end token.
        most: int32 [], the most generated tokens per row.
        ends: int32 [E], the end tokens.
    """

    sampling: Sampling
    penalty: jax.Array
    least: jax.Array
    most: jax.Array
    ends: jax.Array

    def is_end(self, tokens: jax.Array) -> jax.Array:
        """Whether tokens end their row, bool of their shape."""
        return (tokens[..., None] == self.ends).any(-1)

    def processed(
        self, scores: jax.Array, tokens: jax.Array, lengths: jax.Array, first: jax.Array,
        processor: LogitsProcessor | None,
    ) -> jax.Array:  # fmt: skip
        """Scores [B, V] after the penalty and the caller's processor, with −inf for end tokens that would come too
        early.
        """

        def penalised(scores: jax.Array) -> jax.Array:
            is_token = jnp.arange(tokens.shape[1]) < lengths[:, None]
            row = jnp.arange(tokens.shape[0])[:, None]
            ids = jnp.where(is_token & (tokens >= 0), tokens, scores.shape[1])
            seen = jnp.zeros(scores.shape, bool).at[row, ids].set(True, mode="drop")
            return jnp.where(seen, jnp.where(scores > 0, scores / self.penalty, scores * self.penalty), scores)

        def without_ends(scores: jax.Array) -> jax.Array:
            early = (lengths - first < self.least)[:, None]
            ends = jnp.zeros(scores.shape[1], bool).at[self.ends].set(True, mode="drop")
            return jnp.where(early & ends, -jnp.inf, scores)

        scores = lax.cond(self.penalty != 1, penalised, lambda scores: scores, scores)
        if processor is not None:
            scores = processor(tokens, scores, lengths)
        return lax.cond(self.least > 0, without_ends, lambda scores: scores, scores)

    def pick(
        self,
        scores: jax.Array,
        rows: GenerationRows,
        tokens: jax.Array,
        lengths: jax.Array,
        processor: LogitsProcessor | None,
    ) -> jax.Array:
        """The token after the first ``lengths[b]`` of each row, int32 [B]. It does not depend on the steps that led
        there.
        """
        scores = self.processed(scores, tokens, lengths, rows.first, processor)
        keys = jax.vmap(jax.random.fold_in)(rows.keys, lengths - rows.first)
        return sample(scores, keys, self.sampling)


def write(tokens: jax.Array, new: jax.Array, at: jax.Array, count: jax.Array) -> jax.Array:
    """Tokens [B, S] with the first ``count[b]`` of new [B, W] from index ``at[b]`` on."""
    place = jnp.arange(new.shape[1])
    index = jnp.where(place < count[:, None], at[:, None] + place, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(new, mode="drop")
