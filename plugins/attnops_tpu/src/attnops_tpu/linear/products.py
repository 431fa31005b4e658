"""Products of float32 matrices by a matrix unit that multiplies bfloat16 numbers.

A float32 number is the sum of three bfloat16 numbers, so that a product is the sum of products of parts, of which those
that are less than a rounding error are left out. A bfloat16 matrix is its own only part: its products need fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

# Contracted axes of both operands.
PLAIN: Final = (1, 0)
BY_ROWS: Final = (1, 1)
BY_COLUMNS: Final = (0, 0)


def parts(x: jax.Array, count: int) -> list[jax.Array]:
    """``count`` bfloat16 matrices with the sum ``x``, the largest first; 3 give all bits of float32."""
    found = []
    for i in range(count):
        found.append(x.astype(jnp.bfloat16))
        if x.dtype == jnp.bfloat16:
            break
        if i + 1 < count:
            x = x - found[-1].astype(jnp.float32)
    return found


def product(a: Sequence[jax.Array], b: Sequence[jax.Array], count: int, axes: tuple[int, int] = PLAIN) -> jax.Array:
    """The product of two matrices, float32.

    Args:
        a: the `parts` of the first.
        b: those of the second.
        count: of products of parts i and j, those with i + j < count are added.
        axes: the contracted axes.
    """
    along = 1 - axes[0]
    if len(a) == 1:
        # One product of more terms adds them up.
        b = b[:count]
        a, b = [jnp.concatenate([a[0]] * len(b), axis=axes[0])], [jnp.concatenate(b, axis=axes[1])]
    dimensions: Any = (((axes[0],), (axes[1],)), ((), ()))
    size, total = a[0].shape[along], None
    for j, part in reversed(list(enumerate(b[:count]))):
        # Those with one right operand are a single product of more rows.
        rows = jnp.concatenate(a[: count - j], axis=along) if len(a) > 1 else a[0]
        # Whatever precision is in force: Mosaic has no other for bfloat16.
        found = lax.dot_general(
            rows, part, dimensions, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )
        for i in reversed(range(found.shape[0] // size)):
            term = found[i * size : (i + 1) * size]
            total = term if total is None else total + term
    assert total is not None
    return total


def products(
    left: Sequence[tuple[Sequence[jax.Array], int]], b: Sequence[jax.Array], axes: tuple[int, int] = BY_ROWS
) -> list[jax.Array]:
    """The products of several matrices with one, whose parts are moved to the matrix unit once; float32.

    Args:
        left: of each, its `parts` and the ``count`` of `product`. Rows are not contracted.
        b: the parts of the right operand.
        axes: the contracted axes.
    """
    dimensions: Any = (((axes[0],), (axes[1],)), ((), ()))
    totals: list[jax.Array | None] = [None] * len(left)
    for j, part in reversed(list(enumerate(b[: max(count for _, count in left)]))):
        used = [(n, x) for n, (a, count) in enumerate(left) for x in reversed(a[: max(0, count - j)])]
        rows, start = jnp.concatenate([x for _, x in used], axis=0), 0
        found = lax.dot_general(
            rows, part, dimensions, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )
        for n, x in used:
            term, start, total = found[start : start + x.shape[0]], start + x.shape[0], totals[n]
            totals[n] = term if total is None else total + term
    return [x for x in totals if x is not None]
