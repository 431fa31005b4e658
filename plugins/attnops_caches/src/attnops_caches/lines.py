"""Lines: F consecutive tokens side by side, their keys first and their values after them.

Where D does not fill the 128 lanes of a TPU's registers, tokens that share a line do, and a matrix unit that takes in a
line multiplies F keys at once. A line of tokens with values is [F · D keys, F · Dv values]; of latent content F · D.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def to_lines(x: jax.Array, F: int, D: int) -> jax.Array:
    """Tokens [..., n, d] as lines [..., n / F, F · d]; d is that of a key, of D features, and of a value after it."""
    lines = [_side_by_side(some, F) for some in (x[..., :D], x[..., D:]) if some.shape[-1]]
    return lines[0] if len(lines) == 1 else jnp.concatenate(lines, axis=-1)


def from_lines(x: jax.Array, F: int) -> jax.Array:
    """Keys or values of lines [..., n / F, F · d], as [..., n, d]."""
    return x if F == 1 else x.reshape(*x.shape[:-2], x.shape[-2] * F, x.shape[-1] // F)


def _side_by_side(x: jax.Array, F: int) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] // F, F * x.shape[-1])
