"""The number of transfers that the TPU kernel over caches starts, and their bytes, counted in Pallas's interpreter.

``tpu_decode.py --bytes`` prints them, for one token per row over pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, SlidingWindow
from attnops_caches import PagedCache, Quantized
from attnops_tpu.generations import target

# Lengths of the rows: the last token is inside a page, at the end of one, and at the start of one.
LENGTHS: Final = 4000, 2048, 4097
KV_HEADS, GROUPS, HEAD_DIM = 2, 4, 128


def cache_of(page: int, codec: str) -> PagedCache:
    """A cache with rows of `LENGTHS`; the values of its tokens do not matter."""
    max_pages = -(-max(LENGTHS) // page)
    table = np.arange(len(LENGTHS) * max_pages).reshape(len(LENGTHS), max_pages)
    cache = PagedCache.create(
        batch=len(LENGTHS), pages=table.size, page_size=page, max_pages=max_pages, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        table=table, codec=Quantized(codec) if codec else None,
    )  # fmt: skip
    return dataclasses.replace(cache, lengths=jnp.asarray(LENGTHS, jnp.int32))


def transfers(cache: PagedCache, window: int | None, generation: str) -> list[int]:
    """The bytes of each transfer of a call."""
    mask = Causal() if window is None else Causal() & SlidingWindow(window - 1, 0)
    query = jnp.zeros((cache.batch, 1, cache.kv_heads * GROUPS, cache.head_dim), cache.dtype)

    def call(op: Any) -> jax.Array:
        out: jax.Array = jax.jit(lambda query, cache: op(query, cache, mask=mask).attention_outputs)(query, cache)
        return out

    return recorded(call, generation)[1]


def recorded(call: Callable[[Any], jax.Array], generation: str) -> tuple[jax.Array, list[int]]:
    """What ``call(op)`` returns, and the bytes of each transfer; op is `flash` in Pallas's interpreter."""
    from jax._src.pallas.mosaic.interpret.interpret_pallas_call import DMA

    sizes: list[int] = []
    write = DMA.execute_write

    def record(self: Any) -> None:
        if self.data is not None:
            sizes.append(self.data_size)
        write(self)

    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    DMA.execute_write = record  # type: ignore[method-assign]
    try:
        with target(generation):
            out = jax.block_until_ready(call(operation))
    finally:
        DMA.execute_write = write  # type: ignore[method-assign]
    return out, sizes


def traffic(generation: str, pages: list[int]) -> Iterator[dict[str, Any]]:
    """The lines of a table, one per case: the bytes that were moved relative to the least, and the transfers."""
    for codec in ("", "int8"):
        for page in pages if not codec else [128]:
            for window in (None, 128, 1024):
                cache = cache_of(page, codec)
                started = transfers(cache, window, generation)
                first = [0 if window is None else max(n - window, 0) for n in LENGTHS]
                seen = sum(n - x for n, x in zip(LENGTHS, first, strict=True))
                least = seen * cache.bytes_per_token
                spanned = sum(-(-n // page) - x // page for n, x in zip(LENGTHS, first, strict=True))
                yield {
                    "stored as": codec or "bfloat16", "page": page, "window": window or "–",
                    "moved / least": sum(started) / least,
                    "allowed": 1.05 if window is None else (window + 2 * page) / window,
                    "transfers": len(started), "at most": spanned * (3 if codec else 1) + 2 * len(LENGTHS),
                    "bytes per token": cache.bytes_per_token,
                    "of bfloat16's": cache.bytes_per_token / cache_of(page, "").bytes_per_token,
                }  # fmt: skip
