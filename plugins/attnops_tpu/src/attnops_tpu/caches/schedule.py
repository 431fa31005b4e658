"""Which units of keys each item reads, and which of its tiles have nothing to mask."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import merged
from attnops.masks import Coverage, Mask, block_map
from attnops_caches.masks import Slots
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.plan import BITS, CachePlan
from attnops_tpu.caches.tile_sizes import LANES

# Items of a call, and bytes that its rows may use of the 1 MiB of scalar memory, which also has the table and what the
# compiler keeps.
MAX_ITEMS: Final = 1 << 14
_SCALAR_BYTES: Final = 960 << 10
# Up to 16 values of masks and biases per row.
_ROW_BYTES: Final = 16 * 4


class ItemSchedule(NamedTuple):
    """For scalar memory, int32 [items] each: arrays, or references to them."""

    first: Any  # the first unit that an item reads
    stop: Any  # the unit after the last; ``first`` for an item without keys
    first_full: Any  # the first of the consecutive tiles of keys that are FULL
    stop_full: Any  # the tile after the last of them
    # [cores + items]: each core's first item with keys, then for each item its core's next item with keys; ``items`` if
    # there is none.
    following: Any
    # whether a page with tokens that a tile of the item reads is not in the table; [1] for storages without pages.
    missing: Any
    row: Any  # the row of the cache; [1] if it follows from the item


def rows_a_call(nq: int, words: int = 0, shared: int = 0) -> int:
    """The most rows whose schedule fits scalar memory; 0 where that of one row doesn't.

    Args:
        nq: tiles of queries per row.
        words: the words of 32 bits that a row has in scalar memory besides.
        shared: those that all rows share.
    """
    bytes_a_row = 4 * len(ItemSchedule._fields) * nq + _ROW_BYTES + 4 * words
    return min(MAX_ITEMS // nq, (_SCALAR_BYTES - 4 * shared) // bytes_a_row)


def schedule(
    plan: CachePlan,
    mask: Mask | None,
    slots: Slots | None = None,
    new: Written | None = None,
    row: jax.Array | None = None,
) -> ItemSchedule:
    """The schedule of a call: units from the first to the last that some query of an item may see.

    Args:
        plan: the plan of the call.
        mask: by slot, bound.
        slots: the slots of a paged cache; else None, and where the mask has them as arrays.
        new: tokens that are written; their units are read even if no query sees them.
        row: the row of the cache of each tile of packed rows, int32 [B].
    """
    shape = plan.B, plan.H, plan.T, plan.S
    coverage = jnp.asarray(merged(block_map(mask, shape, plan.bq, plan.unit).coverage, 1, 1)[:, 0])
    coverage = jnp.broadcast_to(coverage, (plan.B, *coverage.shape[1:])).reshape(plan.B * plan.nq, -1)
    wanting = plan.items - coverage.shape[0], plan.nk * plan.units - coverage.shape[1]
    coverage = jnp.pad(coverage, [(0, n) for n in wanting])
    active = coverage != int(Coverage.EMPTY)
    if new is not None:
        active |= _written(plan, new)
    some, first = active.any(1), active.argmax(1).astype(jnp.int32)
    stop = jnp.where(some, active.shape[1] - active[:, ::-1].argmax(1), first).astype(jnp.int32)
    # The last tile may reach beyond the slots.
    full = (coverage == int(Coverage.FULL)).reshape(plan.items, plan.nk, plan.units).all(2)
    first_full = jnp.where(full.any(1), full.argmax(1), plan.nk).astype(jnp.int32)
    after = jnp.arange(plan.nk) >= first_full[:, None]
    breaks = after & ~full
    stop_full = jnp.where(breaks.any(1), breaks.argmax(1), plan.nk).astype(jnp.int32)
    # Where a mesh shards the context, the mask has what is missing by slot.
    nothing = jnp.zeros((plan.items if plan.is_paged else 1,), jnp.int32)
    missing = nothing if slots is None else _missing(plan, slots, first, stop)
    row = jnp.zeros((1,), jnp.int32) if row is None else jnp.pad(row, (0, plan.items - plan.B))
    return ItemSchedule(first, stop, first_full, stop_full, following(plan, some), missing, row)


def _written(plan: CachePlan, new: Written) -> jax.Array:
    start = jnp.arange(plan.nk * plan.units, dtype=jnp.int32) * plan.unit
    first, stop = new.first[:, None], new.stop[:, None]
    units = (first < stop) & (start < stop) & (first < start + plan.unit) & (start < plan.S)
    if plan.is_ring:
        units |= start < stop - plan.S
    return jnp.pad(units, ((0, plan.items - units.shape[0]), (0, 0)))


def _missing(plan: CachePlan, slots: Slots, first: jax.Array, stop: jax.Array) -> jax.Array:
    page = jnp.arange(slots.exists.shape[1], dtype=jnp.int32)
    has_tokens = (page >= slots.start[:, None] // plan.unit) & (page * plan.unit < slots.stop[:, None])
    rows = jnp.minimum(jnp.arange(plan.items) // plan.nq, plan.B - 1)
    # A tile with a page that is read loads the bits of all its pages.
    first, stop = first // plan.units * plan.units, -(-stop // plan.units) * plan.units
    read = (first[:, None] <= page) & (page < stop[:, None])
    return (read & (has_tokens & ~slots.exists)[rows]).any(1).astype(jnp.int32)


def words_of_pages(plan: CachePlan, exists: jax.Array) -> jax.Array:
    """Whether pages are in the table: bits of int32 [rows · pieces, 1, 128], ``plan.words`` words per tile."""
    bits = jnp.pad(exists, ((0, 0), (0, plan.nk * plan.units - exists.shape[1]))).reshape(-1, plan.nk, plan.units)
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, plan.words * BITS - plan.units)))
    bits = bits.reshape(-1, plan.nk * plan.words, BITS)
    words = (bits.astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)).sum(2, dtype=jnp.uint32)
    words = jnp.pad(words, ((0, 0), (0, -words.shape[1] % LANES)))
    return lax.bitcast_convert_type(words, jnp.int32).reshape(-1, 1, LANES)


def following(plan: CachePlan, some: jax.Array) -> jax.Array:
    """`ItemSchedule.following`, int32 [cores + items]; ``some``: whether an item has keys, bool [items]."""
    item = jnp.arange(plan.items, dtype=jnp.int32)
    by_turn = jnp.where(some, item, plan.items).reshape(-1, plan.cores)
    least = jax.lax.cummin(by_turn, axis=0, reverse=True)
    return jnp.concatenate([least, jnp.full((1, plan.cores), plan.items, jnp.int32)]).reshape(-1)
