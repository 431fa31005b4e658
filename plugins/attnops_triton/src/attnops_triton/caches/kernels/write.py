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
    start = tl.load(x.new_first + program.row)
    count = tl.load(x.new_size + program.row)
    first = tl.maximum(program.first * options.tiles.bk - start, 0)
    stop = tl.minimum(program.stop * options.tiles.bk - start, count)
    for token in range(first, stop):
        slot = start + token
        blocks = x.new_blocks + program.row * options.new_blocks
        if options.page > 0:
            block = tl.load(blocks + slot // options.page - start // options.page).to(tl.int64)
            at = (block * options.K + program.k) * options.page + slot % options.page
        else:
            block = tl.load(blocks).to(tl.int64)
            at = (block * options.K + program.k) * n.S + slot
        source = (program.b.to(tl.int64) * options.K + program.k) * n.T + token
        write_features(x.written.key, at, x.new.key, source, options, True)
        if x.written.value is not None:
            write_features(x.written.value, at, x.new.value, source, options, False)
        if x.written.key_scale is not None:
            tl.store(x.written.key_scale + at, tl.load(x.new.key_scale + source))
        if x.written.value_scale is not None:
            tl.store(x.written.value_scale + at, tl.load(x.new.value_scale + source))
    tl.debug_barrier()


@triton.jit
def write_features(target, at, new, source, options: tl.constexpr, of_keys: tl.constexpr):
    """Store one token."""
    features: tl.constexpr = options.keys if of_keys else options.values
    size: tl.constexpr = triton.next_power_of_2(features.width)
    columns = tl.arange(0, size)
    if size > features.width:
        token = tl.load(new + source * features.width + columns, mask=columns < features.width)
        tl.store(target + at * features.width + columns, token, mask=columns < features.width)
    else:
        tl.store(target + at * features.width + columns, tl.load(new + source * features.width + columns))
