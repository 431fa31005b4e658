"""New tokens of a step: the program that reads a tile of keys writes the new tokens in it to the cache first.

Only one program reads a tile of a row and kv head, since all queries of the row are in one tile of queries. No other
row reads what a call writes, since pages that rows share are full.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from attnops_caches import NewTokens, StoredCache

# Names of the store's arrays.
ARRAYS = ("key", "value", "key_scale", "value_scale")


def token_arrays(cache: StoredCache, new: NewTokens) -> dict[str, jax.Array]:
    """The kernel's arrays: the new tokens, the slot of each row's first one, how many of them fit, and their blocks."""
    found = {f"new_{name}": x for name, x in new.tokens.items()}
    blocks = (new.blocks + cache.store.base).astype(jnp.int32)
    return found | {"new_first": new.first, "new_size": new.size, "new_blocks": blocks}


@triton.jit
def write_tokens(x, n, program, options: tl.constexpr):
    """Store the new tokens that lie in the program's tiles of keys."""
    start = tl.load(x.new_first + program.row)
    count = tl.load(x.new_size + program.row)
    first = tl.maximum(program.first * options.bk - start, 0)
    stop = tl.minimum(program.stop * options.bk - start, count)
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
        if x.key_out is not None:
            write_features(x.key_out, at, x.new_key, source, options, True)
        if x.value_out is not None:
            write_features(x.value_out, at, x.new_value, source, options, False)
        if x.key_scale_out is not None:
            tl.store(x.key_scale_out + at, tl.load(x.new_key_scale + source))
        if x.value_scale_out is not None:
            tl.store(x.value_scale_out + at, tl.load(x.new_value_scale + source))
    tl.debug_barrier()


@triton.jit
def write_features(target, at, new, source, options: tl.constexpr, of_keys: tl.constexpr):
    """Store one token."""
    features: tl.constexpr = options.keys if of_keys else options.values
    columns = tl.arange(0, features.size)
    if features.size > features.width:
        token = tl.load(new + source * features.width + columns, mask=columns < features.width)
        tl.store(target + at * features.width + columns, token, mask=columns < features.width)
    else:
        tl.store(target + at * features.width + columns, tl.load(new + source * features.width + columns))
