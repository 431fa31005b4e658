"""A mask by slot as an interval of positions for each query, where the tokens lie, and a mask of what is left."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import And, Causal, Full, Mask, SlidingWindow
from attnops.typing import Leaf
from attnops_caches.masks import AtSlots, Held, Slots

# No limit.
FAR = np.int32(2**31 - 1)


class Bands(NamedTuple):
    """The conjunction of masks, each of which may be missing.

    Attributes:
        left: how many positions before its own a query sees, int32 [] or [B or 1, H or 1]; `FAR` for all.
        right: how many positions after its own a query sees, int32 [] or [B or 1, H or 1]; `FAR` for all.
        held: queries see what their row holds; None: everything, by ``rest``.
        rest: what is none of these; None for nothing.
    """

    left: Leaf = FAR
    right: Leaf = FAR
    held: Held | None = None
    rest: Mask | None = None

    @property
    def slots(self) -> Slots | None:
        """Where the tokens of each row lie."""
        return None if self.held is None else self.held.slots


def bands(mask: Mask) -> Bands:
    """A bound mask by slot, see `attnops_caches.CacheOptions`, split."""
    if isinstance(mask, And):
        return _both(bands(mask.left), bands(mask.right))
    if isinstance(mask, Held):
        return Bands(held=mask)
    if isinstance(mask, Full):
        return Bands()
    if isinstance(mask, AtSlots) and isinstance(mask.mask, (Causal, SlidingWindow)) and _is_at_0(mask.mask.offset):
        if isinstance(mask.mask, Causal):
            return Bands(right=np.int32(0))
        left, right = (FAR if x is None else x for x in (mask.mask.left, mask.mask.right))
        return Bands(left, right)
    return Bands(rest=mask)


def _is_at_0(offset: Leaf) -> bool:
    return isinstance(offset, int) and offset == 0


def _both(a: Bands, b: Bands) -> Bands:
    if a.held is not None and b.held is not None:  # not both of one row's slots: of no call over a cache
        b = Bands(b.left, b.right, None, b.held if b.rest is None else b.rest & b.held)
    rests = [x for x in (a.rest, b.rest) if x is not None]
    rest = rests[0] if len(rests) == 1 else rests[0] & rests[1] if rests else None
    return Bands(_least(a.left, b.left), _least(a.right, b.right), a.held or b.held, rest)


def _least(x: Leaf, y: Leaf) -> Leaf:
    is_traced = isinstance(x, jax.Array) or isinstance(y, jax.Array)
    return jnp.minimum(x, y) if is_traced else np.minimum(x, y)
