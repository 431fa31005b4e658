"""The reader of caches on GPUs: Triton kernels that read them in place, and write a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, Unpack

import jax

from attnops import AttentionRequest, OperationOutput, Reason
from attnops.kernels import FlashCall
from attnops_caches import CacheLimits, CacheOptions, CacheReader, NewTokens, StoredCache
from attnops_caches.masks import by_query
from attnops_triton.caches.limits import not_written, unsupported

CacheType = TypeVar("CacheType", bound=StoredCache)


class TritonCacheReader(CacheReader):
    """Reads every storage and codec in place, except latent content in int4; Triton is imported by the first call."""

    limits: ClassVar[CacheLimits] = CacheLimits(
        storages=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
        codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2", "int4"}),
        latent=True,
        packed=True,
    )
    writes: ClassVar[bool] = True

    def attend(self, operation: Any, query: jax.Array, cache: Any, **options: Unpack[CacheOptions]) -> OperationOutput:
        """Attention over the cache, as `attnops_caches.CacheReader.attend` describes it."""
        return _run(operation, query, cache, None, **options)[0]

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """Reasons why a cache can't be read in place, as `attnops_caches.CacheReader.unsupported` describes them."""
        return unsupported(request)

    def not_written(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """Reasons why `step` can't write the new tokens, as `attnops_caches.CacheReader.not_written` describes them."""
        return not_written(request, operation.metadata)

    def step(
        self, operation: Any, query: jax.Array, cache: CacheType, new: NewTokens, **options: Unpack[CacheOptions]
    ) -> tuple[OperationOutput, CacheType]:
        """Write new tokens and attend, in one kernel, as `attnops_caches.CacheReader.step` describes it."""
        return _run(operation, query, cache, new, **options)


def _run(
    operation: Any, query: jax.Array, cache: CacheType, new: NewTokens | None,
    **options: Unpack[CacheOptions],
) -> tuple[OperationOutput, CacheType]:  # fmt: skip
    from attnops_triton.caches.attention import cached_attention

    is_packed = query.shape[0] == 1 and cache.batch > 1
    rows = (1, cache.batch * cache.length) if is_packed else (cache.batch, cache.length)
    key, value = (jax.ShapeDtypeStruct((*rows, cache.kv_heads, d), query.dtype) for d in
                  (cache.head_dim, cache.value_head_dim))  # fmt: skip
    options["mask"] = by_query(options["mask"], (key.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    call = FlashCall.of(operation.metadata, query, key, value, options)
    out, lse, cache = cached_attention(call, cache, options.get("return_lse", False), new)
    return OperationOutput(out, None, lse), cache
