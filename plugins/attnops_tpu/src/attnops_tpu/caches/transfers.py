"""Transfers of keys and values from a cache to vector memory, some tiles ahead of the current tile.

The tiles of all items of a core follow one another in one stream, so that an item's first tiles are transferred while
the item before it is computed. Pieces of a paged cache's table go to scalar memory one ahead of their use. A unit
that no query sees is not transferred, and an item without keys starts no transfer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile
from attnops_tpu.caches.stream_state import StepCase, StreamState, step_cases
from attnops_tpu.caches.tile_sizes import Starts
from attnops_tpu.caches.write import Writer

# Computes with a tile: the tile, its buffer, whether it has something to mask, and transfers to start meanwhile.
Compute = Callable[[Tile, jax.Array, bool, list[Callable[[], None]]], None]


@dataclasses.dataclass(frozen=True)
class Stream:
    """The transfers of a core."""

    plan: CachePlan
    refs: CacheRefs  # the references of the grid step
    writer: Writer | None  # writes new tokens; None for a call that writes none

    @property
    def state(self) -> StreamState:
        """What is transferred, and what is computed with next."""
        return StreamState(self.refs.stream)

    def begin(self, core: jax.Array) -> None:
        """Start the transfers of the first tiles of a core."""
        item = self.refs.schedule.following[core]
        self._set_next(item, self._first_tile(item))
        self.state.next_buffer = self.state.buffer = 0
        self.state.piece, self.state.zero = -1, 0
        if self.plan.is_paged:
            pl.when(item < self.plan.items)(lambda: self._start_piece(item, self._first_piece(item), jnp.int32(0)))

        def start(_: jax.Array, carry: None) -> None:
            self.start_next()
            return carry

        lax.fori_loop(0, self.plan.buffers - 1, start, None)

    def tiles(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The range of an item's tiles."""
        return self._first_tile(item), self._stop_tile(item)

    def tile(self, item: jax.Array, index: jax.Array) -> Tile:
        """A tile; ``item`` must be one."""
        units = self.plan.units
        first = jnp.maximum(self.refs.schedule.first[item] - index * units, 0)
        stop = jnp.minimum(self.refs.schedule.stop[item] - index * units, units)
        is_full = (index >= self.refs.schedule.first_full[item]) & (index < self.refs.schedule.stop_full[item])
        return Tile(item, self._row(item), lax.div(item, np.int32(self.plan.nq)), index, first, stop, is_full)

    def step(self, item: jax.Array, index: jax.Array, compute: Compute) -> None:
        """Start the transfer of the next tile of the stream, wait for this one, and compute with it.

        Args:
            item: the item of the grid step.
            index: the index of the tile in the row.
            compute: is called with the tile, see `Compute`.
        """
        plan, buffer = self.plan, self.state.buffer
        self.state.buffer = self._after(buffer)
        exists, target = self.state.next_item < plan.items, self.state.next_buffer
        is_full = (index >= self.refs.schedule.first_full[item]) & (index < self.refs.schedule.stop_full[item])
        if self.writer is not None:
            is_full &= ~self.writer.has(lax.div(item, np.int32(plan.nq)), index)
        next_is_whole = self.state.next_is_whole
        cases = step_cases(plan.starts, is_full, next_is_whole)
        self._enter()

        # In straight-line code, so that the compiler overlaps the starts, and the scalar work for the next step, with
        # the computation.
        def whole(slot: int | None = None) -> None:
            starts = list(self._starts_of_whole(self._next(), target, slot))
            if plan.starts is Starts.BEFORE:
                _all(starts)
            tile = self.tile(item, index)
            self._wait_whole(tile, buffer)
            compute(tile, buffer, False, starts if plan.starts is Starts.BETWEEN else [])
            if plan.starts is Starts.AFTER:
                _all(starts)
            self._go_on()

        def start() -> None:
            pl.when(next_is_whole)(lambda: _all(self._starts_of_whole(self._next(), target)))
            pl.when(exists & ~next_is_whole)(lambda: self._each_unit(self._next(), target, start=True))
            pl.when(exists)(self._go_on)

        def last() -> None:
            if plan.starts is Starts.BRANCHED:
                start()
            else:
                self._start_by_unit(exists)
            tile = self.tile(item, index)
            self._wait_whole(tile, buffer)
            compute(tile, buffer, False, [])

        def masked() -> None:
            tile = self.tile(item, index)
            start()
            pl.when(tile.is_full)(lambda: self._wait_whole(tile, buffer))
            pl.when(~tile.is_full)(lambda: self._each_unit(tile, buffer, start=False))
            compute(tile, buffer, True, [])

        bodies = {StepCase.WHOLE: whole, StepCase.LAST: last, StepCase.MASKED: masked}
        for case, holds in cases.items():
            if case is StepCase.WHOLE and plan.starts is Starts.BETWEEN and plan.is_paged and plan.units == plan.piece:
                # Each of a tile's many starts has one scalar operation less if the address of the piece is static.
                for slot in range(2):
                    pl.when(holds & (self._slot_of_piece() == slot))(functools.partial(whole, slot))
            else:
                pl.when(holds)(bodies[case])

    def start_next(self) -> None:
        """Start the transfer of the next tile of the stream, if there is one."""
        self._enter()
        self._start_by_unit(self.state.next_item < self.plan.items)

    def _start_by_unit(self, exists: jax.Array) -> None:
        """Start the transfers of the next tile, if it exists; its piece of the table must have arrived."""

        @pl.when(exists)
        def _() -> None:
            self._each_unit(self._next(), self.state.next_buffer, start=True)
            self._go_on()

    def _next(self) -> Tile:
        """The tile to transfer next; there must be one."""
        return self.tile(self.state.next_item, self.state.next_tile)

    def _go_on(self) -> None:
        """Make the tile after the next tile, which must exist, the next."""
        item, index = self.state.next_item, self.state.next_tile
        following, goes_on = self.refs.schedule.following[item + self.plan.cores], index + 1 < self._stop_tile(item)
        self._set_next(
            jnp.where(goes_on, item, following), jnp.where(goes_on, index + 1, self._first_tile(following))
        )  # fmt: skip
        self.state.next_buffer = self._after(self.state.next_buffer)

    def _set_next(self, item: jax.Array, index: jax.Array) -> None:
        """Set the next tile; there is none if ``item`` is none."""
        plan, first = self.plan, index * self.plan.units
        exists, known = item < plan.items, jnp.minimum(item, plan.items - 1)
        is_whole = (self.refs.schedule.first[known] <= first) & (self.refs.schedule.stop[known] >= first + plan.units)
        enters = (index == self._first_tile(known)) | (lax.rem(first, np.int32(plan.piece)) == 0)
        self.state.next_item, self.state.next_tile = item, index
        self.state.next_is_whole, self.state.next_enters = exists & is_whole, exists & enters

    def _after(self, buffer: jax.Array) -> jax.Array:
        return jnp.where(buffer == self.plan.buffers - 1, 0, buffer + 1)

    def _enter(self) -> None:
        """Wait for the piece of the table that the next tile needs."""
        if self.plan.is_paged:
            pl.when(self.state.next_enters)(self._enter_piece)

    def _enter_piece(self) -> None:
        """Wait for the piece of the table that comes next, and start the transfer of the one after."""
        plan, number, item = self.plan, self.state.piece + 1, self.state.next_item
        piece, following = self._piece_of(self.state.next_tile), self.refs.schedule.following
        self.state.piece = number
        self._piece_copy(item, piece, lax.rem(number, np.int32(2))).wait()
        goes_on = (piece + 1) * plan.piece < self.refs.schedule.stop[item]
        exists = goes_on | (following[item + plan.cores] < plan.items)
        after = jnp.where(goes_on, item, jnp.minimum(following[item + plan.cores], plan.items - 1))
        at = jnp.where(goes_on, piece + 1, self._first_piece(after))
        pl.when(exists)(lambda: self._start_piece(after, at, lax.rem(number + 1, np.int32(2))))

    def _slot_of_piece(self) -> jax.Array:
        return lax.rem(self.state.piece, np.int32(2))

    def _start_piece(self, item: jax.Array, piece: jax.Array, slot: jax.Array) -> None:
        self._piece_copy(item, piece, slot).start()

    def _piece_copy(self, item: jax.Array, piece: jax.Array, slot: jax.Array) -> Any:
        source = self.refs.table.at[self._row(item) * self.plan.pieces + piece, 0]
        target = self.refs.pages.at[pl.ds(pl.multiple_of(slot * self.plan.piece, self.plan.piece), self.plan.piece)]
        return pltpu.make_async_copy(source, target, self.refs.piece_arrived.at[slot])

    def _starts_of_whole(self, tile: Tile, buffer: jax.Array, slot: int | None = None) -> Iterator[Callable[[], None]]:
        """Functions that, called in order, start the transfers of all units of a tile; ``slot``: see `_starter`."""
        if self.plan.is_paged:
            start_unit = self._starter(tile, buffer, slot)
            for unit in range(self.plan.units):
                yield functools.partial(start_unit, unit)
        else:
            slots = pl.ds(pl.multiple_of(tile.number * self.plan.bk, self.plan.unit), self.plan.bk)
            for source, to in zip(self.refs.sources, self.refs.buffers, strict=True):
                block = source.at[self.refs.block + tile.row, :, slots]
                yield pltpu.make_async_copy(block, to.at[buffer], self.refs.arrived.at[buffer]).start
        if self.refs.by_key is not None:
            yield functools.partial(self._start_by_key, tile, buffer)

    def _wait_whole(self, tile: Tile, buffer: jax.Array) -> None:
        for to in self.refs.buffers:
            pltpu.make_async_copy(to.at[buffer], to.at[buffer], self.refs.arrived.at[buffer]).wait()
        if self._always_by_key:
            self._by_key_copy(tile, buffer).wait()

    def _each_unit(self, tile: Tile, buffer: jax.Array, start: bool) -> None:
        """Start, or wait for, the transfers of the units of a tile that some query sees."""
        start_unit = self._starter(tile, buffer) if start else None

        def one(unit: jax.Array, carry: None) -> None:
            if start_unit is not None:
                start_unit(unit)
            else:
                for to in self.refs.buffers:
                    at = to.at[buffer, :, self._slots(unit)]
                    pltpu.make_async_copy(at, at, self.refs.arrived.at[buffer]).wait()
            return carry

        lax.fori_loop(tile.first, tile.stop, one, None)
        if start:
            self._start_by_key(tile, buffer)
        elif self.refs.by_key is not None:
            self._by_key_copy(tile, buffer).wait()

    def _starter(self, tile: Tile, buffer: jax.Array, slot: int | None = None) -> Callable[[jax.Array | int], None]:
        """A function that starts the transfers of a unit of a tile, all of whose pages are in one piece.

        ``slot``: the static place of the piece, 0 or 1, if it has the pages of this tile only; else None.
        """
        plan = self.plan
        first = tile.number * plan.units
        if plan.is_paged:
            first = self._slot_of_piece() * plan.piece + lax.rem(first, np.int32(plan.piece))

        def start(unit: jax.Array | int) -> None:
            if plan.is_paged:
                at: tuple[Any, ...] = (self.refs.pages[(first if slot is None else slot * plan.piece) + unit],)
            else:
                start = pl.multiple_of((first + unit) * plan.unit, plan.unit)
                at = self.refs.block + tile.row, slice(None), pl.ds(start, plan.unit)
            for source, to in zip(self.refs.sources, self.refs.buffers, strict=True):
                into = to.at[buffer, :, self._slots(unit)]
                pltpu.make_async_copy(source.at[at], into, self.refs.arrived.at[buffer]).start()

        return start

    @property
    def _always_by_key(self) -> bool:
        """Whether tiles without anything to mask have values by key too."""
        return self.refs.by_key is not None and self.plan.scoring.bias is not None

    def _start_by_key(self, tile: Tile, buffer: jax.Array) -> None:
        if self._always_by_key:
            self._by_key_copy(tile, buffer).start()
        elif self.refs.by_key is not None:
            pl.when(~tile.is_full)(lambda: self._by_key_copy(tile, buffer).start())

    def _by_key_copy(self, tile: Tile, buffer: jax.Array) -> Any:
        row: Any = tile.row if self.plan.keys_by_cache_row else tile.entry
        row = row if self.refs.by_key.shape[0] > 1 else 0
        source = self.refs.by_key.at[row, tile.number]
        return pltpu.make_async_copy(source, self.refs.by_key_buffer.at[buffer], self.refs.arrived.at[buffer])

    def _slots(self, unit: jax.Array | int) -> Any:
        """The slots of a unit in a buffer."""
        size = self.plan.unit
        return pl.ds(unit * size if isinstance(unit, int) else pl.multiple_of(unit * size, size), size)

    def _row(self, item: jax.Array) -> jax.Array:
        return self.refs.schedule.row[item] if self.plan.is_packed else lax.div(item, np.int32(self.plan.nq))

    def _first_tile(self, item: jax.Array) -> jax.Array:
        """The first tile of an item; any, if ``item`` is none."""
        return lax.div(self.refs.schedule.first[jnp.minimum(item, self.plan.items - 1)], np.int32(self.plan.units))

    def _stop_tile(self, item: jax.Array) -> jax.Array:
        units, stop = np.int32(self.plan.units), self.refs.schedule.stop[item]
        return jnp.where(
            stop > self.refs.schedule.first[item], lax.div(stop + (units - 1), units), self._first_tile(item)
        )

    def _first_piece(self, item: jax.Array) -> jax.Array:
        return self._piece_of(self._first_tile(item))

    def _piece_of(self, tile: jax.Array) -> jax.Array:
        """The piece of a row's table that a tile's pages are in."""
        return lax.div(tile * self.plan.units, np.int32(self.plan.piece))


def _all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()
