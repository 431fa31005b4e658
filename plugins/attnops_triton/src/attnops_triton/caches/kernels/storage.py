"""Where the tokens of a row lie, and loads of a tile of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest

from attnops_triton.caches.kernels.codec import decode


class Tile(NamedTuple):
    """A tile of keys."""

    slot: Any  # [bk], its slots in the row
    block: Any  # the block that a slot is in, for the whole tile or [bk]
    within: Any  # [bk], the place in the block
    present: Any  # whether the row's page is in the table; True without pages, or if it is known to be
    slots: Any  # slots per block


@triton.jit
def is_in_table(entry, n):
    """Whether an entry of the table is a page."""
    return (entry >= 0) & (entry < n.blocks)


@triton.jit
def first_missing_page(x, n, row, first, stop, options: tl.constexpr):
    """The first page of a row, from ``first`` to before ``stop``, that is not in the table; ``stop`` for none."""
    missing = stop
    for at in range(first, stop, options.scanned):
        number = at + tl.arange(0, options.scanned)
        entry = tl.load(x.table + row.to(tl.int64) * n.pages + number, mask=number < stop, other=0)
        missing = tl.minimum(missing, -tl.reduce(tl.where(is_in_table(entry, n), -stop, -number), 0, largest))
    return missing


@triton.jit
def load_entry(x, n, program, start, options: tl.constexpr):
    """The table's entry for the slots from ``start`` on, for the whole tile or [bk]; 0 without pages. Beyond the row's
    last page it is that page's.
    """
    entry = 0
    if options.page > 0:
        if options.by_page:
            page = start // options.page
        else:
            page = (start + tl.arange(0, options.tiles.bk)) // options.page
        entry = tl.load(x.table + program.row.to(tl.int64) * n.pages + tl.minimum(page, n.pages - 1))
    return entry


@triton.jit
def locate_tile(n, program, start, entry, options: tl.constexpr, has_pages: tl.constexpr):
    """The `Tile` from the slot ``start`` on, whose `load_entry` is ``entry``; ``has_pages``: whether all of its pages
    are in the table.
    """
    slot = start + tl.arange(0, options.tiles.bk)
    present = True
    if options.page == 0:
        block = program.row + program.base
        within = slot
        slots = n.S
    else:
        if options.by_page:
            within = start % options.page + tl.arange(0, options.tiles.bk)
        else:
            within = slot % options.page
        if not has_pages:
            present = is_in_table(entry, n)
            entry = tl.where(present, entry, 0)
        block = entry + program.base
        slots = options.page
    return Tile(slot, block.to(tl.int64), within, present, slots)


@triton.jit
def columns_of(i: tl.constexpr, options: tl.constexpr, of_keys: tl.constexpr):
    """The features of a chunk of keys or values, [1, width]."""
    features: tl.constexpr = options.keys if of_keys else options.values
    return (features.chunks[i].start + tl.arange(0, features.chunks[i].width))[None, :]


@triton.jit
def mask_of(i: tl.constexpr, rows, options: tl.constexpr, of_keys: tl.constexpr):
    """Which elements of a chunk exist, of those in ``rows``."""
    features: tl.constexpr = options.keys if of_keys else options.values
    mask = rows[:, None]
    if features.chunks[i].is_padded:
        mask = mask & (columns_of(i, options, of_keys) < features.chunks[i].stop)
    return mask


@triton.jit
def load_tokens(array, tile, k, seen, options: tl.constexpr, of_keys: tl.constexpr, guarded: tl.constexpr):
    """The chunks of a tile's keys or values, [bk, width], in the dtype of operands. If ``guarded``, keys that are not
    ``seen`` are 0 instead of loaded.
    """
    features: tl.constexpr = options.keys if of_keys else options.values
    rows = (tile.block * options.K + k) * (tile.slots * features.width)
    if options.page > 0 and not options.by_page:
        at = array + (rows + tile.within * features.width)[:, None]
    else:
        at = array + rows + (tile.within * features.width)[:, None]
    loaded = ()
    for i in tl.static_range(len(features.chunks)):
        if features.chunks[i].upper == 0:  # else its bytes are those of the chunk before
            columns = columns_of(i, options, of_keys)
            if guarded:
                chunk = tl.load(at + features.first + columns, mask=mask_of(i, seen, options, of_keys), other=0)
            elif features.chunks[i].is_padded:
                chunk = tl.load(at + features.first + columns, mask=columns < features.chunks[i].stop, other=0)
            else:
                chunk = tl.load(at + features.first + columns)
        loaded = loaded + (decode(chunk, features.chunks[i].upper, options),)
    return loaded


@triton.jit
def load_scales(scales, tile, k, seen, options: tl.constexpr, guarded: tl.constexpr):
    """The scales of a tile's keys or values, [bk]."""
    at = scales + (tile.block * options.K + k) * tile.slots + tile.within
    return tl.load(at, mask=seen, other=0.0) if guarded else tl.load(at)
