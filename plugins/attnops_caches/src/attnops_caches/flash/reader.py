"""The reader of the core's native `flash`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final, Unpack

import jax

from attnops.errors import Reason
from attnops.kernels.flash import FlashCall
from attnops.operations.flash import FlashAttention
from attnops.output import OperationOutput
from attnops_caches.calls.limits import CacheLimits
from attnops_caches.calls.reader import READERS, CacheOptions, CacheReader, cache_of
from attnops_caches.flash.attention import cached_attention
from attnops_caches.masks.packed import by_query

if TYPE_CHECKING:
    from attnops.dispatch.request import AttentionRequest
    from attnops_caches.base import Cache

CODECS: Final = frozenset({"int8", "float8_e4m3fn", "float8_e5m2"})


class NativeFlashReader(CacheReader):
    """Reads tiles of any cache that has a loader, see `attnops_caches.Cache.loader`."""

    limits: ClassVar[CacheLimits] = CacheLimits(storages=None, codecs=CODECS, latent=True, packed=True)

    def unsupported(self, operation: FlashAttention, request: AttentionRequest) -> Iterable[Reason]:
        if not cache_of(request).has_loader:
            yield Reason("cache", cache_of(request).storage, "has no loader of tiles", "define its loader()")

    def attend(
        self, operation: FlashAttention, query: jax.Array, cache: Cache, **options: Unpack[CacheOptions]
    ) -> OperationOutput:
        """See `CacheReader.attend`."""
        is_packed = query.shape[0] == 1 and cache.batch > 1
        rows = (1, cache.batch * cache.length) if is_packed else (cache.batch, cache.length)
        key, value = (jax.ShapeDtypeStruct((*rows, cache.kv_heads, d), query.dtype) for d in
                      (cache.head_dim, cache.value_head_dim))  # fmt: skip
        options["mask"] = by_query(options["mask"], (key.shape[0], query.shape[2], query.shape[1], key.shape[1]))
        call = FlashCall.of(operation.metadata, query, key, value, options)
        loader = cache.loader()
        assert loader is not None
        out, lse = cached_attention(call, loader, is_packed)
        return OperationOutput(out, None, lse if options.get("return_lse") else None)


READERS[FlashAttention] = {"native": NativeFlashReader()}
