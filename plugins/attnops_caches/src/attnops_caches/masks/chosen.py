"""Chosen blocks of keys, by slot of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
        return self

    def kinds(self) -> frozenset[str]:
        return frozenset({"Blocks"})


def blocks_by_slot(mask: Blocks, shape: tuple[int, int, int, int], positions: jax.Array) -> SlotBlocks:
    """A `Blocks` of positions, not bound, as a mask of slots whose ``positions`` are int32 [B, S]."""
    bound = mask.bind(*shape)
    chosen = jnp.asarray(bound.chosen)
    index = jnp.clip(positions // bound.kv_block, 0, chosen.shape[3] - 1)[:, None, None, :]
    chosen = jnp.broadcast_to(chosen, (index.shape[0], *chosen.shape[1:]))
    return SlotBlocks(jnp.take_along_axis(chosen, index, axis=3), bound.q_block, 1, bound.kv_block)


def block_size(mask: Mask) -> int | None:
    """The positions per block of keys that a call may skip; None for another mask than `SlotBlocks`."""
    return mask.positions if isinstance(mask, SlotBlocks) else None


def least(mask: Mask | None, size: Callable[[Mask], int | None]) -> int | None:
    """The least size among the masks that ``&`` joins; None if none of them has one."""
    if isinstance(mask, And):
        return min((n for side in (mask.left, mask.right) if (n := least(side, size)) is not None), default=None)
    return None if mask is None else size(mask)
