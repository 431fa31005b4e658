"""The inverse of I + A for strictly lower triangular A, in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def inverse(strict: jax.Array, dot: Callable[..., jax.Array]) -> jax.Array:
    """(I + A)⁻¹ of A [C, C] float32, strictly lower triangular; C is a power of two.

    With D the inverses of the blocks on the diagonal, and E the blocks of A below the first of each two of them, the
    inverses of the blocks twice as large are D - D E D.
    """
    C = strict.shape[0]
    rows, columns = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    plain: Any = (((1,), (0,)), ((), ()))
    found = jnp.where(rows == columns, 1.0, 0.0)
    for level in range(C.bit_length() - 1):
        below = ((rows >> level) ^ (columns >> level)) == 1
        corner = jnp.where(below, strict, 0.0)
        found = found - (dot(found, dot(corner, found, plain), plain) if level else corner)
    return found
