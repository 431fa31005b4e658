"""A mask for a part of a call: of some of its batches and heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from attnops.masks.base import Mask
from attnops.masks.tiles import Grid, TileCoverage


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shifted(Mask):
    """A bound mask, asked about a part of the call that it is bound to.

    Attributes:
        mask: the mask of the whole call.
        b: the part's first of the batch, an integer array [].
        h: its first query head, likewise.
        batches: how many of the batch the part has.
        heads: how many query heads.
    """

    mask: Mask
    b: Any
    h: Any
    batches: int
    heads: int

    def kinds(self) -> frozenset[str]:
        """See `Mask.kinds`."""
        return self.mask.kinds()

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        """See `Mask.has_fully_masked_tokens`."""
        return self.mask.has_fully_masked_tokens(T, S)

    def sees_itself(self) -> bool:
        """See `Mask.sees_itself`."""
        return self.mask.sees_itself()

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        """See `Mask.allowed`."""
        return self.mask.allowed(b + self.b, h + self.h, q, kv)

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        """See `Mask.at`."""
        return dataclasses.replace(self, mask=self.mask.at(q_positions, kv_positions))

    def with_offset(self, offset: Any) -> Shifted:
        """The same of a mask whose queries stand at another offset."""
        return dataclasses.replace(self, mask=self.mask.with_offset(offset))  # type: ignore[attr-defined]

    def tiles(self, grid: Grid) -> TileCoverage:
        """See `Mask.tiles`."""

        def part(found: Any) -> Any:
            for axis, (first, size) in enumerate(((self.b, self.batches), (self.h, self.heads))):
                if found.ndim == 4 and found.shape[axis] > 1:
                    found = lax.dynamic_slice_in_dim(jnp.asarray(found), first, size, axis)
            return found

        return TileCoverage(*map(part, self.mask.tiles(grid)))

    def __repr__(self) -> str:
        return repr(self.mask)
