"""Peers that run on a TPU or an NVIDIA GPU alone, in the layout that each prefers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import Causal
from attnops_caches import WindowCache
from attnops_testing.bench.cache_peers import compiled
from attnops_testing.bench.case import Array, Case, Refused
from attnops_testing.bench.program import Ready, compile_jax
from attnops_testing.bench.terms import terms_of

if TYPE_CHECKING:
    from attnops.masks import Segments
    from attnops_testing.bench.caches import CacheCase

HALF: Final = ("bfloat16", "float16")
# Tokens of a page: the least that flywheel serves, and FlashInfer's default.
_TPU_PAGE, _GPU_PAGE = 128, 16


def flywheel(case: Case, what: str) -> Ready:
    """`flash_attn_func`, or `flash_attn_varlen_func` for documents."""
    check_dtype(case.dtype, ("bfloat16",))
    terms = terms_of(case)
    if terms.rest is not None:
        raise Refused(f"mask={terms.rest!r} must be causal, a window, documents or these together")
    options = {"causal": terms.causal, "window_size": terms.window or (-1, -1)}
    if case.backward and (terms.window or terms.segments):
        raise Refused("windows and documents have no backward pass")
    module: Any = importlib.import_module("flywheel_tpu")
    if terms.segments is None:
        return compile_jax(
            case, lambda q, k, v, _: module.flash_attn_func(q, k, v, **options), None, what, heads_first=True
        )
    starts = _documents(case, terms.segments)
    longest = int(np.diff(starts).max())

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array) -> jax.Array:
        arrays = query[0], key[0], value[0], starts, starts, longest, longest
        return module.flash_attn_varlen_func(*arrays, **options)[None]

    return compile_jax(case, attend, jnp.asarray(starts), what, heads_first=True)


def flywheel_cached(case: CacheCase, what: str) -> Ready:
    """`flash_attn_with_kvcache` over pages that hold the new tokens already."""
    _check_cache(case, ("bfloat16",))
    module: Any = importlib.import_module("flywheel_tpu")
    (pages, table), (queries, starts) = _pages(case, _TPU_PAGE), _queries(case)
    one = case.tokens.T == 1
    if one:
        queries = queries[:, None]

    def attend(pages: jax.Array, query: jax.Array, lengths: Any, table: Any, starts: Any) -> tuple[jax.Array, ...]:
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        return module.flash_attn_with_kvcache(query, pages, None, cu_seqlens_q=None if one else starts, **options)

    arguments = (pages, queries, jnp.asarray(case.tokens.lengths, jnp.int32), jnp.asarray(table), jnp.asarray(starts))
    return compiled(case, attend, arguments, f"{what} over pages of {_TPU_PAGE}", plain=True, donated=True)


def rpa(case: CacheCase, what: str) -> Ready:
    """`ragged_paged_attention` v3 over pages that hold the new tokens already, as layers that share a cache call it."""
    _check_cache(case, ("bfloat16", "float32"))
    K, D = case.tokens.kv_heads, case.tokens.head_dim
    if D % 128:
        raise Refused(f"head_dim={D} must be a multiple of 128: another kernel serves 64")
    module: Any = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    (pages, table), (queries, starts) = _pages(case, _TPU_PAGE), _queries(case)
    pages = pages.reshape(module.get_kv_cache_shape(len(pages), _TPU_PAGE, K, D, pages.dtype))
    B, new = len(table), jnp.zeros((len(queries), K, D), queries.dtype)  # new tokens, which are not read
    ranges = jnp.array([B, B, B] if case.tokens.T == 1 else [0, 0, B], jnp.int32)  # rows of one token, prompts, all

    def attend(pages: jax.Array, query: jax.Array, new: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        options = {"sm_scale": D**-0.5, "update_kv_cache": False}
        return module.ragged_paged_attention(query, new, new, pages, *numbers, **options)

    lengths = jnp.asarray(case.tokens.lengths, jnp.int32)
    arguments = (pages, queries, new, lengths, jnp.asarray(table.reshape(-1)), jnp.asarray(starts), ranges)
    return compiled(case, attend, arguments, f"{what} over pages of {_TPU_PAGE}", plain=True, donated=True)


def flashinfer_cached(case: CacheCase, what: str) -> Ready:
    """FlashInfer's wrapper for queries over pages; for one query a row it is what decodes with tensor cores."""
    _check_cache(case, HALF)
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise Refused("torch sees no GPU")
    module: Any = importlib.import_module("flashinfer")
    tokens, dtype = case.tokens, getattr(torch, case.dtype)
    (pages, table), (queries, starts) = _pages(case, _GPU_PAGE), _queries(case)
    used = -(-np.array(tokens.lengths) // _GPU_PAGE)  # pages of a row that hold tokens
    indices = np.concatenate([row[:count] for row, count in zip(table, used, strict=True)])
    last = np.array(tokens.lengths) - (used - 1) * _GPU_PAGE
    integers = [torch.tensor(x, device="cuda").int() for x in (starts, np.cumsum([0, *used]), indices, last)]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace)
    sizes = tokens.heads, tokens.kv_heads, tokens.head_dim, _GPU_PAGE
    wrapper.plan(*integers, *sizes, causal=True, q_data_type=dtype, kv_data_type=dtype)

    def tensor(x: jax.Array) -> Any:
        return torch.from_numpy(np.array(x, np.float32)).to("cuda", dtype)

    query, stored = tensor(queries), (tensor(pages[:, :, ::2]), tensor(pages[:, :, 1::2]))

    def wait(out: Any) -> Any:
        torch.cuda.synchronize()
        return out

    def results(_: Array) -> dict[str, Array]:
        return {"output": case.unpacked(wait(wrapper.run(query, stored)).float().cpu().numpy())}

    return Ready(
        run=lambda: wrapper.run(query, stored), wait=wait, results=results, what=f"{what} over pages of {_GPU_PAGE}",
        bytes_seen=case.plain_bytes,
    )  # fmt: skip


def check_dtype(dtype: str, dtypes: tuple[str, ...] = HALF) -> None:
    """Refuse other dtypes."""
    if dtype not in dtypes:
        raise Refused(f"dtype={dtype!r} must be {' or '.join(dtypes)}")


def _documents(case: Case, segments: Segments) -> Array:
    """Where the documents of one row begin, and its end: int32 [documents + 1]."""
    ids = np.asarray(segments.bind(*case.shape).q_ids)
    if case.batch != 1 or (np.diff(ids[0]) < 0).any():
        raise Refused("documents must be one after the other in one row")
    return np.array([0, *np.flatnonzero(np.diff(ids[0])) + 1, case.length], np.int32)


def _check_cache(case: CacheCase, dtypes: tuple[str, ...]) -> None:
    check_dtype(case.dtype, dtypes)
    if not (isinstance(case.mask, Causal) and case.mask.offset in (None, 0)) or isinstance(case.cache, WindowCache):
        raise Refused(f"mask={case.mask!r} over a {case.cache.storage} must be Causal() without a window")
    if case.tokens.latent is not None:
        raise Refused(f"latent={case.tokens.latent}: values must be stored")


def _pages(case: CacheCase, size: int) -> tuple[jax.Array, Array]:
    """Keys and values in pages in a random order, [pages, size, 2 K, D], a head's key before its value; and the table,
    int32 [B, pages of a row].
    """
    _, key, value = case.tokens.plain(case.cache.codec)
    B, S, K, D = key.shape
    count = -(-S // size)
    both = jnp.stack([key, value], 3).reshape(B, S, 2 * K, D)
    both = jnp.pad(both, ((0, 0), (0, count * size - S), (0, 0), (0, 0))).reshape(B * count, size, 2 * K, D)
    order = np.random.default_rng(case.tokens.seed).permutation(B * count).astype(np.int32)
    return jnp.zeros_like(both).at[order].set(both), order.reshape(B, count)


def _queries(case: CacheCase) -> tuple[jax.Array, Array]:
    """The queries of all rows one after the other, [N, H, D], and where a row's begin, int32 [B + 1]."""
    query, counts = case.tokens.device_inputs[0], case.tokens.queries
    packed = jnp.concatenate([row[:count] for row, count in zip(query, counts, strict=True)])
    return packed, np.cumsum([0, *counts]).astype(np.int32)
