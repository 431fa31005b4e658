"""The inverse of I + A for strictly lower triangular matrices A, in a kernel.

Two heads lie side by side in the lanes: [64, 128]. The blocks of 32 tokens on the diagonals are inverted by substitution,
in float32 and all at a time, and the block below the first of two by two products, for four heads at a time.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.linear.products import parts, product

_BLOCK: Final = 32
_LANES: Final = 128


def inverses(strict: list[jax.Array], count: int) -> list[jax.Array]:
    """(I + A)⁻¹ of each A, float32 [64, 128] of two heads; ``count`` is that of `attnops_tpu.linear.products.product`."""
    blocks = [_substituted(jnp.where(_is_first(), x[:_BLOCK], x[_BLOCK:])) for x in strict]
    found = []
    for i in range(0, len(strict), 2):
        found += _completed(strict[i : i + 2], blocks[i : i + 2], count)
    return found


def _lanes() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (_BLOCK, _LANES), 1)


def _is_first() -> jax.Array:
    """Whether a lane belongs to the first block of its head."""
    return _lanes() & _BLOCK == 0


def _substituted(strict: jax.Array) -> jax.Array:
    """The inverses of the four blocks of [32, 128]: row by row, the rows after it are reduced by it."""
    lanes, rows = _lanes(), lax.broadcasted_iota(jnp.int32, (_BLOCK, _LANES), 0)
    found = jnp.where(lanes & (_BLOCK - 1) == rows, 1.0, 0.0)
    done = []
    for j in range(_BLOCK - 1):
        # Registers of 8 rows that no later row changes are complete.
        first = (j + 1) // 8 * 8
        skipped = first - (_BLOCK - found.shape[0])
        row = found[j - (_BLOCK - found.shape[0])][None]
        if skipped:
            done.append(found[:skipped])
            found = found[skipped:]
        column = jnp.take_along_axis(strict[first:], (lanes[first:] & -_BLOCK) + j, axis=1)
        found = found - column * row
    return jnp.concatenate([*done, found], axis=0)


def _completed(strict: list[jax.Array], blocks: list[jax.Array], count: int) -> list[jax.Array]:
    """The inverses of one or two pairs of heads."""
    first = _is_first()

    def joined(a: list[jax.Array], shift: tuple[int, int]) -> jax.Array:
        """Blocks of the first pair in the lanes of first blocks, and of the second pair in the others."""
        shifted = [pltpu.roll(x, s, 1) if s else x for x, s in zip((a[0], a[-1]), shift, strict=True)]
        return jnp.where(first, *shifted)

    def on_diagonal(x: jax.Array) -> list[jax.Array]:
        group = _lanes() >> (_BLOCK.bit_length() - 1)
        return parts(jnp.concatenate([jnp.where(group == i, x, 0.0) for i in range(_LANES // _BLOCK)], axis=0), count)

    below = joined([x[_BLOCK:] for x in strict], (0, _BLOCK))
    corner = product(parts(below, count), on_diagonal(joined(blocks, (0, _BLOCK))), count)
    corner = product(parts(joined(blocks, (_LANES - _BLOCK, 0)), count), on_diagonal(corner), count)
    corners = corner, pltpu.roll(corner, _LANES - _BLOCK, 1)
    return [
        jnp.concatenate([jnp.where(first, x, 0.0), jnp.where(first, -c, x)], axis=0)
        for x, c in zip(blocks, corners, strict=False)
    ]
