"""Which calls over a cache the kernels read in place."""

from __future__ import annotations

from collections.abc import Iterator

from attnops import AttentionRequest, OperationMetadata, Reason
from attnops_caches import cache_of, slots_of_row
from attnops_triton.caches.tile_sizes import rows_of


def unsupported(request: AttentionRequest) -> Iterator[Reason]:
    """Reasons why a cache can't be read in place, in addition to those of `attnops_caches.CacheLimits`."""
    if request.interpret and "bfloat16" in request.dtypes:
        yield Reason("dtype", "bfloat16", "Triton's interpreter computes it wrongly", "interpret float32 or float16")
    if request.key_length >= 1 << 31:
        yield Reason("cache", request.key_length, "slots in all rows together are more than int32 counts",
                     "give packed rows in several calls")  # fmt: skip
    cache = cache_of(request)
    if cache.latent and cache.codec == "int4":
        yield Reason("cache", "latent int4", "has values in parts of both halves of keys, which are not read in place",
                     "use an 8-bit codec")  # fmt: skip
    slots, features = cache.page_size or slots_of_row(request), max(cache.width, request.value_head_dim)
    if slots * features >= 1 << 31:
        yield Reason("cache", slots, f"slots of {features} features of one head are more than int32 counts",
                     "use a PagedCache")  # fmt: skip


def not_written(request: AttentionRequest, metadata: OperationMetadata) -> Iterator[Reason]:
    """Reasons why the kernel can't write a step's new tokens, which needs that only one program reads each tile of
    keys.
    """
    cache = cache_of(request)
    if cache.is_packed:
        yield Reason("rows", "given", "the kernel writes no tokens of packed rows")
    G = request.heads // request.kv_heads
    queries, dim = request.query_length, max(request.head_dim, request.value_head_dim)
    rows = rows_of(metadata.block_q, queries, G, dim, bool(cache.codec))
    if queries * G > rows:
        yield Reason("query", queries, f"times {G} heads is more than one tile of {rows} rows, each of "
                     f"which would write the tokens", "give fewer tokens per step")  # fmt: skip
    if cache.storage == "WindowCache":
        yield Reason("cache", cache.storage, "has new tokens in the slots of tokens that queries still see")
