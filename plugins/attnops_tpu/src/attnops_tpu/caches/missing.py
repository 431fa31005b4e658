"""Pages missing from a row's table, between others that it has: their keys are masked.

Such gaps are rare, so the bits that say which pages are in the table are only transferred when a tile needs them.
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

from attnops_tpu.caches.plan import BITS, CachePlan
from attnops_tpu.caches.tile_sizes import LANES
from attnops_tpu.caches.transfers import Tile


@dataclasses.dataclass(frozen=True)
class MissingPages:
    """Masks the keys of missing pages, on references.

    Attributes:
        plan: the plan of the call.
        items: whether a page of an item is missing, int32 [items] in scalar memory.
        words: whether each page is in the table, bits of int32 [rows · pieces, 1, 128] in main memory, see
            `attnops_tpu.caches.schedule.words_of_pages`.
        loaded: the words of a tile, among [1, 128] of them, in scalar memory.
        present: 1 for each key of a tile whose page is in the table, int32 [8, bk]; all 1 between two tiles.
        arrived: a semaphore [1].
    """

    plan: CachePlan
    items: Any
    words: Any
    loaded: Any
    present: Any
    arrived: Any

    def begin(self) -> None:
        """Before the first tile of a core."""
        self._reset()

    def enter(self, tile: Tile) -> None:
        """Before the keys of a tile are masked."""
        pl.when(self.items[tile.item] != 0)(lambda: self._load(tile))

    def leave(self, tile: Tile) -> None:
        """After the keys of a tile were masked."""
        pl.when(self.items[tile.item] != 0)(self._reset)

    def _reset(self) -> None:
        self.present[...] = jnp.ones(self.present.shape, jnp.int32)

    def _load(self, tile: Tile) -> None:
        plan = self.plan
        word = tile.number * plan.words
        pieces = -(-plan.nk * plan.words // LANES)
        source = self.words.at[tile.row * pieces + lax.div(word, np.int32(LANES))]
        copy = pltpu.make_async_copy(source, self.loaded, self.arrived.at[0])
        copy.start()
        copy.wait()
        first = lax.rem(word, np.int32(LANES))
        key = lax.broadcasted_iota(jnp.int32, self.present.shape, 1)

        def one(unit: jax.Array, carry: None) -> None:
            bits = self.loaded[0, first + lax.div(unit, np.int32(BITS))]
            bit = lax.shift_right_logical(bits, lax.rem(unit, np.int32(BITS))) & 1
            start = unit * plan.unit
            is_of_unit = (key >= start) & (key < start + plan.unit)
            self.present[...] = jnp.where(is_of_unit, bit, self.present[...])
            return carry

        lax.fori_loop(0, plan.units, one, None)
