"""Attention over a cache: from the options of a call to the kernel and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import FlashCall, describe, equally_varying, one_by_one
from attnops_caches import NewTokens, PagedCache, StoredCache, WindowCache
from attnops_caches.masks import without_table
from attnops_tpu.caches.batches import run_in_batches
from attnops_tpu.caches.in_place import can_be_in_place, packed_arrays
from attnops_tpu.caches.item import run_step
from attnops_tpu.caches.mixed import mixed_plan, run_mixed
from attnops_tpu.caches.new_tokens import written
from attnops_tpu.caches.operands import KernelInputs, KernelResults, arrays, in_main_memory, outputs, queries
from attnops_tpu.caches.packed import Unpacked, has_packed, new_of_tiles, packed, unpacked
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import prompts
from attnops_tpu.caches.references import memory, references
from attnops_tpu.caches.schedule import schedule, words_of_pages
from attnops_tpu.caches.tile_sizes import LANES, Heads, choose, unit_of
from attnops_tpu.flash.launch import ARBITRARY, PARALLEL
from attnops_tpu.generations import Generation, bounds_checks, generation
from attnops_tpu.references import call_kernel

CacheType = TypeVar("CacheType", bound=StoredCache)
_Output = tuple[jax.Array, jax.Array | None]  # the output and the logsumexp


def cached_attention(
    call: FlashCall, cache: CacheType, wants_lse: bool, new: NewTokens | None = None
) -> tuple[jax.Array, jax.Array | None, CacheType]:
    """The output [B, T, H, Dv], the logsumexp float32 [B, H, T] if ``wants_lse``, and the cache with new tokens.

    Args:
        call: for scores by slot; key and value have shape and dtype only.
        cache: the cache.
        wants_lse: whether the call returns the logsumexp.
        new: tokens to write, see `attnops_caches.Cache.pending`; None for none.
    """
    if not has_packed(call.mask):
        plan, inputs = _inputs(call, cache, wants_lse, new)
        results = run_in_batches(_run, plan, inputs)
        return *_outputs(plan, results, None), _written(cache, results)
    batches, of_prompts = unpacked(call, cache), None
    if new is not None:
        cache, new, of_prompts = new_of_tiles(batches[0], cache, new)
    if len(batches) > 1 and (together := _mixed(batches, cache, wants_lse, new, of_prompts)) is not None:
        return together
    given: list[_Output] = []
    for batch in batches:
        # The first kernel writes all new tokens.
        plan, inputs = _inputs(batch.call, cache, wants_lse, *((None, None) if given else (new, of_prompts)), batch)
        if plan.N and given:
            assert inputs.packed is not None
            inputs = inputs._replace(packed=inputs.packed._replace(out=results.out))
        results = run_in_batches(_run, plan, inputs)
        cache = _written(cache, results)
        given.append(_outputs(plan, results, batch))
    return *_joined(batches, given, plan.N > 0), cache


def _mixed(
    batches: list[Unpacked], cache: CacheType, wants_lse: bool, new: NewTokens | None, of_prompts: NewTokens | None
) -> tuple[jax.Array, jax.Array | None, CacheType] | None:
    """`cached_attention` of small and large tiles by one kernel; None if it can't compute both."""
    tile = min(make_plan(x.call, cache, wants_lse, x).bk for x in batches)
    calls = [x.call.replace(metadata=x.call.metadata.replace(block_k=tile)) for x in batches]
    of_small = _inputs(calls[0], cache, wants_lse, new, of_prompts, batches[0])
    of_large = _inputs(calls[1], cache, wants_lse, None, None, batches[1])
    plan = mixed_plan(of_small, of_large)
    if plan is None:
        return None
    results = run_mixed(plan, of_small[1], of_large[1], (batches[0].exists, batches[1].exists))
    given = [_outputs(*x) for x in zip(plan[:2], results, batches, strict=True)]
    return *_joined(batches, given, plan.small.N > 0), _written(cache, results[0])


def _inputs(
    call: FlashCall, cache: StoredCache, wants_lse: bool, new: NewTokens | None,
    of_prompts: NewTokens | None = None, of_tiles: Unpacked | None = None,
) -> tuple[CachePlan, KernelInputs]:  # fmt: skip
    """The plan and the arrays of a kernel.

    ``of_prompts``: new tokens of rows with several tiles of queries, if ``new`` lacks them; ``of_tiles``: the packed
    rows whose call it is, if any.
    """
    mask, slots = (None, None) if call.mask is None else without_table(call.mask)
    items_mask, call = call.mask, dataclasses.replace(call, mask=mask)
    of_keys = None if of_tiles is None else of_tiles.of_keys
    plan = make_plan(call, cache, wants_lse, of_tiles, of_keys is not None)
    store, blocks = cache.store, cache.store.flat_blocks()
    if of_keys is not None and of_keys.mask is not None:
        of_keys = of_keys.replace(mask=without_table(of_keys.mask)[0])
    values = arrays(plan, call, of_keys, cache.batch)
    if plan.scales == "head":
        scales = store.given_scales.values()
        values = values._replace(scales=tuple(jnp.broadcast_to(x, (plan.K,)) for x in scales))
    if of_tiles is None and plan.nq > 1:
        new, of_prompts = None, new
    new_tokens = None if new is None else written(plan, new, store.base, blocks)
    inputs = KernelInputs(
        query=queries(plan, call.query if of_tiles is None or not plan.N else of_tiles.query),
        sources=tuple(blocks.values()),
        tables=_tables(plan, cache),
        block=jnp.asarray(store.base, jnp.int32)[None],
        values=values,
        schedule=schedule(plan, items_mask, slots, new_tokens, None if of_tiles is None else of_tiles.row),
        new=new_tokens,
        prompts=None if of_prompts is None else prompts(plan, of_prompts, store.base, blocks),
        packed=packed_arrays(plan, of_tiles.first, of_tiles.size) if of_tiles is not None and plan.N else None,
    )
    return plan, inputs


def _written(cache: CacheType, results: KernelResults) -> CacheType:
    """The cache with the new tokens that a kernel has written, if any."""
    if not results.sources:
        return cache
    arrays_of: dict[str, Any] = dict(zip(cache.store.flat_blocks(), results.sources, strict=True))
    arrays_of = {name: x.reshape(getattr(cache.store, name).shape) for name, x in arrays_of.items()}
    return dataclasses.replace(cache, store=dataclasses.replace(cache.store, **arrays_of))


def _outputs(plan: CachePlan, results: KernelResults, of_tiles: Unpacked | None) -> tuple[jax.Array, jax.Array | None]:
    """The output [B, T, H, Dv] and the logsumexp [B, H, T] of a kernel, of packed rows if it had tiles of those."""
    lse, out = results.lse, results.out[..., plan.value_lanes - plan.Dv :]
    if lse is not None:
        lse = outputs(plan, lse.swapaxes(2, 3) if plan.transposed else lse[..., :1])[..., 0]
        lse = (lse if of_tiles is None else packed(of_tiles, lse, -np.inf)).swapaxes(1, 2)
    if plan.N:
        return out.reshape(1, plan.N, plan.H, plan.Dv), lse
    out = outputs(plan, out)
    return out if of_tiles is None else packed(of_tiles, out, 0.0), lse


def _joined(batches: Sequence[Unpacked], given: Sequence[_Output], in_place: bool) -> _Output:
    """The results of several batches together."""
    out, lse = given[0]
    for batch, (more, more_lse) in zip(batches[1:], given[1:], strict=True):
        # What is written in place has the outputs of the kernels before too.
        out = more if in_place else jnp.where(batch.is_real[:, None, None], more, out)
        lse = None if lse is None or more_lse is None else jnp.where(batch.is_real, more_lse, lse)
    return out, lse


def make_plan(
    call: FlashCall,
    cache: StoredCache,
    wants_lse: bool,
    of_tiles: Unpacked | None = None,
    keys_by_cache_row: bool = False,
) -> CachePlan:
    """The plan of a call; see `cached_attention` and `CachePlan`."""
    (B, T, H, D), metadata = call.query.shape, call.metadata
    S, K, Dv = cache.length, cache.kv_heads, cache.value_head_dim
    dtype = jnp.dtype(jnp.bfloat16 if call.query.dtype == cache.dtype == jnp.bfloat16 else jnp.float32)
    scoring = describe((T, S), call.mask, call.bias, call.logits_soft_cap, 0.0, call.sinks is not None, by_row=True)
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:  # where x64 is on
        mask_of, bias_of = (f and f.in_32_bits() for f in (scoring.mask, scoring.bias))
        scoring = dataclasses.replace(scoring, mask=mask_of, bias=bias_of)
    chip = generation()
    store, layout = cache.store, cache.store.layout
    widths = [x.shape[-1] for x in (store.key, store.value) if x is not None]
    itemsize = jnp.dtype(store.key.dtype).itemsize
    token_bytes = K * sum(-(-d // LANES) * LANES for d in widths) * itemsize
    heads = Heads.of(H, K, (call.query.dtype, cache.dtype), cache.is_latent, metadata)
    tiles = choose(
        chip, metadata.block_q, metadata.block_k, (T, S), heads,
        token_bytes, itemsize, unit_of(cache.page_size if isinstance(cache, PagedCache) else 0, S),
        2 if scoring.has_cap_or_bias or dtype != jnp.bfloat16 else 1,
    )  # fmt: skip
    # The matrix unit computes float32 products in one bfloat16 pass or in six; HIGH runs in six too.
    one_pass = dtype == jnp.bfloat16 or metadata.precision == lax.Precision.DEFAULT
    return CachePlan(
        B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, width=layout.width, is_packed=of_tiles is not None,
        N=of_tiles.query.shape[0] if of_tiles is not None and can_be_in_place(K, H // K) else 0,
        keys_by_cache_row=keys_by_cache_row, is_ring=isinstance(cache, WindowCache),
        is_paged=isinstance(cache, PagedCache),
        sublanes=chip.sublanes, cores=chip.cores, dtype=dtype, stored=jnp.dtype(layout.stored_dtype),
        packed=1 if cache.codec is None else cache.codec.per_element, operand=_operand(cache, dtype, chip),
        out_dtype=jnp.dtype(call.query.dtype), is_latent=layout.content == "latent",
        is_joined=layout.content == "joined",
        scales=_scales(cache), precision=lax.Precision.DEFAULT if one_pass else lax.Precision.HIGHEST,
        scale=call.scale, scoring=scoring, wants_lse=wants_lse,
        interpret=metadata.interpret, bounds_checks=bounds_checks(), vmem=chip.vmem, **tiles._asdict(),
    )  # fmt: skip


def _operand(cache: StoredCache, dtype: np.dtype[Any], chip: Generation) -> np.dtype[Any]:
    """The dtype in which keys and values are multiplied.

    Some matrix units accept e4m3, but treat its NaN as a number; `Quantized` stores NaN only with a scale that is NaN.
    A conversion in the kernel would need three times as many bundles as all else.
    """
    stored = jnp.dtype(cache.store.layout.stored_dtype)
    return stored if chip.takes_e4m3 and stored == jnp.float8_e4m3fn and dtype == jnp.bfloat16 else dtype


def _scales(cache: StoredCache) -> str:
    codec = cache.codec
    return "" if codec is None else "head" if codec.scales == "tensor" else codec.scales


def _tables(plan: CachePlan, cache: StoredCache) -> tuple[jax.Array, ...]:
    """`KernelInputs.tables`."""
    if not isinstance(cache, PagedCache):
        return ()
    store, exists = cache.store, cache.slots().exists
    blocks = jnp.clip(cache.table, 0, store.own_blocks - 1) + store.base
    blocks = jnp.pad(blocks, ((0, 0), (0, plan.pieces * plan.piece - blocks.shape[1])))
    return blocks.reshape(-1, 1, plan.piece).astype(jnp.int32), words_of_pages(plan, exists)


@one_by_one
def _run(plan: CachePlan, inputs: KernelInputs) -> KernelResults:
    """The kernel, for all rows of ``plan``."""
    inputs = equally_varying(inputs)
    refs = references(plan, in_main_memory(plan, inputs))
    out, *rest = call_kernel(
        functools.partial(run_step, plan), refs, "attnops_ragged",
        grid=(plan.cores, plan.items // plan.cores),
        params=pltpu.CompilerParams(
            dimension_semantics=(PARALLEL, ARBITRARY),
            vmem_limit_bytes=memory(plan, refs),
            disable_bounds_checks=not plan.bounds_checks,
        ),
        interpret=plan.interpret,
    )  # fmt: skip
    return KernelResults(out, rest[0] if plan.wants_lse else None, tuple(rest[plan.wants_lse :]))
