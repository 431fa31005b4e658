"""Where the tokens of a row lie, and loads of a tile of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnops_triton.caches.kernels.codec import decode


class Tile(NamedTuple):
    """A tile of keys."""

    slot: Any  # [bk], its slots in the row
    block: Any  # the block that a slot is in, for the whole tile or [bk]
    within: Any  # [bk], the place in the block
    present: Any  # whether the row's page is in the table; True without pages, or if it is known to be
    slots: Any  # slots per block


@triton.jit
def locate_tile(x, n, row, start, options: tl.constexpr, has_pages: tl.constexpr):
    """The `Tile` from the slot ``start`` on; ``has_pages``: whether all of its pages are in the table."""
    slot = start + tl.arange(0, options.tiles.bk)
    present = True
    if options.page == 0:
        block = row + tl.load(x.base)
        within = slot
        slots = n.S
    else:
        if options.by_page:
            page = start // options.page
            within = start % options.page + tl.arange(0, options.tiles.bk)
        else:
            page = slot // options.page
            within = slot % options.page
            if not options.is_even:
                page = tl.minimum(page, n.pages - 1)
        entry = tl.load(x.table + row.to(tl.int64) * n.pages + page)
        if not has_pages:
            present = (entry >= 0) & (entry < n.blocks)
            entry = tl.where(present, entry, 0)
        block = entry + tl.load(x.base)
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
