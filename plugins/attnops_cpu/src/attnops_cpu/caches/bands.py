"""A mask by slot as an interval of positions for each query, the slots that hold tokens, and a remaining mask."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import And, Causal, Full, Mask, SlidingWindow
from attnops.typing import Leaf
from attnops_caches.masks import AtSlots, Held, OfRows, Slots

# No limit.
FAR = np.int32(2**31 - 1)


class Bands(NamedTuple):
    """The conjunction of masks; each may be missing.

    Attributes:
        left: how many positions before its own a query sees, int32 [] or [B or 1, H or 1]; `FAR` for all.
        right: how many positions after its own a query sees, int32 [] or [B or 1, H or 1]; `FAR` for all.
        q_positions: the positions of queries, int32 [B or 1, T], to which left and right are relative; None if they are
            the positions of ``held``.
        held: the mask by which queries see the tokens of their row; None: ``rest`` alone decides.
        rest: the conjunction of all other masks; None for none.
    """

    left: Leaf = FAR
    right: Leaf = FAR
    q_positions: Leaf | None = None
    held: Held | None = None
    rest: Mask | None = None

    @property
    def slots(self) -> Slots | None:
        """The slots of each row's tokens."""
        return None if self.held is None else self.held.slots


def bands(mask: Mask) -> Bands:
    """A bound mask by slot (`attnops_caches.CacheOptions`), split."""
    if isinstance(mask, And):
        return _both(bands(mask.left), bands(mask.right))
    if isinstance(mask, Held):
        return Bands(held=mask)
    if isinstance(mask, Full):
        return Bands()
    if isinstance(mask, AtSlots) and isinstance(mask.mask, (Causal, SlidingWindow)) and _is_at_0(mask.mask.offset):
        if isinstance(mask.mask, Causal):
            return Bands(right=np.int32(0), q_positions=mask.q_positions)
        left, right = (FAR if x is None else x for x in (mask.mask.left, mask.mask.right))
        return Bands(left, right, mask.q_positions)
    if isinstance(mask, OfRows):
        return _of_rows(bands(mask.mask), mask)
    return Bands(rest=mask)


def _of_rows(split: Bands, mask: OfRows) -> Bands:
    """The masks of a batch, indexed for packed queries: one query of one of its rows each."""
    left, right = (x if np.ndim(x) == 0 or np.shape(x)[0] == 1 else jnp.asarray(x)[mask.rows] for x in split[:2])
    q_positions = None if split.q_positions is None else jnp.asarray(split.q_positions)[0][mask.queries]
    rest = None if split.rest is None else OfRows(split.rest, mask.rows, mask.queries)
    return Bands(left, right, q_positions, None, rest)


def _is_at_0(offset: Leaf) -> bool:
    return isinstance(offset, int) and offset == 0


def _both(a: Bands, b: Bands) -> Bands:
    if a.held is not None and b.held is not None:  # no call over a cache has two
        b = Bands(b.left, b.right, b.q_positions, None, b.held if b.rest is None else b.rest & b.held)
    rests = [x for x in (a.rest, b.rest) if x is not None]
    rest = rests[0] if len(rests) == 1 else rests[0] & rests[1] if rests else None
    q_positions = b.q_positions if a.q_positions is None else a.q_positions
    return Bands(
        _least(a.left, b.left), _least(a.right, b.right), q_positions, b.held if a.held is None else a.held, rest
    )


def _least(x: Leaf, y: Leaf) -> Leaf:
    is_traced = isinstance(x, jax.Array) or isinstance(y, jax.Array)
    return jnp.minimum(x, y) if is_traced else np.minimum(x, y)
