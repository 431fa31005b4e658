"""New tokens of a step: the program that reads a tile of keys writes the new tokens in it to the cache first.

Only one program reads a tile of a row and kv head, since all queries of the row are in one tile of queries. No other
row reads what a call writes, since pages that rows share are full.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops_caches import NewTokens, StoredCache
from attnops_triton.caches.plan import CachePlan
from attnops_triton.language.source import SourceWriter

# Names of the store's arrays; the kernel's variables have the same names.
ARRAYS = ("key", "value", "key_scale", "value_scale")


def token_arrays(cache: StoredCache, new: NewTokens) -> dict[str, jax.Array]:
    """The kernel's arrays: the new tokens, the slot of each row's first one, how many of them fit, and their blocks."""
    found = {f"new_{name}": x for name, x in new.tokens.items()}
    blocks = (new.blocks + cache.store.base).astype(jnp.int32)
    return found | {"new_first": new.first, "new_size": new.size, "new_blocks": blocks}


def write_tokens(write: SourceWriter, plan: CachePlan, arrays: dict[str, int]) -> None:
    """Write the stores of the new tokens that lie in the program's tiles of keys.

    Args:
        write: the kernel's lines.
        plan: the plan of the call.
        arrays: features per token of each array of the cache that is written, by name; 0 for scales.
    """
    bk, n = plan.tiles.bk, plan.page
    # The blocks per row in which T tokens may lie, as `attnops_caches.PagedCache.place` lists them.
    blocks = 1 if plan.writes == 1 or not n else (plan.writes - 1) // n + 2
    write(
        *(f"{name}_ptr = {name}_out_ptr" for name in arrays),
        "new_start = tl.load(new_first_ptr + row)",
        "new_count = tl.load(new_size_ptr + row)",
        f"new_from = tl.maximum(first * {bk} - new_start, 0)",
        f"new_to = tl.minimum(stop * {bk} - new_start, new_count)",
    )
    with write.block("for token in range(new_from, new_to):"):
        write("new_slot = new_start + token")
        if n:
            write(
                f"new_page = new_slot // {n} - new_start // {n}",
                f"new_block = tl.load(new_blocks_ptr + row * {blocks} + new_page).to(tl.int64)",
                f"new_row = (new_block * {plan.K} + k) * {n} + new_slot % {n}",
            )
        else:
            write(
                f"new_block = tl.load(new_blocks_ptr + row * {blocks}).to(tl.int64)",
                f"new_row = (new_block * {plan.K} + k) * S + new_slot",
            )
        write(f"new_source = ((b.to(tl.int64) * {plan.K} + k) * T + token)")
        for name, width in arrays.items():
            if not width:
                write(f"tl.store({name}_out_ptr + new_row, tl.load(new_{name}_ptr + new_source))")
                continue
            size = 1 << (width - 1).bit_length()
            write(f"new_features = tl.arange(0, {size})")
            guard = f", mask=new_features < {width}" if size > width else ""
            write(
                f"new_token = tl.load(new_{name}_ptr + new_source * {width} + new_features{guard})",
                f"tl.store({name}_out_ptr + new_row * {width} + new_features, new_token{guard})",
            )
    write("tl.debug_barrier()")
