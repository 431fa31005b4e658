"""Masks of a batch that are one interval of slots for each query: causal masks and windows over rows in order.

The kernel compares slots with two numbers per query, whatever the mask. XLA computes these, and the tiles to read,
together with the cache's new lengths in one kernel.
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


class Interval(NamedTuple):
    """The slots that each query sees, from a first to before a stop, int32 [B, T]; none if the stop is not above."""

    first: jax.Array
    stop: jax.Array


def interval(mask: Mask, shape: tuple[int, int, int]) -> Interval | None:
    """The slots that a bound mask of a batch allows; None if they may be no interval. ``shape``: B, T and S."""
    if isinstance(mask, And):
        left, right = interval(mask.left, shape), interval(mask.right, shape)
        if left is None or right is None:
            return None
        return Interval(jnp.maximum(left.first, right.first), jnp.minimum(left.stop, right.stop))
    if not isinstance(mask, (Held, AtSlots)) or mask.slots.newest is not None or mask.slots.exists is not None:
        return None
    position = jnp.broadcast_to(jnp.asarray(mask.q_positions), shape[:2])
    if isinstance(mask, Held):
        start, stop = (jnp.clip(jnp.asarray(x), 0, shape[2])[:, None] for x in (mask.slots.start, mask.slots.stop))
        # Queries of padding see nothing.
        return Interval(jnp.broadcast_to(start, shape[:2]), jnp.where(position >= 0, stop, 0))
    limits = _limits(mask.mask)
    if limits is None or shape[2] > _FAR:
        return None
    low, high = limits
    number = position - jnp.clip(jnp.asarray(mask.slots.shift)[:, None], -_FAR, _FAR)
    first = jnp.zeros_like(number) if high >= _FAR else number - high
    stop = jnp.full_like(number, shape[2]) if low <= -_FAR else number - low + 1
    return Interval(jnp.clip(first, 0, shape[2]), jnp.clip(stop, 0, shape[2]))


def _limits(mask: Mask) -> tuple[int, int] | None:
    """The lowest and the highest ``q - kv`` that a mask of positions allows; None if it is no such mask, or traced."""
    if not isinstance(mask, (Causal, SlidingWindow)) or not isinstance(mask.offset, int) or mask.offset != 0:
        return None
    if isinstance(mask, Causal):
        return 0, _FAR
    left, right = (_FAR if x is None else x for x in (mask.left, mask.right))
    return (-right, left) if isinstance(left, int) and isinstance(right, int) else None


def of_tiles(seen: Interval, bq: int) -> tuple[Interval, Interval]:
    """The slots that some query of each tile of bq queries sees, and those that all of them see, [B, tiles].

    By minima of pairs and not as a reduction, which XLA would not fuse with what comes before.
    """
    batch, T = seen.first.shape
    size = min(bq, T)
    tiles = (jnp.pad(x, ((0, 0), (0, -T % size)), mode="edge").reshape(batch, -1, size) for x in seen)
    first, stop = ([x[:, :, i] for i in range(size)] for x in tiles)
    is_some = [a < b for a, b in zip(first, stop, strict=True)]
    every = Interval(functools.reduce(jnp.maximum, first), functools.reduce(jnp.minimum, stop))
    least = [jnp.where(some, a, _FAR) for some, a in zip(is_some, first, strict=True)]
    most = [jnp.where(some, b, 0) for some, b in zip(is_some, stop, strict=True)]
    return Interval(functools.reduce(jnp.minimum, least), functools.reduce(jnp.maximum, most)), every
