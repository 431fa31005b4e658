"""Which calls over a cache the kernel reads in place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp

from attnops import AttentionRequest, OperationMetadata, Reason
from attnops_caches import cache_of, slots_of_row
from attnops_tpu.caches.schedule import MAX_ITEMS, rows_a_call
from attnops_tpu.caches.tile_sizes import LANES, Heads, queries_a_tile, unit_of
from attnops_tpu.flash.primitives import PRIMITIVES
from attnops_tpu.generations import generation

# The masks with values by query, by key or by row that the kernel computes for packed rows: it looks them up by row.
_BY_ROW: Final = frozenset({
    "Full", "Causal", "SlidingWindow", "Chunked", "PrefixLM", "Segments", "Lengths", "KeyPadding", "MaskFn", "Band",
    "&", "|", "~", "at",
})  # fmt: skip


def unsupported(request: AttentionRequest, metadata: OperationMetadata) -> Iterator[Reason]:
    """Why a call over a cache can't be read in place, other than by `attnops_caches.CacheLimits`."""
    cache = cache_of(request)
    if request.bias_kind in ("array", "RelativePosition"):
        yield Reason("bias", request.bias_kind, "is an array by query and key, which over a cache is not read in place",
                     "use ALiBi or a ScoreFn")  # fmt: skip
    kinds = cache.mask_kinds if cache.is_packed else request.mask_kinds
    if "Dense" in kinds and (request.query_length > 1 or cache.is_packed):
        yield Reason("mask", "Dense", "is an array by query and key, which over a cache is not read in place",
                     "use a mask that is computed from positions")  # fmt: skip
    if cache.is_packed and "Dense" in request.mask_kinds:
        yield from _by_row(request)
    if "Blocks" in kinds and request.query_length > 1:
        yield Reason("mask", "Blocks", "over a cache, of several queries, are not read in place", "decode one query")
    heads = Heads.of(request.heads, request.kv_heads, request.dtypes[:2], cache.latent, metadata)
    bq, _ = queries_a_tile(generation(), metadata.block_q, request.query_length, heads)
    tiles = -(-request.query_length // bq)
    if not cache.is_packed and not rows_a_call(tiles):
        yield Reason("query", request.query_length, f"is {tiles} tiles of queries a row, more than {MAX_ITEMS}",
                     "give it in several calls")  # fmt: skip
    if cache.codec == "int4":
        for name, dim in ("head_dim", request.head_dim), ("value_head_dim", request.value_head_dim):
            if dim % LANES:
                yield Reason(name, dim, f"must be a multiple of {LANES} in int4 to be read in place", "use int8")
        if cache.latent:
            yield Reason("cache", "latent int4", "is not read in place", "use an 8-bit codec")
    if not request.interpret:
        yield from _layout(request)


def _by_row(request: AttentionRequest) -> Iterator[Reason]:
    """Why a mask of packed rows with values by row can't be computed."""
    cache = cache_of(request)
    if unknown := sorted(cache.mask_kinds - _BY_ROW - {"Dense"}):
        yield Reason("mask", ", ".join(unknown), "is no mask of attnops, and of packed rows an array by query and key, "
                     "which is not read in place", "use a MaskFn")  # fmt: skip
    if wrong := sorted(cache.mask_primitives - PRIMITIVES):
        yield Reason("mask", ", ".join(wrong), "this kernel can't compute it for each score",
                     "look up by query, by key or by head alone, or write it elementwise")  # fmt: skip


def _layout(request: AttentionRequest) -> Iterator[Reason]:
    """Why the layout of arrays in a TPU's memory does not allow transfers."""
    cache = cache_of(request)
    least = request.head_dim + (0 if cache.latent else request.value_head_dim)
    dims = {"width": cache.width} if cache.joined or cache.latent else {
        "head_dim": request.head_dim, "value_head_dim": request.value_head_dim
    }  # fmt: skip
    packed = 2 if cache.codec == "int4" else 1
    itemsize = jnp.dtype(cache.codec or request.dtypes[1]).itemsize
    by_token = cache.scales == "token_head"
    # Transfers move whole registers, in whose rows of 32 bits narrower elements share a place.
    rows, unit = generation().sublanes * 4 // itemsize, unit_of(cache.page_size, slots_of_row(request))
    what = ("page_size", cache.page_size) if cache.page_size else ("length", slots_of_row(request))
    multiple = LANES * packed
    wider = f"create the cache with width={-(-least // multiple) * multiple}"
    for name, dim in dims.items():
        if dim % multiple:
            # The compiler keeps another axis of such arrays in the lanes: each call would copy all of the cache.
            yield Reason(name, dim, f"must be a multiple of {multiple} to be read in place", wider)
    if unit % rows or math.lcm(unit, LANES) > 8 * max(unit, LANES):
        yield Reason(*what, f"must be a multiple of {rows} to be read in place")
    elif by_token and unit % LANES:
        # A transfer of fewer scales would begin between lanes.
        yield Reason(*what, f"must be a multiple of {LANES} for scales by token and head to be read in place",
                     "create the cache with scales by head")  # fmt: skip
