"""Tokens that nobody sees may hold anything: they are zeroed, so that a weight of 0 times them is 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def hide_unseen(
    query: jax.Array, key: jax.Array, value: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with 0 for queries that see nothing and for keys that nobody sees.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        allowed: booleans that broadcast to [B, H, T, S].
    """
    K = key.shape[2]
    sees = allowed.any(axis=3).swapaxes(1, 2)  # [B, T, H], each 1 or all
    seen = allowed.any(axis=2)  # [B, H, S], likewise
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], K, -1, seen.shape[2]).any(axis=2)
    seen = seen.swapaxes(1, 2)
    return _where(sees, query), _where(seen, key), _where(seen, value)


def _where(keep: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(keep[..., None], x, jnp.zeros((), x.dtype))
