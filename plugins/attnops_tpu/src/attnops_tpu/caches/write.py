"""New tokens of a row: merged into the tile of keys that they belong to, once it has arrived, and from there written to
main memory.

A transfer moves whole *groups* of slots, which fill a register's sublanes: 8 slots of 32 bits, 16 of 16, 32 of 8; or
128 slots of scales, which are in the lanes. The tokens are given in groups aligned as the row's; the other slots of a
group keep what was transferred. No other row reads what a call writes: pages that rows share are full.

If a row has several tiles of queries, they run on one core in order: each merges the tokens into its tiles of keys, and
the last one writes them to main memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_caches import NewTokens
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.tile_sizes import LANES

if TYPE_CHECKING:
    from attnops_tpu.caches.transfers import Tile

_SUBLANES = 8


class Written(NamedTuple):
    """What a call writes.

    Attributes:
        first: the slot of the first new token of each row, counted from the row's first, int32 [B].
        stop: the slot after the last, int32 [B]; ``first`` for none. In a ring it may be beyond the last slot, which
            slot 0 follows.
        blocks: the blocks with new tokens of each row, int32 [B · blocks per row].
        tokens: bits of tokens as they are stored, int32 words [rows, K, n, d] of 1, 2 or 4 slots each: whole groups,
            or, for one token per row, one word that repeats it. Scales float32 [rows, K, n], whole groups. With one
            tile of queries per row, there are as many rows as items.
    """

    first: jax.Array
    stop: jax.Array
    blocks: jax.Array
    tokens: tuple[jax.Array, ...]


def group_of(plan: CachePlan, array: int, itemsize: int) -> int:
    """Slots per group of one of the arrays that are written to."""
    return math.gcd(LANES if array >= plan.token_arrays else _SUBLANES * 4 // itemsize, plan.unit)


def written(plan: CachePlan, new: NewTokens, base: jax.Array | int, blocks: Mapping[str, jax.Array]) -> Written:
    """What a call writes.

    Args:
        plan: the plan of the call.
        new: the new tokens.
        base: the first block of the cache.
        blocks: the arrays that are written to, by name; scales last. JAX sorts the names of ``new.tokens``.
    """
    tokens = []
    for i, (name, array) in enumerate(blocks.items()):
        group = group_of(plan, i, array.dtype.itemsize)
        token = jnp.arange(((plan.T + group - 2) // group + 1) * group, dtype=jnp.int32) - (new.first % group)[:, None]
        token, x = jnp.clip(token, 0, plan.T - 1)[:, None], new.tokens[name]
        words = jnp.take_along_axis(x, token, 2) if i >= plan.token_arrays else _words_of(x, token[..., None])
        wanting = plan.items - plan.B if plan.nq == 1 else 0
        tokens.append(jnp.pad(words, ((0, wanting), *[(0, 0)] * (words.ndim - 1))))
    return Written(new.first, new.first + new.size, (new.blocks + base).reshape(-1).astype(jnp.int32), tuple(tokens))


def _words_of(x: jax.Array, token: jax.Array) -> jax.Array:
    """The ``token`` [B, 1, n, 1] of each slot, of tokens [B, K, T, d], as words of 32 bits.

    If T is 1, one word that repeats the token.
    """
    itemsize = x.dtype.itemsize
    packed, bits = 4 // itemsize, lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * itemsize}"))

    def shifted(i: int) -> jax.Array:
        # Not by a bitcast of pairs or fours: as a last axis, they would be padded to 128 lanes.
        some = bits if x.shape[2] == 1 else jnp.take_along_axis(bits, token[:, :, i::packed], 2)
        return some.astype(jnp.uint32) << (8 * itemsize * i)

    words = functools.reduce(jnp.bitwise_or, map(shifted, range(packed)))
    return lax.bitcast_convert_type(words, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the new tokens of a call, on references.

    Attributes:
        plan: the plan of the call.
        first, stop, blocks: the slots and blocks of new tokens, by entry of the batch, in scalar memory; see `Written`.
        tokens: the item's tokens and scales, [1, K, n, d] and [1, K, n], see `Written`.
        targets: the arrays of blocks, in main memory.
        buffers: the tiles in vector memory, see `attnops_tpu.caches.transfers.Stream`.
        written: a semaphore [1].
    """

    plan: CachePlan
    first: Any
    stop: Any
    blocks: Any
    tokens: tuple[Any, ...]
    targets: tuple[Any, ...]
    buffers: tuple[Any, ...]
    written: Any

    def has(self, entry: jax.Array, number: jax.Array) -> jax.Array:
        """Whether a tile of an entry has new tokens."""
        first, stop, start = self.first[entry], self.stop[entry], number * self.plan.bk
        has_new = (stop > first) & (start < stop) & (first < start + self.plan.bk)
        return has_new | (start < stop - self.plan.S) if self.plan.is_ring else has_new

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
        for array, to in enumerate(self.buffers):
            group = group_of(self.plan, array, to.dtype.itemsize)

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
        for array, to in enumerate(self.buffers):
            group = group_of(self.plan, array, to.dtype.itemsize)

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
        first = jnp.maximum(lax.div(self.first[entry], np.int32(group)), number * of_tile + before)
        stop = jnp.minimum(lax.div(self.stop[entry] + (group - 1), np.int32(group)), end)
        return first, jnp.where(self.has(entry, number), stop, first)

    def _merge(
        self, entry: jax.Array, number: jax.Array, buffer: jax.Array, array: int, group: int, index: jax.Array,
        turn: int,
    ) -> None:  # fmt: skip
        at = pl.ds(pl.multiple_of(index * group - turn - number * self.plan.bk, group), group)
        first, stop = (ref[entry] - index * group for ref in (self.first, self.stop))
        to, tokens = self.buffers[array], self.tokens[array]
        given = index - lax.div(self.first[entry], np.int32(group))
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
            each = self.blocks.shape[0] // plan.B
            block = self.blocks[entry * each + lax.div(slot, unit) - lax.div(self.first[entry], unit)]
            slot = lax.rem(slot, unit)
        else:
            block = self.blocks[entry]
        target = self.targets[array].at[block, :, pl.ds(pl.multiple_of(slot, group), group)]
        return pltpu.make_async_copy(self.buffers[array].at[buffer, :, pl.ds(at, group)], target, self.written.at[0])


def _bits_of_slots(shape: tuple[int, ...], first: jax.Array, stop: jax.Array, packed: int) -> jax.Array:
    """Words [words, width] in which the bits of slots from ``first`` to ``stop`` are 1."""
    slot = lax.broadcasted_iota(jnp.int32, shape, 0) * packed
    bits, words = 32 // packed, jnp.zeros(shape, jnp.int32)
    for i in range(packed):
        mask = np.array((((1 << bits) - 1) << (bits * i)), np.uint32).astype(np.int32)
        at = slot + i
        words |= jnp.where((at >= first) & (at < stop), jnp.int32(mask), jnp.int32(0))
    return words
