"""The inverse of I + A for strictly lower triangular matrices A, in a kernel.

Two heads lie side by side in the lanes: [64, 128]. The blocks of 16 tokens on the diagonals are inverted by
substitution, in float32 and eight at a time. The block below the first of two is found by two products, for four heads
at a time.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.linear.plan import LANES
from attnops_tpu.linear.products import parts, product

_CHUNK: Final = 64
_BLOCK: Final = 16


def inverses(strict: list[jax.Array], count: int) -> list[jax.Array]:
    """(I + A)⁻¹ of each A, float32 [64, 128] of two heads; ``count`` is that of `products.product`."""
    found = [_substituted(_rows(x, _BLOCK, 0, _BLOCK)) for x in strict]
    fours = [slice(i, i + 2) for i in range(0, len(strict), 2)]
    for size in (_BLOCK, 2 * _BLOCK):
        # Of both blocks on the diagonal and the one below the first, (second)⁻¹ · below · (first)⁻¹; products of a kind
        # are next to each other, see `attnops_tpu.linear.forward`.
        below = [_rows(x, size, size, 2 * size) for x in strict]
        joined = [_joined(below[four], (0, size)) for four in fours]
        joined = [_product(x, _joined(found[four], (0, size)), count) for x, four in zip(joined, fours, strict=True)]
        joined = [_product(_joined(found[four], (-size, 0)), x, count) for x, four in zip(joined, fours, strict=True)]
        corners = [y for x in joined for y in (x, pltpu.roll(x, LANES - size, 1))]
        is_first = _lanes(size) & size == 0
        found = [
            jnp.concatenate([jnp.where(is_first, x, 0.0), jnp.where(is_first, -corner, x)], axis=0)
            for x, corner in zip(found, corners, strict=False)
        ]
    return found


def _joined(pairs: list[jax.Array], shifts: tuple[int, int]) -> jax.Array:
    """[size, 128] of two pairs of heads, blocks of ``size`` lanes in turn; one pair stands for two."""
    size = pairs[0].shape[0]
    shifted = [pltpu.roll(x, n % LANES, 1) if n else x for x, n in zip((pairs[0], pairs[-1]), shifts, strict=True)]
    return jnp.where(_lanes(size) & size == 0, shifted[0], shifted[1])


def _product(a: jax.Array, b: jax.Array, count: int) -> jax.Array:
    """The products of blocks of [size, 128]."""
    size = a.shape[0]
    block = _lanes(size) >> (size.bit_length() - 1)
    on_diagonal = jnp.concatenate([jnp.where(block == i, b, 0.0) for i in range(LANES // size)], axis=0)
    return product(parts(a, count), parts(on_diagonal, count), count)


def _lanes(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size, LANES), 1)


def _rows(x: jax.Array, size: int, offset: int, period: int) -> jax.Array:
    """[size, 128]: of a lane in the n-th ``period`` lanes of a head, ``size`` rows from row n · period + offset on."""
    found, place = x[offset : offset + size], _lanes(size) & (_CHUNK - 1)
    for start in range(period, _CHUNK, period):
        found = jnp.where(place >= start, x[start + offset : start + offset + size], found)
    return found


def _substituted(strict: jax.Array) -> jax.Array:
    """The inverses of the eight blocks of [16, 128]: the rows after each row are reduced by it."""
    lanes, rows = _lanes(_BLOCK), lax.broadcasted_iota(jnp.int32, (_BLOCK, LANES), 0)
    found, first, done = jnp.where(lanes & (_BLOCK - 1) == rows, 1.0, 0.0), 0, []
    for j in range(_BLOCK - 1):
        row = found[j - first : j - first + 1]
        # Registers of 8 rows that no later row changes are complete.
        if skipped := (j + 1) // 8 * 8 - first:
            done.append(found[:skipped])
            first, found = first + skipped, found[skipped:]
        found = found - jnp.take_along_axis(strict[first:], (lanes[first:] & -_BLOCK) + j, axis=1) * row
    return jnp.concatenate([*done, found], axis=0)
