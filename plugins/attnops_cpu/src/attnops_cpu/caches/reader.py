"""The reader of caches on CPUs: a C++ kernel that reads them in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final, Unpack

import jax

from attnops import AttentionRequest, OperationOutput, Reason
from attnops.kernels import FlashCall
from attnops_caches import CacheLimits, CacheOptions, CacheReader
from attnops_cpu.caches.attention import cached_attention
from attnops_cpu.library import library

# Up to so many queries a row, keys take longer to read than to multiply with; the kernel is laid out for it.
MOST_QUERIES: Final = 16


class CpuCacheReader(CacheReader):
    """Reads every storage in place, and every codec except int4; a batch of at most `MOST_QUERIES` queries a row."""

    limits: ClassVar[CacheLimits] = CacheLimits(
        storages=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
        codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2"}),
        latent=True,
    )

    def attend(self, operation: Any, query: jax.Array, cache: Any, **options: Unpack[CacheOptions]) -> OperationOutput:
        """Attention over the cache, as `attnops_caches.CacheReader.attend` describes it."""
        key, value = (
            jax.ShapeDtypeStruct((cache.batch, cache.length, cache.kv_heads, d), query.dtype)
            for d in (cache.head_dim, cache.value_head_dim)
        )
        call = FlashCall.of(operation.metadata, query, key, value, options)
        return OperationOutput(*_result(*cached_attention(call, cache, options.get("return_lse", False))))

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """Reasons why a cache can't be read in place, as `attnops_caches.CacheReader.unsupported` describes them."""
        if (problem := library().problem) is not None:
            yield problem
        if (T := request.query_length) > MOST_QUERIES:
            rule = f"must be at most {MOST_QUERIES} tokens a row for the kernel that reads caches"
            yield Reason("query", T, rule, "native `flash` computes longer chunks in tiles")
        if request.key_length >= 1 << 31:
            yield Reason("cache", request.key_length, "slots of a row are more than int32 counts")

    def not_shared(self, request: AttentionRequest) -> Iterable[Reason]:
        """Why each row reads the pages that it shares with others."""
        yield Reason("cache", str(request.source), "is read row by row: attnops-cpu has no cascade attention")


def _result(out: jax.Array, lse: jax.Array | None) -> tuple[jax.Array, None, jax.Array | None]:
    return out, None, lse
