"""FlashAttention for TPUs: the operation and its limits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from attnops import AttentionRequest, Limits, OperationMetadata, OperationOutput, Reason, Request
from attnops.biases import Bias
from attnops.caches import Cache, NewTokens
from attnops.kernels import FlashBackend, FlashCall
from attnops.masks import Mask
from attnops.operations.flash import FlashAttention
from attnops_tpu.flash.primitives import PRIMITIVES
from attnops_tpu.flash.tile_sizes import LARGEST, MAX_TILES
from attnops_tpu.generations import bounds_checks, generation
from attnops_tpu.ragged.limits import unsupported as in_place
from attnops_tpu.ragged.tile_sizes import MAX_NEW, packed_queries_a_tile, queries_a_tile, unit_of

CacheType = TypeVar("CacheType", bound=Cache)


class TPUFlashAttention(FlashAttention):
    """Attention tile by tile in a Pallas kernel: O(T + S) memory, forward and backward; EMPTY tiles cost nothing.

    Serves TPUs; on other platforms, and for requests that it refuses, the core's native forward runs.
    ``metadata.interpret`` runs the kernel in Pallas's interpreter on the host. A second derivative is refused.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "tpu": Limits(
            dtypes=frozenset({"float32", "bfloat16"}),
            max_head_dim=576,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition", "ScoreFn"}),
            mask_primitives=PRIMITIVES,
            bias_primitives=PRIMITIVES,
            caches=frozenset({"DenseCache", "WindowCache", "PagedCache"}),
            codecs=frozenset({"int8", "float8_e4m3fn", "float8_e5m2"}),
            latent=True,
            packed=True,
        )
    }

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        if (self.metadata.platform or self.current_backend()) == "tpu":
            # Now, and not in the first call, which may be traced: from JAX 0.12 on Pallas makes contexts of its own,
            # and what is traced before that is traced again.
            import jax.experimental.pallas.tpu  # noqa: F401

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        if not isinstance(request, AttentionRequest):
            return
        if request.cache is not None:
            yield from in_place(request, self.metadata)
        multiple, why = (8, "the sublanes") if request.interpret else (128, "the lanes")
        for name, length in (("block_q", request.query_length), ("block_k", request.slots)):
            block = getattr(self.metadata, name)
            if block is not None and block % multiple:
                yield Reason(name, block, f"must be a multiple of {multiple}, {why} of a vector register",
                             "leave it out for the table's")  # fmt: skip
            elif length > MAX_TILES * (block or LARGEST):
                yield Reason(name, block, f"{length} tokens are more than {MAX_TILES} such tiles",
                             "leave it out for the table's, or shard the sequence")  # fmt: skip

    def environment_key(self) -> Hashable:
        """See `attnops.BaseOperation.environment_key`: whether kernels have bounds checks, and on how many cores."""
        return super().environment_key(), bounds_checks(), generation().cores

    # The contract's options that it has, a parameter each.
    def forward_tpu(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_lse: bool = False,
    ) -> OperationOutput:
        """See `attnops.OperationImpl.__call__`."""
        return self.run_backend(
            "tpu", query, key, value, return_lse, mask=mask, bias=bias, softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap, sinks=sinks, dropout_key=dropout_key,
        )  # fmt: skip

    # The contract's options, a parameter each.
    def cached_tpu(
        self,
        query: jax.Array,
        cache: Cache,
        *,
        mask: Mask,
        bias: Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        return_lse: bool = False,
    ) -> OperationOutput:
        """See `attnops.dispatch.cached`."""
        output, _ = self._over_cache(
            query, cache, None, mask=mask, bias=bias, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap,
            sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
        return output

    def _not_written(self, request: AttentionRequest) -> Iterator[Reason]:
        cache = request.cache
        assert cache is not None
        G, T = request.heads // request.kv_heads, request.query_length
        if cache.is_packed:
            # The kernel writes the tokens of rows of one tile.
            T = packed_queries_a_tile(self.metadata.block_q, T, cache.rows, G)
        tile = queries_a_tile(self.metadata.block_q, T, G)
        if tile < T and (cores := generation().cores) > 1:
            yield Reason("query", T, f"is more than one tile of {tile} queries, which {cores} cores "
                         f"compute in any order", "give block_q, or fewer tokens a step")  # fmt: skip
        unit = unit_of(cache.page_size, request.slots)
        itemsize = jnp.dtype(cache.codec or request.dtypes[1]).itemsize
        features = cache.width + (0 if cache.joined or cache.latent else request.value_head_dim)
        size = T * request.kv_heads * features * itemsize
        if size > MAX_NEW:
            yield Reason("query", T, f"new tokens a row are {size} bytes, but at most {MAX_NEW} are "
                         f"held in vector memory", "give fewer tokens a step")  # fmt: skip
        group = math.gcd(128 if cache.scales == "token_head" else 32 // itemsize, unit)
        if cache.storage == "WindowCache" and (T + group - 2) // group + 1 > request.slots // group:
            yield Reason("query", T, f"may begin and end in the same group of {group} slots, of a "
                         f"ring of {request.slots}", "create the cache with more max_append")  # fmt: skip
        packed = 4 // itemsize
        if unit % packed:
            yield Reason("page_size" if cache.page_size else "length", cache.page_size or request.slots,
                         f"must be a multiple of {packed}, the slots of a word of 32 bits")  # fmt: skip

    def stepped_tpu(
        self, query: jax.Array, cache: CacheType, new: NewTokens, **options: Any
    ) -> tuple[OperationOutput, CacheType]:
        """See `attnops.dispatch.step`."""
        return self._over_cache(query, cache, new, **options)

    def _over_cache(
        self, query: jax.Array, cache: CacheType, new: NewTokens | None, *, mask: Mask, return_lse: bool = False,
        **options: Any,
    ) -> tuple[OperationOutput, CacheType]:  # fmt: skip
        from attnops_tpu.ragged.attention import cached_attention

        key, value = (jax.ShapeDtypeStruct((cache.batch, cache.length, cache.kv_heads, d), query.dtype) for d in
                      (cache.head_dim, cache.value_head_dim))  # fmt: skip
        call = FlashCall(self.metadata, query, key, value, mask, **options)
        out, lse, cache = cached_attention(call, cache, return_lse, new)
        return OperationOutput(out, None, lse), cache

    def backend(self, forward: str) -> FlashBackend | None:
        """See `attnops.operations.flash.FlashAttention.backend`."""
        if forward != "tpu":
            return super().backend(forward)
        # Pallas is imported here, so that the plugin can be listed on machines without its requirements.
        from attnops_tpu.flash.backend import PallasFlash

        return PallasFlash()
