"""A mask for a shard of a call: some of its batches and heads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid
from attnops.typing import Array, BoolArray, Index, Leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shifted(Mask):
    """A bound mask, for a shard of the call that it is bound to.

    Attributes:
        mask: the mask of all batches and heads.
        b: the shard's first batch index, an integer array [].
        h: the shard's first query head, an integer array [].
        batches: batches of the shard.
        heads: query heads of the shard.
    """

    mask: Mask
    b: Index
    h: Index
    batches: int
    heads: int

    is_internal: ClassVar = True

    def kinds(self) -> frozenset[str]:
        """See `Mask.kinds`."""
        return self.mask.kinds()

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        """See `Mask.has_fully_masked_tokens`."""
        return self.mask.has_fully_masked_tokens(T, S)

    def sees_itself(self) -> bool:
        """See `Mask.sees_itself`."""
        return self.mask.sees_itself()

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """See `Mask.allowed`."""
        return self.mask.allowed(b + self.b, h + self.h, q, kv)

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        """See `Mask.at`."""
        return dataclasses.replace(self, mask=self.mask.at(q_positions, kv_positions))

    def with_offset(self, offset: Leaf) -> Shifted:
        """This mask with queries at another offset."""
        return dataclasses.replace(self, mask=self.mask.with_offset(offset))  # type: ignore[attr-defined]

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        """See `Mask.coverage_bounds`."""

        def shard(x: Leaf) -> Leaf:
            for axis, (first, size) in enumerate(((self.b, self.batches), (self.h, self.heads))):
                if x.ndim == 4 and x.shape[axis] > 1:
                    x = lax.dynamic_slice_in_dim(jnp.asarray(x), first, size, axis)
            return x

        return CoverageBounds(*map(shard, self.mask.coverage_bounds(grid)))

    def __repr__(self) -> str:
        return repr(self.mask)
