"""New tokens of a step: the program that reads a tile of keys writes the new tokens in it to the cache first.

Only one program reads a tile of a row and kv head, since all queries of the row are in one tile of queries. No other
row reads what a call writes, since pages that rows share are full.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnops_triton.caches.kernels.codec import encode, scale_of


@triton.jit
def write_tokens(x, n, program, options: tl.constexpr):
    """Store the new tokens that lie in the program's tiles of keys."""
    count = tl.load(x.new_size + program.row)
    start = tl.load(x.new_stop + program.row) - count
    first = tl.maximum(program.first * options.tiles.bk - start, 0)
    stop = tl.minimum(program.stop * options.tiles.bk - start, count)
    for token in range(first, stop):
        slot = start + token
        if options.page > 0:
            block = tl.load(x.table + program.row.to(tl.int64) * n.pages + slot // options.page)
            at = ((block + program.base).to(tl.int64) * options.K + program.k) * options.page + slot % options.page
        else:
            at = ((program.row + program.base).to(tl.int64) * options.K + program.k) * n.S + slot
        source = (program.b.to(tl.int64) * n.T + token) * options.K + program.k
        key, by_key = x.new.key + source * options.D, None
        value, by_value = None, None
        if x.new.value is not None:
            value = x.new.value + source * options.Dv
        if options.scales != "":
            by_key = scale_of(key, x.stored.key_scale + program.scale, options.D, options)
            if value is not None:
                by_value = scale_of(value, x.stored.value_scale + program.scale, options.Dv, options)
        if options.is_joined:
            write_features(
                x.written.key, at, options.keys.width, key, by_key, options.D, value, by_value, options.Dv, options
            )
        else:
            write_features(x.written.key, at, options.keys.width, key, by_key, options.D, None, None, 0, options)
        if x.written.value is not None:
            write_features(
                x.written.value, at, options.values.width, value, by_value, options.Dv, None, None, 0, options
            )
        if x.written.key_scale is not None:
            tl.store(x.written.key_scale + at, by_key)
        if x.written.value_scale is not None:
            tl.store(x.written.value_scale + at, by_value)
    tl.debug_barrier()


@triton.jit
def write_features(
    target, at, width: tl.constexpr, new, scale, D: tl.constexpr, last, last_scale, Dv: tl.constexpr,
    options: tl.constexpr,
):  # fmt: skip
    """Store a token of ``width`` elements: D features of ``new``, zeros, and Dv of ``last``, which may be None."""
    columns = tl.arange(0, triton.next_power_of_2(width))
    token = stored_features(new, columns, scale, D, options)
    if last is not None:
        column = columns - (width - Dv // options.per_element)
        token = tl.where(column >= 0, stored_features(last, column, last_scale, Dv, options), token)
    tl.store(target + at * width + columns, token, mask=columns < width)


@triton.jit
def stored_features(new, column, scale, d: tl.constexpr, options: tl.constexpr):
    """The elements that store ``d`` features at the pointer ``new``; 0 where ``column`` is none of them."""
    number: tl.constexpr = d // options.per_element
    exists = (column >= 0) & (column < number)
    token = tl.load(new + column, mask=exists, other=0)
    if options.scales != "":
        token = encode(token, scale, options)
        if options.per_element == 2:
            upper = encode(tl.load(new + number + column, mask=exists, other=0), scale, options)
            token = (token & 15) | (upper << 4)
    return token
