"""Pages missing from a row's table, between others that it has: their keys are masked.

Such gaps are rare, so the bits that say which pages are in the table are only transferred when a tile needs them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.plan import BITS, CachePlan
from attnops_tpu.caches.references import CacheRefs, MissingRefs, Tile
from attnops_tpu.caches.tile_sizes import LANES


@dataclasses.dataclass(frozen=True)
class MissingPages:
    """Masks the keys of missing pages, on references."""

    plan: CachePlan
    refs: CacheRefs  # the references of the grid step
    scratch: MissingRefs  # those of missing pages

    def begin(self) -> None:
        """Before the first tile of a core."""
        self._reset()

    def enter(self, tile: Tile) -> None:
        """Before the keys of a tile are masked."""
        pl.when(self.refs.schedule.missing[tile.item] != 0)(lambda: self._load(tile))

    def leave(self, tile: Tile) -> None:
        """After the keys of a tile were masked."""
        pl.when(self.refs.schedule.missing[tile.item] != 0)(self._reset)

    def _reset(self) -> None:
        self.scratch.present[...] = jnp.ones(self.scratch.present.shape, jnp.int32)

    def _load(self, tile: Tile) -> None:
        plan = self.plan
        word = tile.number * plan.words
        pieces = -(-plan.nk * plan.words // LANES)
        source = self.refs.words.at[tile.row * pieces + lax.div(word, np.int32(LANES))]
        copy = pltpu.make_async_copy(source, self.scratch.loaded, self.scratch.arrived.at[0])
        copy.start()
        copy.wait()
        first = lax.rem(word, np.int32(LANES))
        key = lax.broadcasted_iota(jnp.int32, self.scratch.present.shape, 1)

        def one(unit: jax.Array, carry: None) -> None:
            bits = self.scratch.loaded[0, first + lax.div(unit, np.int32(BITS))]
            bit = lax.shift_right_logical(bits, lax.rem(unit, np.int32(BITS))) & 1
            start = unit * plan.unit
            is_of_unit = (key >= start) & (key < start + plan.unit)
            self.scratch.present[...] = jnp.where(is_of_unit, bit, self.scratch.present[...])
            return carry

        lax.fori_loop(0, plan.units, one, None)
