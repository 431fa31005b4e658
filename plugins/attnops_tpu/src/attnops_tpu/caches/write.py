"""New tokens of a row: merged into the tile of keys that they belong to, once it has arrived, and from there written to
main memory, see `attnops_tpu.caches.new_tokens`.

Slots of a group that are not new keep what was transferred. No other row reads what a call writes: pages that rows
share are full.

If a row has several tiles of queries, they run on one core in order: each merges the tokens into its tiles of keys, and
the last one writes them to main memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.new_tokens import Written, group_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the new tokens of a call, on references.

    Attributes:
        plan: the plan of the call.
        refs: the references of the grid step.
        new: those of the new tokens.
    """

    plan: CachePlan
    refs: CacheRefs
    new: Written

    def has(self, entry: jax.Array, number: jax.Array) -> jax.Array:
        """Whether a tile of an entry has new tokens."""
        first, stop, start = self.new.first[entry], self.new.stop[entry], number * self.plan.bk
        has_new = (stop > first) & (start < stop) & (first < start + self.plan.bk)
        return has_new | (start < stop - self.plan.S) if self.plan.is_ring else has_new

    def _group(self, array: int) -> int:
        itemsize = self.refs.buffers[array].dtype.itemsize
        return group_of(array >= self.plan.token_arrays, itemsize, self.plan.unit)

    @property
    def _turns(self) -> tuple[int, ...]:
        """What is subtracted from the number of a slot: 0, and in a ring S for those beyond its end."""
        return (0, self.plan.S) if self.plan.is_ring else (0,)

    def _is_writing(self, item: jax.Array) -> jax.Array | bool:
        """Whether an item writes to main memory: only the last of its row does."""
        nq = self.plan.nq
        return True if nq == 1 else lax.rem(item, np.int32(nq)) == nq - 1

    def put(self, tile: Tile, buffer: jax.Array) -> None:
        """Write the new tokens of a tile to its buffer, and start their transfers to main memory."""
        entry, number, is_writing = tile.entry, tile.number, self._is_writing(tile.item)
        for array in range(self.plan.sources):
            group = self._group(array)

            for turn in self._turns:

                def one(
                    index: jax.Array, carry: None, array: int = array, group: int = group, turn: int = turn
                ) -> None:
                    self._merge(entry, number, buffer, array, group, index, turn)
                    copy = self._copy(entry, number, buffer, array, group, index, turn)
                    pl.when(is_writing)(copy.start)
                    return carry

                lax.fori_loop(*self._groups(entry, number, group, turn), one, None)

    def finish(self, tile: Tile, buffer: jax.Array) -> None:
        """Wait for the transfers that `put` started."""
        pl.when(self._is_writing(tile.item))(lambda: self._wait(tile.entry, tile.number, buffer))

    def _wait(self, entry: jax.Array, number: jax.Array, buffer: jax.Array) -> None:
        for array in range(self.plan.sources):
            group = self._group(array)

            for turn in self._turns:

                def one(
                    index: jax.Array, carry: None, array: int = array, group: int = group, turn: int = turn
                ) -> None:
                    self._copy(entry, number, buffer, array, group, index, turn).wait()
                    return carry

                lax.fori_loop(*self._groups(entry, number, group, turn), one, None)

    def _groups(self, entry: jax.Array, number: jax.Array, group: int, turn: int) -> tuple[jax.Array, jax.Array]:
        """The range of groups of a tile that have new tokens; their numbers go on beyond a ring's end."""
        of_tile, before = self.plan.bk // group, turn // group
        end = (number + 1) * of_tile
        end = jnp.minimum(end, self.plan.S // group) + before if self.plan.is_ring else end
        first = jnp.maximum(lax.div(self.new.first[entry], np.int32(group)), number * of_tile + before)
        stop = jnp.minimum(lax.div(self.new.stop[entry] + (group - 1), np.int32(group)), end)
        return first, jnp.where(self.has(entry, number), stop, first)

    def _merge(
        self, entry: jax.Array, number: jax.Array, buffer: jax.Array, array: int, group: int, index: jax.Array,
        turn: int,
    ) -> None:  # fmt: skip
        at = pl.ds(pl.multiple_of(index * group - turn - number * self.plan.bk, group), group)
        first, stop = (ref[entry] - index * group for ref in (self.new.first, self.new.stop))
        to, tokens = self.refs.buffers[array], self.new.tokens[array]
        given = index - lax.div(self.new.first[entry], np.int32(group))
        if array >= self.plan.token_arrays:
            old = to[buffer, :, at]
            lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
            new = tokens[0, :, pl.ds(pl.multiple_of(given * group, group), group)]
            to[buffer, :, at] = jnp.where((lane >= first) & (lane < stop), new, old)
            return
        packed = 4 // to.dtype.itemsize
        words = group // packed
        given_at = slice(None) if self.plan.T == 1 else pl.ds(pl.multiple_of(given * words, words), words)
        for head in range(self.plan.K):
            old = to[buffer, head, at]
            old = old if old.dtype == jnp.int32 else pltpu.bitcast(old, jnp.int32)
            new = jnp.broadcast_to(tokens[0, head, given_at], old.shape)
            is_new = _bits_of_slots(old.shape, first, stop, packed)
            merged = (new & is_new) | (old & ~is_new)
            to[buffer, head, at] = pltpu.bitcast(merged, to.dtype)

    def _copy(
        self, entry: jax.Array, number: jax.Array, buffer: jax.Array, array: int, group: int, index: jax.Array,
        turn: int,
    ) -> Any:  # fmt: skip
        plan, slot = self.plan, index * group - turn
        at = pl.multiple_of(slot - number * plan.bk, group)
        if plan.is_paged:
            unit = np.int32(plan.unit)
            each = self.new.blocks.shape[0] // plan.B
            block = self.new.blocks[entry * each + lax.div(slot, unit) - lax.div(self.new.first[entry], unit)]
            slot = lax.rem(slot, unit)
        else:
            block = self.new.blocks[entry]
        target = self.refs.sources[array].at[block, :, pl.ds(pl.multiple_of(slot, group), group)]
        return pltpu.make_async_copy(
            self.refs.buffers[array].at[buffer, :, pl.ds(at, group)], target, self.refs.written.at[0]
        )


def _bits_of_slots(shape: tuple[int, ...], first: jax.Array, stop: jax.Array, packed: int) -> jax.Array:
    """Words [words, width] in which the bits of slots from ``first`` to ``stop`` are 1."""
    slot = lax.broadcasted_iota(jnp.int32, shape, 0) * packed
    bits, words = 32 // packed, jnp.zeros(shape, jnp.int32)
    for i in range(packed):
        mask = np.array((((1 << bits) - 1) << (bits * i)), np.uint32).astype(np.int32)
        at = slot + i
        words |= jnp.where((at >= first) & (at < stop), jnp.int32(mask), jnp.int32(0))
    return words
