"""New tokens of a row: merged into the tile of keys that they belong to, once it has arrived, and from there written to
main memory, see `attnops_tpu.caches.new_tokens`.

Slots of a group that are not new keep what was transferred. No other row reads what a call writes: pages that rows
share are full. A row has one tile of queries: see `attnops_tpu.caches.prompts` for others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.new_tokens import Written, group_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile


class _Group(NamedTuple):
    """A group of slots of a tile that has new tokens."""

    tile: Tile
    buffer: jax.Array  # the tile's
    array: int  # which of the sources
    slots: int  # how many slots it has
    turn: int  # subtracted from the number of a slot, see `Writer._turns`
    number: jax.Array  # in the row; continues beyond a ring's end


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the new tokens of a call, on references."""

    plan: CachePlan
    refs: CacheRefs  # the references of the grid step
    new: Written  # those of the new tokens

    def has(self, entry: jax.Array, number: jax.Array) -> jax.Array:
        """Whether a tile of an entry has new tokens."""
        first, stop, start = self.new.first[entry], self.new.stop[entry], number * self.plan.bk
        has_new = (stop > first) & (start < stop) & (first < start + self.plan.bk)
        return has_new | (start < stop - self.plan.S) if self.plan.is_ring else has_new

    @property
    def _turns(self) -> tuple[int, ...]:
        """The numbers to subtract from that of a slot: 0, and in a ring also S, for slots beyond its end."""
        return (0, self.plan.S) if self.plan.is_ring else (0,)

    def put(self, tile: Tile, buffer: jax.Array) -> None:
        """Write the new tokens of a tile to its buffer, and start their transfers to main memory."""

        def write(group: _Group) -> None:
            self._merge(group)
            self._copy(group).start()

        self._each_group(tile, buffer, write)

    def finish(self, tile: Tile, buffer: jax.Array) -> None:
        """Wait for the transfers that `put` started."""
        self._each_group(tile, buffer, lambda group: self._copy(group).wait())

    def _each_group(self, tile: Tile, buffer: jax.Array, do: Callable[[_Group], None]) -> None:
        """Call a function for each group of a tile that has new tokens."""
        for array, to in enumerate(self.refs.buffers):
            slots = group_of(array >= self.plan.token_arrays, to.dtype.itemsize, self.plan.unit, self.plan.sublanes)
            for turn in self._turns:
                group = functools.partial(_Group, tile, buffer, array, slots, turn)
                lax.fori_loop(*self._groups(tile, slots, turn), lambda i, _, group=group: do(group(i)), None)

    def _groups(self, tile: Tile, slots: int, turn: int) -> tuple[jax.Array, jax.Array]:
        """The range of groups of a tile that have new tokens; their numbers continue beyond a ring's end."""
        entry, number = tile.entry, tile.number
        of_tile, before = self.plan.bk // slots, turn // slots
        end = (number + 1) * of_tile
        end = jnp.minimum(end, self.plan.S // slots) + before if self.plan.is_ring else end
        first = jnp.maximum(lax.div(self.new.first[entry], np.int32(slots)), number * of_tile + before)
        stop = jnp.minimum(lax.div(self.new.stop[entry] + (slots - 1), np.int32(slots)), end)
        return first, jnp.where(self.has(entry, number), stop, first)

    def _merge(self, group: _Group) -> None:
        entry, index, slots = group.tile.entry, group.number, group.slots
        at = pl.ds(pl.multiple_of(index * slots - group.turn - group.tile.number * self.plan.bk, slots), slots)
        first, stop = (ref[entry] - index * slots for ref in (self.new.first, self.new.stop))
        if self.new.begin is None:
            self._merge_group(group, at, first, stop)
        elif self.plan.T == 1:
            self._merge_token(group, at, jnp.int32(0), first)
        else:
            slots_of = jnp.maximum(first, 0), jnp.minimum(stop, slots)
            lax.fori_loop(*slots_of, lambda slot, _: self._merge_token(group, at, slot - first, slot), None)

    def _merge_token(self, group: _Group, at: Any, token: jax.Array, slot: jax.Array) -> None:
        """Move a token of the item to a slot of a group, which is ``at`` some slots of the tile."""
        to, tokens, buffer = self.refs.buffers[group.array], self.new.tokens[group.array], group.buffer
        if group.array >= self.plan.token_arrays:
            old = to[buffer, :, at]
            lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
            to[buffer, :, at] = jnp.where(lane == slot, tokens[token, :, : group.slots], old)
            return
        packed = 4 // to.dtype.itemsize
        is_new = bits_of_slots((group.slots // packed, tokens.shape[2]), slot, slot + 1, packed)
        for head in range(self.plan.K):
            old = as_words(to[buffer, head, at])
            new = jnp.broadcast_to(tokens[token, head : head + 1], old.shape)
            to[buffer, head, at] = pltpu.bitcast((new & is_new) | (old & ~is_new), to.dtype)

    def _merge_group(self, group: _Group, at: Any, first: jax.Array, stop: jax.Array) -> None:
        """Move the tokens of a group, whose slots from ``first`` to ``stop`` are new, to the tile."""
        entry, index, slots, buffer = group.tile.entry, group.number, group.slots, group.buffer
        to, tokens = self.refs.buffers[group.array], self.new.tokens[group.array]
        given = index - lax.div(self.new.first[entry], np.int32(slots))
        if group.array >= self.plan.token_arrays:
            old = to[buffer, :, at]
            lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
            new = tokens[0, :, pl.ds(pl.multiple_of(given * slots, slots), slots)]
            to[buffer, :, at] = jnp.where((lane >= first) & (lane < stop), new, old)
            return
        packed = 4 // to.dtype.itemsize
        words = slots // packed
        given_at = pl.ds(pl.multiple_of(given * words, words), words)
        for head in range(self.plan.K):
            old = as_words(to[buffer, head, at])
            new = tokens[0, head, given_at]
            is_new = bits_of_slots(old.shape, first, stop, packed)
            merged = (new & is_new) | (old & ~is_new)
            to[buffer, head, at] = pltpu.bitcast(merged, to.dtype)

    def _copy(self, group: _Group) -> Any:
        """The transfer of a group from its tile to main memory."""
        plan, entry, slots, slot = self.plan, group.tile.entry, group.slots, group.number * group.slots - group.turn
        at = pl.multiple_of(slot - group.tile.number * plan.bk, slots)
        if plan.is_paged:
            unit = np.int32(plan.unit)
            each = self.new.blocks.shape[0] // plan.B
            block = self.new.blocks[entry * each + lax.div(slot, unit) - lax.div(self.new.first[entry], unit)]
            slot = lax.rem(slot, unit)
        else:
            block = self.new.blocks[entry]
        target = self.refs.sources[group.array].at[block, :, pl.ds(pl.multiple_of(slot, slots), slots)]
        source = self.refs.buffers[group.array].at[group.buffer, :, pl.ds(at, slots)]
        return pltpu.make_async_copy(source, target, self.refs.written.at[0])


def as_words(x: jax.Array) -> jax.Array:
    """The bits of slots [n, width] as int32 [words, width]."""
    return x if x.dtype == jnp.int32 else pltpu.bitcast(x, jnp.int32)


def bits_of_slots(shape: tuple[int, ...], first: jax.Array, stop: jax.Array, packed: int) -> jax.Array:
    """Words [words, width] in which the bits of slots from ``first`` to ``stop`` are 1."""
    slot = lax.broadcasted_iota(jnp.int32, shape, 0) * packed
    bits, words = 32 // packed, jnp.zeros(shape, jnp.int32)
    for i in range(packed):
        mask = np.array((((1 << bits) - 1) << (bits * i)), np.uint32).astype(np.int32)
        at = slot + i
        words |= jnp.where((at >= first) & (at < stop), jnp.int32(mask), jnp.int32(0))
    return words
