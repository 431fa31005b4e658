"""Masks of a batch that are one interval of slots for each query: causal masks and windows over rows in order.

Queries of a row have consecutive positions, so that six numbers per row describe the mask, whatever it is. XLA computes
them together with the cache's new lengths in one kernel, and the kernel finds the tiles that it reads.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from attnops.masks import And, Causal, Mask, SlidingWindow
from attnops_caches.masks import AtSlots, Held

# A distance that no two positions have.
_FAR: Final = 1 << 29
# Up to so many queries columns are compared one by one, since XLA does not fuse a reduction with what uses it.
_COLUMNS: Final = 64


class Interval(NamedTuple):
    """The slots that the queries of each row see, int32 [B] each. Query t, from ``begin`` to before ``end``, sees those
    from ``max(first, low + t)`` to before ``min(stop, high + t)``; other queries see none.
    """

    first: jax.Array
    stop: jax.Array
    low: jax.Array
    high: jax.Array
    begin: jax.Array
    end: jax.Array


def interval(mask: Mask, shape: tuple[int, int, int]) -> Interval | None:
    """The slots that a bound mask of a batch allows; None if they may be no interval. ``shape``: B, T and S."""
    if isinstance(mask, And):
        left, right = interval(mask.left, shape), interval(mask.right, shape)
        if left is None or right is None:
            return None
        return Interval(*(f(x, y) for f, x, y in zip((jnp.maximum, jnp.minimum) * 3, left, right, strict=True)))
    if not isinstance(mask, (Held, AtSlots)) or mask.slots.newest is not None or mask.slots.exists is not None:
        return None
    if mask.slots.between:
        return None
    batch, T, S = shape
    position = jnp.broadcast_to(jnp.asarray(mask.q_positions), (batch, T))
    first, stop, low, high, begin, end = (jnp.full(batch, x, jnp.int32) for x in (0, S, -_FAR, _FAR, 0, T))
    # Queries of padding have the position -1, and see nothing; the others are consecutive, so that the first query
    # would have this position.
    query, exists = jnp.arange(T, dtype=jnp.int32), position >= 0
    origin = _largest(jnp.where(exists, position - query, -_FAR))
    if isinstance(mask, Held):
        first, stop = (jnp.clip(jnp.asarray(x), 0, S) for x in (mask.slots.start, mask.slots.stop))
        begin, end = -_largest(jnp.where(exists, -query, -T)), _largest(jnp.where(exists, query + 1, 0))
        return Interval(first, stop, low, high, begin, end)
    limits = _limits(mask.mask)
    if limits is None or S > _FAR:
        return None
    least, most = limits
    number = origin - jnp.clip(jnp.asarray(mask.slots.shift), -_FAR, _FAR)
    low = low if most >= _FAR else jnp.clip(number - most, -_FAR, _FAR)
    high = high if least <= -_FAR else jnp.clip(number - least + 1, -_FAR, _FAR)
    return Interval(first, stop, low, high, begin, end)


def _largest(x: jax.Array) -> jax.Array:
    """The largest number of each row, [B], of [B, T]."""
    T = x.shape[1]
    return functools.reduce(jnp.maximum, [x[:, i] for i in range(T)]) if T <= _COLUMNS else x.max(1)


def _limits(mask: Mask) -> tuple[int, int] | None:
    """The lowest and the highest ``q - kv`` that a mask of positions allows; None if it is no such mask, or traced."""
    if not isinstance(mask, (Causal, SlidingWindow)) or not isinstance(mask.offset, int) or mask.offset != 0:
        return None
    if isinstance(mask, Causal):
        return 0, _FAR
    left, right = (_FAR if x is None else x for x in (mask.left, mask.right))
    return (-right, left) if isinstance(left, int) and isinstance(right, int) else None
