"""Products of decays over the tokens of a chunk, without a sum that cancels and without an exponential that overflows.

The product of the decays of tokens j + 1 … i is exp(g_i - g_j), g the cumulative sums of their logarithms. Float32 sums
of large numbers would leave a difference of 0.06 where it must be 0; so each logarithm is a multiple of 1/1024, whose
sums over a chunk are exact, and a remainder, whose sums are small. A decay below the smallest float32 number empties
the state: it is counted, not summed, so that minus infinity is as good as any number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# exp(-193) times the largest float32 is less than half of the smallest one.
EMPTIES: Final = -193.0
# Sums of 64 multiples of 1/1024 from -193 to 193 have 24 bits. A traced decay may be larger, and is infinite as 193 is.
_GRID: Final = 1024.0
# Half of the tokens of a chunk with decays by head, all of one by channel.
CHUNK: Final = 16


class Sums(NamedTuple):
    """Cumulative sums over a chunk's tokens, [..., C, 1] or [..., C, D].

    Attributes:
        coarse: of the multiples of 1/1024, float32, exact.
        fine: of the remainders, float32.
        resets: the number of tokens, up to this one, before which the state is emptied, int32.
    """

    coarse: jax.Array
    fine: jax.Array
    resets: jax.Array

    def tokens(self, first: int, last: int) -> Sums:
        """Those of the tokens first … last - 1."""
        return Sums(*(x[..., first:last, :] for x in self))

    def spread(self, axis: int) -> Sums:
        """With a new axis of size 1."""
        return Sums(*(jnp.expand_dims(x, axis) for x in self))


def cumulative(decay: jax.Array, starts: jax.Array | None) -> Sums:
    """The sums of ``decay`` [..., C, 1] or [..., C, D], float32, with C at most 64.

    Args:
        decay: natural logarithms.
        starts: bool, broadcasts to ``decay``: whether the state is emptied before the token.
    """
    empties = decay < EMPTIES
    if starts is not None:
        empties = empties | starts
    kept = jnp.where(empties, 0.0, jnp.minimum(decay, -EMPTIES))
    coarse = lax.stop_gradient(jnp.round(kept * _GRID) / _GRID)
    return Sums(
        jnp.cumsum(coarse, axis=-2), jnp.cumsum(kept - coarse, axis=-2), jnp.cumsum(empties.astype(jnp.int32), axis=-2)
    )


def before(sums: Sums, token: int) -> Sums:
    """The sums before a token, [..., 1, d]: 0 before the first."""
    if token == 0:
        return Sums(*(jnp.zeros_like(x[..., :1, :]) for x in sums))
    return sums.tokens(token - 1, token)


def product(later: Sums, earlier: Sums, where: jax.Array | None = None) -> jax.Array:
    """The products of the decays after the tokens of ``earlier`` up to those of ``later``; 0 unless ``where``."""
    keeps = later.resets == earlier.resets
    if where is not None:
        keeps = keeps & where
    logarithm = (later.coarse - earlier.coarse) + (later.fine - earlier.fine)
    return jnp.exp(jnp.where(keeps, logarithm, -jnp.inf))
