"""The choice of a token from scores. Temperature, top-k, top-p and min-p are arguments of one compiled program."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How rows draw tokens. Each field is one number, or one per row.

    Attributes:
        temperature: float32 [] or [B]; 0 chooses the token with the largest score.
        top_k: int32 [] or [B]; 0 for all tokens.
        top_p: float32 [] or [B]; 1 for all tokens.
        min_p: float32 [] or [B]; 0 for all tokens.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def create(
        cls, temperature: ArrayLike = 0.0, top_k: ArrayLike = 0, top_p: ArrayLike = 1.0, min_p: ArrayLike = 0.0
    ) -> Self:
        """From numbers or arrays [B]; by default the token with the largest score is chosen. The fields are NumPy
        arrays, so that nothing is compiled.
        """
        temperature, top_p, min_p = (np.asarray(x).astype(np.float32) for x in (temperature, top_p, min_p))
        return cls(temperature, np.asarray(top_k).astype(np.int32), top_p, min_p)  # type: ignore[arg-type]


def sample(scores: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token per row, int32 [B].

    Args:
        scores: float32 [B, V]; −inf for a token that must not be drawn.
        keys: [B], a key per row.
        sampling: how tokens are drawn.

    Only what some row needs is computed: greedy rows need no noise, and plain sampling needs no limits.
    """
    largest = scores.argmax(-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        temperature = _by_row(sampling.temperature)
        # Subtract the maximum first: a score divided by a small temperature may overflow float32, and lose its order.
        least = jnp.finfo(jnp.float32).tiny
        scaled = (scores - scores.max(-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1).clip(least)
        limits = (sampling.top_k > 0).any() | (sampling.top_p < 1).any() | (sampling.min_p > 0).any()
        scaled = lax.cond(limits, lambda: limited(scaled, sampling), lambda: scaled)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:], jnp.float32))(keys)
        return jnp.where(sampling.temperature > 0, (scaled + noise).argmax(-1).astype(jnp.int32), largest)

    return lax.cond((sampling.temperature > 0).any(), drawn, lambda: largest)


def limited(scores: jax.Array, sampling: Sampling) -> jax.Array:
    """Scores [B, V] with −inf for the tokens that top-k, then top-p, then min-p leave out.

    Tokens with the same score as the last one kept are kept too. There is no sort: the smallest score that is kept is
    determined bit by bit, in 32 passes over the scores.
    """
    order = _order(scores)
    k = _by_row(jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[-1]))
    least = _largest_bits(lambda t: (order >= t).sum(-1, keepdims=True) >= k, scores.shape[:-1])
    probability = jax.nn.softmax(jnp.where(order >= least, scores, -jnp.inf), axis=-1)
    p = _by_row(sampling.top_p).clip(jnp.finfo(jnp.float32).tiny)  # with 0 no token would be left

    def has_mass(t: jax.Array) -> jax.Array:
        return jnp.where(order >= t, probability, 0).sum(-1, keepdims=True) >= p

    # Because of rounding the probabilities of all tokens may sum to less than 1.
    nucleus = jnp.where(p < 1, _largest_bits(has_mass, scores.shape[:-1]), 0)
    least = jnp.maximum(least, nucleus)
    kept = (order >= least) & (probability >= _by_row(sampling.min_p) * probability.max(-1, keepdims=True))
    return jnp.where(kept, scores, -jnp.inf)


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """A key per row, [B], from one key for all rows or one per row; typed keys or uint32 ones.

    Raises:
        ValueError: there are neither one nor B keys.
    """
    typed = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    if typed.shape == (batch,):
        return typed
    if typed.shape != ():
        raise ValueError(f"prng_key has {typed.shape} keys, but must be one key, or one for each of {batch} rows")
    return jax.vmap(lambda row: jax.random.fold_in(typed, row))(jnp.arange(batch))


def _by_row(x: jax.Array) -> jax.Array:
    """An array [] or [B], such that it broadcasts to [B, V]."""
    return x[:, None] if x.ndim else x


def _order(x: jax.Array) -> jax.Array:
    """uint32 integers in the same order as the floats."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_bits(holds: object, shape: tuple[int, ...]) -> jax.Array:
    """The largest uint32 [..., 1] for which a monotone predicate holds; 0 if none does."""
    assert callable(holds)

    def bit(i: jax.Array, bits: jax.Array) -> jax.Array:
        trial = bits | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(trial), trial, bits)

    return lax.fori_loop(0, 32, bit, jnp.zeros((*shape, 1), jnp.uint32))
