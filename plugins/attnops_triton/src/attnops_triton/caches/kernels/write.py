"""New tokens of a step: the program that reads a tile of keys writes the new tokens in it to the cache first.

Only one program reads a tile of a row and kv head, since all queries of the row are in one tile of queries. No other
row reads what a call writes, since pages that rows share are full.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
        if options.is_joined:
            write_features(
                x.written.key, at, options.keys.width, x.new.key, x.new.value, source, options.D, options.Dv, options
            )
        else:
            write_features(x.written.key, at, options.keys.width, x.new.key, None, source, options.D, 0, options)
        if x.written.value is not None:
            write_features(x.written.value, at, options.values.width, x.new.value, None, source, options.Dv, 0, options)
        by_head = (program.b.to(tl.int64) * options.K + program.k) * n.T + token
        if x.written.key_scale is not None:
            tl.store(x.written.key_scale + at, tl.load(x.new.key_scale + by_head))
        if x.written.value_scale is not None:
            tl.store(x.written.value_scale + at, tl.load(x.new.value_scale + by_head))
    tl.debug_barrier()


@triton.jit
def write_features(
    target, at, width: tl.constexpr, new, last, source, D: tl.constexpr, Dv: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """Store a token of ``width`` elements: D features of ``new``, zeros, and Dv of ``last``, which may be None."""
    number: tl.constexpr = D // options.per_element
    last_number: tl.constexpr = Dv // options.per_element
    columns = tl.arange(0, triton.next_power_of_2(width))
    token = tl.load(new + source * number + columns, mask=columns < number, other=0)
    if last is not None:
        column = columns - (width - last_number)
        is_last = (column >= 0) & (column < last_number)
        token = tl.where(is_last, tl.load(last + source * last_number + column, mask=is_last, other=0), token)
    tl.store(target + at * width + columns, token, mask=columns < width)
