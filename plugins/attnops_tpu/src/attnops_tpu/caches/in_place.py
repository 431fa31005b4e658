"""Packed queries and outputs that the kernel reads and writes where they are, in main memory.

A tile of queries begins at any packed query: so the axis of queries is in front of the two that registers are tiled
by. A tile of fewer queries reads those after it too, but only its own outputs are written. See NOTES.md.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.tile_sizes import most_rows

# Parts of registers of a tile of queries, all kv heads.
_PARTS: Final = 1 << 12


class Places(NamedTuple):
    """Where the queries of items are among the packed ones, int32 [items] each: arrays, or references to them."""

    first: Any  # an item's first query
    count: Any  # how many it has; 0 for items that do not exist


class PackedArrays(NamedTuple):
    """What a call over packed queries has."""

    places: Places
    out: jax.Array  # [N, K, G, value_lanes], outputs so far: 0 for queries without any


class PackedRefs(NamedTuple):
    """The references for `PackedArrays`."""

    places: Places  # in scalar memory
    item: Any  # the item of the grid step, a number; None in a declaration
    # [K, R, key_lanes], the queries of the tile: in their own layout each product would move parts of registers
    queries: Any
    out: Any  # [K, bq, G, value_lanes], the outputs of a tile
    written: Any  # a semaphore [1]


def can_be_in_place(K: int, G: int) -> bool:
    """Whether the rows of a query and kv head are whole words, and fill a part of a register or several.

    Each such part is loaded and stored by itself, and more than `_PARTS` of a tile would be too much code.
    """
    return (G in (2, 4) or G % 8 == 0) and most_rows(K) * K // min(G, 8) <= _PARTS


def begin_of(first: jax.Array, N: int, bq: int) -> jax.Array:
    """The packed query with which a tile begins: one before its ``first`` if it would reach beyond the last."""
    return jnp.minimum(first, max(N - bq, 0))


def packed_arrays(plan: CachePlan, first: jax.Array, count: jax.Array) -> PackedArrays:
    """`PackedArrays` of a call before anything is computed; ``first`` and ``count``: of tiles, int32 [B]."""
    # Written as [N, H, value_lanes], whose registers are whole.
    out = lax.optimization_barrier(jnp.zeros((plan.N, plan.H, plan.value_lanes), plan.out_dtype))
    out = out.reshape(plan.N, plan.K, plan.G, plan.value_lanes)
    return PackedArrays(Places(*(jnp.pad(x, (0, plan.items - plan.B)) for x in (first, count))), out)


def packed_queries(plan: CachePlan, query: jax.Array) -> jax.Array:
    """[N, H, D] to [N, K, G, key_lanes], or as many as a tile, times the folded factor of the scale."""
    x = query.astype(plan.dtype)
    if plan.folded != 1.0:
        x = x * jnp.asarray(plan.folded, plan.dtype)
    x = jnp.pad(x, ((0, max(plan.bq - plan.N, 0)), (0, 0), (0, plan.key_lanes - plan.D)))
    return x.reshape(-1, plan.K, plan.G, plan.key_lanes)


class Outputs(NamedTuple):
    """Writes the outputs of a tile to main memory, while the next tile is computed."""

    plan: CachePlan
    own: PackedRefs
    target: Any  # [N, K, G, value_lanes] in main memory

    def put(self, head: int, x: jax.Array) -> None:
        """Keep the outputs [R, value_lanes] of a kv head."""
        plan, out = self.plan, self.own.out
        if plan.interpret:  # the interpreter has no accesses to a reshaped reference
            out[head] = x.astype(out.dtype).reshape(out.shape[1:])
        else:
            out.reshape(plan.K, plan.R, plan.value_lanes)[head] = x.astype(out.dtype)

    def start(self) -> None:
        """Start the transfers of the tile's own queries."""
        first, count, at = self._tile(self.own.item)

        def one(head: jax.Array, carry: None) -> None:
            target = self.target.at[pl.ds(first, count), head]
            pltpu.make_async_copy(self.own.out.at[head, at], target, self.own.written.at[0]).start()
            return carry

        pl.when(count > 0)(lambda: lax.fori_loop(0, self.plan.K, one, None))

    def wait_for_last(self) -> None:
        """Wait for what the core's item before this one has written."""
        item = self.own.item - np.int32(self.plan.cores)
        pl.when(item >= 0)(lambda: self.wait(jnp.maximum(item, 0)))

    def wait(self, item: jax.Array) -> None:
        """Wait for what `start` of an item has started."""
        _, count, at = self._tile(item)
        outputs = self.own.out.at[:, at]
        pl.when(count > 0)(lambda: pltpu.make_async_copy(outputs, outputs, self.own.written.at[0]).wait())

    def _tile(self, item: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """An item's first query, how many it has, and their places in the tile."""
        first, count = (x[item] for x in self.own.places)
        return first, count, pl.ds(first - begin_of(first, self.plan.N, self.plan.bq), count)
