"""The reader of caches on CPUs: a C++ kernel reads them in place; native `flash` serves the calls that it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Unpack

import jax

from attnops import AttentionRequest, OperationOutput, Reason
from attnops.kernels import FlashCall
from attnops_caches import (
    CacheLimits,
    CacheOptions,
    CacheReader,
    CacheRequest,
    NativeFlashReader,
    cache_of,
    slots_of_row,
)
from attnops_caches.masks import Packed, PackedByRow
from attnops_cpu.caches.attention import cached_attention
from attnops_cpu.library import library

# Up to this many queries per row, biases are arrays with a number for each score.
MOST_QUERIES: Final = 16
# The calls that the kernel serves.
_KERNEL: Final = CacheLimits(
    storages=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
    codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2", "int4"}),
    latent=True,
    packed=True,
)
_NATIVE: Final = NativeFlashReader()


class CpuCacheReader(CacheReader):
    """Reads every cache in place: by the kernel, or by native `flash`, tile by tile, if there are `kernel_reasons`."""

    limits: ClassVar[CacheLimits] = NativeFlashReader.limits

    def attend(
        self, operation: Any, query: jax.Array, cache: Any, *, return_max_logits: bool = False,
        **options: Unpack[CacheOptions],
    ) -> OperationOutput:  # fmt: skip
        """See `attnops_caches.CacheReader.attend`."""
        is_packed = isinstance(options["mask"], (Packed, PackedByRow))
        described = dataclasses.replace(cache.describe(), is_packed=is_packed)
        # The kernel computes positions of packed rows, which have gaps where a mesh shards the slots of pages.
        has_gaps = is_packed and cache.whole_block and described.page_size
        if has_gaps or _reasons(described, query.shape[1], cache.length, options.get("bias") is not None):
            return _NATIVE.attend(operation, query, cache, return_max_logits=return_max_logits, **options)
        key, value = (
            jax.ShapeDtypeStruct((cache.batch, cache.length, cache.kv_heads, d), query.dtype)
            for d in (cache.head_dim, cache.value_head_dim)
        )
        call = FlashCall.of(operation.metadata, query, key, value, options).replace(max_logits=return_max_logits)
        out, lse, highest = cached_attention(call, cache, options.get("return_lse", False))
        return OperationOutput(out, None, lse, highest)

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """See `attnops_caches.CacheReader.unsupported`."""
        yield from _NATIVE.unsupported(operation, request)
        if (problem := library().problem) is not None:
            yield problem

    def not_shared(self, request: AttentionRequest) -> Iterable[Reason]:
        """Why pages that rows share are read once per row."""
        if kernel_reasons(request):
            return _NATIVE.not_shared(request)
        return [Reason("cache", cache_of(request).storage, "is read row by row by attnops-cpu's kernel")]


def kernel_reasons(request: AttentionRequest) -> list[Reason]:
    """Why native `flash` computes a call over a cache; empty if the kernel does."""
    return _reasons(cache_of(request), request.query_length, slots_of_row(request), bool(request.bias_kind))


def _reasons(cache: CacheRequest, T: int, slots: int, has_bias: bool) -> list[Reason]:
    reasons = _KERNEL.reasons(cache)
    if has_bias and MOST_QUERIES * (cache.rows if cache.is_packed else 1) < T:
        rule = f"must be at most {MOST_QUERIES} tokens a row with a bias for attnops-cpu's kernel over caches"
        reasons.append(Reason("query", T, rule, "native `flash` computes the bias of longer chunks in tiles"))
    if slots >= 1 << 31:
        reasons.append(Reason("cache", slots, "slots of a row are more than int32 counts"))
    return reasons
