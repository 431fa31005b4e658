"""The reader of caches on TPUs: one Pallas kernel that reads them in place, and writes a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, Unpack

import jax
import jax.numpy as jnp

from attnops import AttentionRequest, OperationOutput, Reason
from attnops.kernels import FlashCall
from attnops_caches import CacheLimits, CacheOptions, CacheReader, NewTokens, StoredCache, cache_of, slots_of_row
from attnops_tpu.caches.limits import unsupported
from attnops_tpu.caches.new_tokens import group_of, groups_of
from attnops_tpu.caches.prompts import MAX_CHUNKS, bytes_of_token, chunk_of, most_chunks
from attnops_tpu.caches.tile_sizes import MAX_NEW, Heads, packed_queries_a_tile, queries_a_tile, unit_of
from attnops_tpu.generations import generation

CacheType = TypeVar("CacheType", bound=StoredCache)


class TPUCacheReader(CacheReader):
    """Reads every storage and codec in place, int4 of some head dims; Pallas is imported by the first call."""

    limits: ClassVar[CacheLimits] = CacheLimits(
        storages=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
        codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2", "int4"}),
        latent=True,
        packed=True,
    )
    writes: ClassVar[bool] = True

    def attend(self, operation: Any, query: jax.Array, cache: Any, **options: Unpack[CacheOptions]) -> OperationOutput:
        """See `attnops_caches.CacheReader.attend`."""
        return _run(operation, query, cache, None, **options)[0]

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """See `attnops_caches.CacheReader.unsupported`."""
        return unsupported(request, operation.metadata)

    def not_written(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """See `attnops_caches.CacheReader.not_written`."""
        cache, slots = cache_of(request), slots_of_row(request)
        T, chip, metadata = request.query_length, generation(), operation.metadata
        heads = Heads.of(request.heads, request.kv_heads, request.dtypes[:2], cache.latent, metadata)
        # The most tokens of a row with one tile of queries, and whether there are others.
        tile, _ = queries_a_tile(chip, metadata.block_q, T, heads)
        if cache.is_packed:
            tile, _ = packed_queries_a_tile(chip, metadata.block_q, T, cache.rows, heads)
        unit = unit_of(cache.page_size, slots)
        itemsize = jnp.dtype(cache.codec or request.dtypes[1]).itemsize
        features = [cache.width] if cache.joined or cache.latent else [cache.width, request.value_head_dim]
        elements = [n // (2 if cache.codec == "int4" else 1) for n in features]
        scales = (1 if cache.latent else 2) if cache.scales == "token_head" else 0
        size = bytes_of_token(request.kv_heads, elements, itemsize, scales)
        group = group_of(cache.scales == "token_head", itemsize, unit, chip.sublanes)
        if tile < T and chip.cores > 1 and not cache.is_packed:
            yield Reason("query", T, f"is more than one tile of {tile} queries, which {chip.cores} cores "
                         f"compute in any order", "give block_q, or fewer tokens a step")  # fmt: skip
        if tile * size > MAX_NEW:
            yield Reason("query", T, f"new tokens a tile are {tile * size} bytes, but at most {MAX_NEW} are "
                         f"held in vector memory", "give fewer tokens a step")  # fmt: skip
        chunk = chunk_of(unit, group, size)
        chunks = most_chunks(T, cache.rows if cache.is_packed else request.batch, cache.is_packed, chunk)
        if tile < T and chunks > MAX_CHUNKS:
            yield Reason("query", T, f"new tokens may be {chunks} pieces of {chunk} slots, but scalar memory has the "
                         f"places of {MAX_CHUNKS}", "give fewer tokens a step, or larger pages")  # fmt: skip
        group = group if tile >= T else chunk
        if cache.storage == "WindowCache" and groups_of(T, group) > slots // group:
            yield Reason("query", T, f"may begin and end in the same {group} slots, of a "
                         f"ring of {slots}", "create the cache with more max_append")  # fmt: skip
        packed = 4 // itemsize
        if unit % packed:
            yield Reason("page_size" if cache.page_size else "length", cache.page_size or slots,
                         f"must be a multiple of {packed}, the slots of a word of 32 bits")  # fmt: skip

    def step(
        self, operation: Any, query: jax.Array, cache: CacheType, new: NewTokens, **options: Unpack[CacheOptions]
    ) -> tuple[OperationOutput, CacheType]:
        """See `attnops_caches.CacheReader.step`."""
        return _run(operation, query, cache, new, **options)


def _run(
    operation: Any, query: jax.Array, cache: CacheType, new: NewTokens | None,
    **options: Unpack[CacheOptions],
) -> tuple[OperationOutput, CacheType]:  # fmt: skip
    from attnops_tpu.caches.attention import cached_attention

    key, value = (jax.ShapeDtypeStruct((cache.batch, cache.length, cache.kv_heads, d), query.dtype) for d in
                  (cache.head_dim, cache.value_head_dim))  # fmt: skip
    call = FlashCall.of(operation.metadata, query, key, value, options)
    out, lse, cache = cached_attention(call, cache, options.get("return_lse", False), new)
    return OperationOutput(out, None, lse), cache
