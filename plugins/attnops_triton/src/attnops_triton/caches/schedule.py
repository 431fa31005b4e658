"""Which tiles of keys each item reads, and which of them need no mask."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnops.kernels import merged
from attnops.masks import And, Coverage, Mask, Segments, block_map
from attnops_caches import NewTokens
from attnops_triton.caches.intervals import Interval, of_tiles
from attnops_triton.caches.plan import CachePlan
from attnops_triton.flash.plan import cdiv


class ItemSchedule(NamedTuple):
    """What the kernel needs to know of each item; int32.

    Attributes:
        ranges: [items] each: start and stop of the tiles that an item reads; start and stop of those that need no mask;
            and, with `KernelOptions.in_order`, tiles per split.
        row: [items], for packed rows: the row of the cache that an item reads; else None.
        tile: [items], for packed rows: an item's tile of queries; else None.
    """

    ranges: tuple[jax.Array, ...]
    row: jax.Array | None
    tile: jax.Array | None


def schedule(
    plan: CachePlan, mask: Mask, seen: Interval | None, lengths: jax.Array, new: NewTokens | None = None
) -> ItemSchedule:
    """The schedule of a call: tiles from the first to the last with a key that a query of the item may see.

    Args:
        plan: the plan of the call.
        mask: the bound mask, with slots as keys, as if every page were in the table.
        seen: the same as intervals, if the kernel has it so.
        lengths: the lengths of the cache's rows.
        new: the tokens that the kernel writes; their tiles are read even if no query sees them.
    """
    if seen is not None:
        return ItemSchedule(_ranges_of(plan, seen, new), None, None)
    tiles = _tiles(plan, mask, plan.B * plan.S if plan.is_packed else plan.S)
    if not plan.is_packed:
        active, full = (jnp.broadcast_to(x, (plan.B, *x.shape[1:])).reshape(plan.items, -1) for x in tiles)
        if new is not None:
            start = jnp.arange(plan.nk, dtype=jnp.int32) * plan.tiles.bk
            first, stop = new.first[:, None], (new.first + new.size)[:, None]
            active |= (first < stop) & (start < stop) & (first < start + plan.tiles.bk)
        return ItemSchedule(_ranges(active, full), None, None)
    active, full = (x.reshape(plan.nq * plan.B, plan.nk) for x in tiles)
    # Pairs of a tile of queries and a row with queries in it.
    has_some, none = active.any(1) & _is_own(plan, mask), plan.nq * plan.B
    pairs = jnp.nonzero(has_some, size=plan.items, fill_value=none)[0].astype(jnp.int32)
    exists, pairs = pairs < none, jnp.minimum(pairs, none - 1)
    row = pairs % plan.B
    if plan.in_order:
        full = jnp.zeros_like(full)
    ranges = _ranges(active[pairs] & exists[:, None], full[pairs])
    if plan.in_order:
        # A split is a share of the tiles up to the row's last token.
        by_split = plan.tiles.bk * plan.splits
        ranges += (((jnp.clip(lengths, 0, plan.S)[row] + by_split - 1) // by_split).astype(jnp.int32),)
    return ItemSchedule(ranges, row, pairs // plan.B)


def _ranges_of(plan: CachePlan, seen: Interval, new: NewTokens | None) -> tuple[jax.Array, ...]:
    """`ItemSchedule.ranges` from the slots that each query sees."""
    some, every = of_tiles(seen, plan.bq)
    first, stop = some
    if new is not None:
        begin, end = new.first[:, None], (new.first + new.size)[:, None]
        first = jnp.where(begin < end, jnp.minimum(first, begin), first)
        stop = jnp.where(begin < end, jnp.maximum(stop, end), stop)
    unit = plan.tiles.bk.bit_length() - 1
    up = plan.tiles.bk - 1
    # The last tile of a row may reach beyond its slots, and then needs a mask.
    parts = first >> unit, (stop + up) >> unit, (every.first + up) >> unit, every.stop >> unit
    return tuple(x.reshape(plan.items).astype(jnp.int32) for x in parts)


def _is_own(plan: CachePlan, mask: Mask) -> jax.Array:
    """Whether a tile has queries of a row, [nq · rows], from the smallest and the largest row in it."""
    exists = mask.right if isinstance(mask, And) else mask
    if not isinstance(exists, Segments):
        return jnp.ones(plan.nq * plan.B, bool)  # the coverage of an array is exact
    ids = jnp.pad(jnp.asarray(exists.q_ids)[0], (0, plan.nq * plan.bq - plan.T), constant_values=-1)
    return (ids.reshape(plan.nq, plan.bq, 1) == jnp.arange(plan.B)).any(1).reshape(-1)


def _tiles(plan: CachePlan, mask: Mask, keys: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles of keys a tile of queries reads, and which need no mask, [B or 1, nq, rows · nk] booleans."""
    bk = plan.tiles.bk
    # A tile lies in one row.
    unit = math.gcd(bk, plan.S) if plan.is_packed else bk
    shape = (1 if plan.is_packed else plan.B), plan.H, plan.T, keys
    coverage = jnp.asarray(merged(block_map(mask, shape, plan.bq, unit).coverage, 1, 1)[:, 0])
    rows, units = keys // plan.S, cdiv(plan.S, unit)
    coverage = coverage.reshape(*coverage.shape[:2], rows, units)
    coverage = jnp.pad(coverage, [(0, 0)] * 3 + [(0, plan.nk * (bk // unit) - units)])
    coverage = coverage.reshape(*coverage.shape[:2], rows * plan.nk, bk // unit)
    active, full = (coverage != int(Coverage.EMPTY)).any(-1), (coverage == int(Coverage.FULL)).all(-1)
    if not plan.is_even:
        # The last tile of a row reaches beyond its slots, and so needs a mask.
        full &= jnp.arange(rows * plan.nk) % plan.nk < plan.nk - 1
    return active, full


def _ranges(active: jax.Array, full: jax.Array) -> tuple[jax.Array, ...]:
    """`ItemSchedule.ranges` from booleans [items, nk]."""
    n = active.shape[1]
    some, first = active.any(1), active.argmax(1)
    stop = jnp.where(some, n - active[:, ::-1].argmax(1), first)
    full_start = jnp.where(full.any(1), full.argmax(1), n)
    breaks = (jnp.arange(n) >= full_start[:, None]) & ~full
    full_stop = jnp.where(breaks.any(1), breaks.argmax(1), n)
    return tuple(x.astype(jnp.int32) for x in (first, stop, full_start, full_stop))
