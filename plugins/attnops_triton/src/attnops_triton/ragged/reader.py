"""The reader of caches on GPUs: Triton kernels that read them in place, and write a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import jax

from attnops import AttentionRequest, OperationOutput, Reason
from attnops.biases import Bias
from attnops.kernels import FlashCall
from attnops.masks import Mask
from attnops_caches import CacheLimits, CacheReader, NewTokens, StoredCache
from attnops_caches.masks import by_query
from attnops_triton.ragged.limits import not_written, unsupported

CacheType = TypeVar("CacheType", bound=StoredCache)


class TritonCacheReader(CacheReader):
    """Reads every storage and codec in place; Triton is imported by the first call."""

    limits: ClassVar[CacheLimits] = CacheLimits(
        storages=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
        codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2"}),
        latent=True,
        packed=True,
    )
    writes: ClassVar[bool] = True

    # The contract's options, a parameter each.
    def attend(
        self,
        operation: Any,
        query: jax.Array,
        cache: Any,
        *,
        mask: Mask,
        bias: Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        return_lse: bool = False,
    ) -> OperationOutput:
        """See `attnops_caches.CacheReader.attend`."""
        output, _ = _run(
            operation, query, cache, None, mask=mask, bias=bias, softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap, sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
        return output

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """See `attnops_caches.CacheReader.unsupported`."""
        return unsupported(request)

    def not_written(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """See `attnops_caches.CacheReader.not_written`."""
        return not_written(request, operation.metadata)

    def step(
        self, operation: Any, query: jax.Array, cache: CacheType, new: NewTokens, **options: Any
    ) -> tuple[OperationOutput, CacheType]:
        """See `attnops_caches.CacheReader.step`."""
        return _run(operation, query, cache, new, **options)


def _run(
    operation: Any, query: jax.Array, cache: CacheType, new: NewTokens | None, *, mask: Mask, return_lse: bool = False,
    **options: Any,
) -> tuple[OperationOutput, CacheType]:  # fmt: skip
    from attnops_triton.ragged.attention import cached_attention

    is_packed = query.shape[0] == 1 and cache.batch > 1
    rows = (1, cache.batch * cache.length) if is_packed else (cache.batch, cache.length)
    key, value = (jax.ShapeDtypeStruct((*rows, cache.kv_heads, d), query.dtype) for d in
                  (cache.head_dim, cache.value_head_dim))  # fmt: skip
    mask = by_query(mask, (key.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    call = FlashCall(operation.metadata, query, key, value, mask, **options)
    out, lse, cache = cached_attention(call, cache, return_lse, new)
    return OperationOutput(out, None, lse), cache
