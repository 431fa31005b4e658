"""The engine's array of pages as a `PagedCache`, and back: one buffer, no copy.

A layer's array is [P, 1, K, page, W]: P pages, K kv heads, ``page`` tokens, and W features of a token, of which the
first D are its key and the last D its value. The engine shards pages and kv heads by dimensions 0 and 2, and its
context by dimension 1. Without that dimension of size 1 it is the array of a `PagedCache` with joined keys and values.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops import Reason
from attnops_caches.codec import Quantized
from attnops_caches.engines.refusals import refusal
from attnops_caches.layout import TokenOptions
from attnops_caches.paged import PagedCache

if TYPE_CHECKING:
    from attnops.typing import DType

LANES: Final = 128
CODECS: Final = ("int8", "float8_e4m3fn", "float8_e5m2")
_DTYPES: Final = ("float32", "bfloat16", "float16", *CODECS)


def pages_shape(pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DType) -> tuple[int, ...]:
    """The shape of a layer's array, of one shard of kv heads.

    A TPU reads it in place where W is a multiple of 128 features and ``page_size`` a multiple of the rows that 8
    registers' rows of 32 bits hold: 8 tokens of 4 bytes, 16 of 2, 32 of 1.

    Raises:
        UnsupportedError: a dtype that tokens are not stored in, or pages that no TPU reads in place.
    """
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise refusal(Reason("kv_cache_dtype", name, f"must be one of {list(_DTYPES)}", "give --kv-cache-dtype auto"))
    if name == "float16" and jax.default_backend() == "tpu":
        raise refusal(Reason("kv_cache_dtype", name, "has no kernel for TPUs", "give --dtype bfloat16"))
    rows = 8 * 4 // jnp.dtype(dtype).itemsize
    if page_size % rows and jax.default_backend() == "tpu":
        raise refusal(Reason("page size", page_size, f"must be a multiple of {rows} tokens of {name} to be read in "
                             "place", f"give --block-size (vLLM) or --page-size (SGLang) "
                             f"{-(-page_size // rows) * rows}"))  # fmt: skip
    return pages, 1, kv_heads, page_size, -(-2 * head_dim // LANES) * LANES


def cache_of_pages(
    array: jax.Array, head_dim: int, lengths: jax.Array, table: jax.Array, dtype: DType, platform: str
) -> PagedCache:
    """The cache whose tokens are in ``array``.

    Args:
        array: [P, 1, K, page, W]; with 8 bits, tokens as they are stored, without their scales.
        head_dim: D.
        lengths: tokens of each row, int32 [B].
        table: the pages of each row, int32 [B, M].
        dtype: the dtype in which 8-bit tokens are read and appended.
        platform: where it is read. A TPU's compiler reads 16-bit floats as integers without a copy, and copies all of
            an array of 8-bit floats, which stay as they are there.
    """
    pages, _, K, page, W = array.shape
    name = jnp.dtype(array.dtype).name
    stored: TokenOptions = {"kv_heads": K, "head_dim": head_dim, "width": W, "dtype": array.dtype}
    if name in CODECS:
        stored |= {"dtype": dtype, "codec": Quantized(name, "tensor"), "key_scale": 1.0, "value_scale": 1.0}
    cache = PagedCache.create(
        batch=table.shape[0], pages=pages, page_size=page, max_pages=table.shape[1], **stored
    )  # fmt: skip
    blocks = array.reshape(pages, K, page, W)
    if platform != "tpu" or array.dtype.itemsize > 1:
        blocks = _as(blocks, cache.store.key.dtype)
    return dataclasses.replace(cache.with_blocks({"key": blocks}), lengths=lengths, table=table)


def pages_of_cache(cache: PagedCache, dtype: DType) -> jax.Array:
    """The inverse of `cache_of_pages`, of the array's ``dtype``."""
    return _as(cache.store.key, dtype)[:, None]


def _as(x: jax.Array, dtype: DType) -> jax.Array:
    """``x`` with its bits read as ``dtype``: caches hold the bits of narrow floats."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
