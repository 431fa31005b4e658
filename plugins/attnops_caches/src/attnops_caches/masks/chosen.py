"""Chosen blocks of keys, by slot of a cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attnops.masks.base import And, Mask
from attnops.masks.chosen import Blocks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SlotBlocks(Blocks):
    """`Blocks` with a choice for each slot, [B or 1, H or 1, nq, S]. Made by `blocks_by_slot`.

    Attributes:
        positions: keys per block by position.
    """

    positions: int

    axes: ClassVar = {"chosen": "bh.s"}
    is_internal: ClassVar = True

    def bind(self, B: int, H: int, T: int, S: int) -> SlotBlocks:  # type: ignore[override]
        """See `Mask.bind`: it is bound already."""
        return self

    def kinds(self) -> frozenset[str]:
        """See `Mask.kinds`."""
        return frozenset({"Blocks"})


def blocks_by_slot(mask: Blocks, shape: tuple[int, int, int, int], positions: jax.Array) -> SlotBlocks:
    """Chosen blocks of positions as blocks of slots.

    Args:
        mask: not bound.
        shape: of the scores by position.
        positions: the position of each slot, int32 [B, S].
    """
    bound = mask.bind(*shape)
    chosen = jnp.asarray(bound.chosen)
    index = jnp.clip(positions // bound.kv_block, 0, chosen.shape[3] - 1)[:, None, None, :]
    chosen = jnp.broadcast_to(chosen, (index.shape[0], *chosen.shape[1:]))
    return SlotBlocks(jnp.take_along_axis(chosen, index, axis=3), bound.q_block, 1, bound.kv_block)


def smallest_block(mask: Mask | None) -> int | None:
    """The fewest positions per block of keys that a call may skip; None without `SlotBlocks`."""
    if isinstance(mask, And):
        sizes = [size for side in (mask.left, mask.right) if (size := smallest_block(side)) is not None]
        return min(sizes, default=None)
    return mask.positions if isinstance(mask, SlotBlocks) else None
