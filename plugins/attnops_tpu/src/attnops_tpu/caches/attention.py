"""Attention over a cache: from the options of a call to the kernel and back."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import FlashCall, describe, equally_varying, one_by_one, output_like
from attnops_caches import NewTokens, PagedCache, StoredCache, WindowCache
from attnops_caches.masks import without_table
from attnops_tpu.caches.batches import run_in_batches
from attnops_tpu.caches.kernel import ItemState, Kernel
from attnops_tpu.caches.missing import MissingPages
from attnops_tpu.caches.operands import CacheArrays, arrays, outputs, queries, rows_by_key
from attnops_tpu.caches.packed import has_packed, new_of_tiles, packed, unpacked
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.schedule import ItemSchedule, schedule, words_of_pages
from attnops_tpu.caches.tile_sizes import LANES, choose, unit_of
from attnops_tpu.caches.transfers import AT, ScheduleRefs, Stream
from attnops_tpu.caches.write import Writer, Written, written
from attnops_tpu.flash.launch import ARBITRARY, PARALLEL
from attnops_tpu.generations import Generation, bounds_checks, generation
from attnops_tpu.interpreter import interpret_params

if TYPE_CHECKING:
    from attnops.typing import Ref

CacheType = TypeVar("CacheType", bound=StoredCache)
# Rows of a register of 32-bit elements.
_SUBLANES: Final = 8


def cached_attention(
    call: FlashCall, cache: CacheType, wants_lse: bool, new: NewTokens | None = None
) -> tuple[jax.Array, jax.Array | None, CacheType]:
    """The output [B, T, H, Dv], the logsumexp float32 [B, H, T] if it is asked for, and the cache with new tokens.

    Args:
        call: for scores by slot; key and value have shape and dtype only.
        cache: the cache.
        wants_lse: whether the logsumexp is asked for.
        new: tokens to write, see `attnops_caches.Cache.pending`; None for none.
    """
    of_tiles = unpacked(call, cache) if has_packed(call.mask) else None
    if of_tiles is not None:
        call = of_tiles.call
        cache, new = (cache, None) if new is None else new_of_tiles(of_tiles, cache, new)
    mask, slots = (None, None) if call.mask is None else without_table(call.mask)
    items_mask, call = call.mask, dataclasses.replace(call, mask=mask)
    of_keys = None if of_tiles is None else of_tiles.of_keys
    plan = make_plan(call, cache, wants_lse, of_tiles is not None, of_keys is not None)
    store = cache.store.flat()
    names = "key", "value", *(("key_scale", "value_scale") if store.layout.has_token_scales else ())
    blocks = {name: x for name in names if (x := getattr(store, name)) is not None}
    sources = list(blocks.values())
    if of_keys is not None and of_keys.mask is not None:
        of_keys = of_keys.replace(mask=without_table(of_keys.mask)[0])
    given = arrays(plan, call, of_keys, cache.batch)
    if plan.scales == "head":
        scales = store.key_scale, store.value_scale
        given = given._replace(scales=tuple(jnp.broadcast_to(x, (plan.K,)) for x in scales if x is not None))
    new_tokens = None if new is None else written(plan, new, store.base, blocks)
    out, *rest = run_in_batches(
        _run, plan, queries(plan, call.query), sources, _tables(plan, cache),
        jnp.asarray(store.base, jnp.int32)[None], given,
        schedule(plan, items_mask, slots, new_tokens, None if of_tiles is None else of_tiles.row), new_tokens,
    )  # fmt: skip
    if new is not None:
        arrays_of: dict[str, Any] = dict(zip(blocks, rest[-len(sources) :], strict=True))
        arrays_of = {name: x.reshape(getattr(cache.store, name).shape) for name, x in arrays_of.items()}
        cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **arrays_of))
        rest = rest[: -len(sources)]
    lse = outputs(plan, rest[0][..., :1])[..., 0].swapaxes(1, 2) if rest else None
    out = outputs(plan, out[..., plan.value_lanes - plan.Dv :])
    if of_tiles is not None:
        out, lse = packed(of_tiles, out, lse)
    return out, lse, cache


def make_plan(
    call: FlashCall, cache: StoredCache, wants_lse: bool, is_packed: bool = False, is_by_row: bool = False
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
    tiles = choose(
        chip, metadata.block_q, metadata.block_k, (T, S), (H, K), token_bytes, itemsize,
        unit_of(cache.page_size if isinstance(cache, PagedCache) else 0, S), metadata.interpret,
    )  # fmt: skip
    # The matrix unit computes float32 products in one bfloat16 pass or in six; HIGH runs in six too.
    one_pass = dtype == jnp.bfloat16 or metadata.precision == lax.Precision.DEFAULT
    return CachePlan(
        B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, width=layout.width, is_packed=is_packed, is_by_row=is_by_row,
        is_ring=isinstance(cache, WindowCache), is_paged=isinstance(cache, PagedCache),
        cores=chip.cores, dtype=dtype, stored=jnp.dtype(layout.stored_dtype), operand=_operand(cache, dtype, chip),
        out_dtype=jnp.dtype(call.query.dtype), is_latent=layout.content == "latent",
        is_joined=layout.content == "joined",
        scales=_scales(cache), precision=lax.Precision.DEFAULT if one_pass else lax.Precision.HIGHEST,
        scale=call.scale, scoring=scoring, wants_lse=wants_lse,
        interpret=metadata.interpret, bounds_checks=bounds_checks(), vmem=chip.vmem, **tiles._asdict(),
    )  # fmt: skip


def _operand(cache: StoredCache, dtype: np.dtype[Any], chip: Generation) -> np.dtype[Any]:
    """The dtype in which keys and values are multiplied.

    Some matrix units accept e4m3, but take its NaN for a number; `Quantized` stores NaN only with a scale that is NaN.
    A conversion in the kernel would need three times as many bundles as all else.
    """
    stored = jnp.dtype(cache.store.layout.stored_dtype)
    return stored if chip.takes_e4m3 and stored == jnp.float8_e4m3fn and dtype == jnp.bfloat16 else dtype


def _scales(cache: StoredCache) -> str:
    codec = cache.codec
    return "" if codec is None else "head" if codec.scales == "tensor" else codec.scales


def _tables(plan: CachePlan, cache: StoredCache) -> list[jax.Array]:
    """The block of each row's pages, in pieces int32 [B · pieces, 1, piece]; and, as bits, whether they are in the
    table, see `attnops_tpu.caches.schedule.words_of_pages`; empty without pages.
    """
    if not isinstance(cache, PagedCache):
        return []
    store, exists = cache.store, cache.slots().exists
    blocks = jnp.clip(cache.table, 0, store.own_blocks - 1) + store.base
    pieces = -(-plan.nk * plan.units // plan.piece)
    blocks = jnp.pad(blocks, ((0, 0), (0, pieces * plan.piece - blocks.shape[1])))
    return [blocks.reshape(-1, 1, plan.piece).astype(jnp.int32), words_of_pages(plan, exists)]


@one_by_one
def _run(
    plan: CachePlan, query: jax.Array, sources: list[jax.Array], tables: list[jax.Array], block: jax.Array,
    given: CacheArrays, items: ItemSchedule, new: Written | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The output [items, K, R, value_lanes]; the logsumexp [items, K, R, 128], if wanted; and, if there are new tokens,
    the sources with them.
    """
    query, sources, tables, block, given, items, new = equally_varying(
        (query, sources, tables, block, given, items, new)
    )
    scalars = [*items, block, *given.scalars, *given.scales, *([] if new is None else new[:3])]
    tokens = [] if new is None else list(new.tokens)
    by_key = [] if given.by_key is None else [given.by_key]
    results = [output_like(query, (plan.items, plan.K, plan.R, plan.value_lanes), plan.out_dtype)]
    if plan.wants_lse:
        results.append(output_like(query, (plan.items, plan.K, plan.R, LANES), jnp.dtype(jnp.float32)))
    before = len(scalars) + 1 + len(given.by_row) + len(tokens) + len(tables)
    aliases = {} if new is None else {before + i: len(results) + i for i in range(len(sources))}
    written_to = [] if new is None else [output_like(query, x.shape, x.dtype) for x in sources]
    grid = plan.cores, plan.items // plan.cores
    call: Any = pl.pallas_call(
        _kernel(plan, given, len(tokens)),
        out_shape=[*results, *written_to],
        input_output_aliases=aliases,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[
                _of_item(plan, query),
                *[_of_item(plan, x) for x in given.by_row],
                *[_of_item(plan, x, plan.nq) for x in tokens],
                *[pl.BlockSpec(memory_space=pl.ANY)] * (len(tables) + len(sources) + len(by_key)),
            ],
            out_specs=[*[_of_item(plan, x) for x in results], *[pl.BlockSpec(memory_space=pl.ANY)] * len(written_to)],
            scratch_shapes=[*_scratch(plan, given, sources), *[pltpu.SemaphoreType.DMA((1,))] * bool(tokens)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(PARALLEL, ARBITRARY),
            vmem_limit_bytes=min(plan.vmem, _vmem(plan, sources) + 2 * sum(x.nbytes // x.shape[0] for x in tokens)),
            disable_bounds_checks=not plan.bounds_checks,
        ),
        interpret=interpret_params(plan.interpret),
        name="attnops_ragged",
    )
    # Kernels and index maps have numbers of 32 bits, even where x64 is on: Mosaic has no others.
    with jax.enable_x64(False):
        if not plan.interpret:
            # XLA would keep small arrays in vector memory, from where the core copies them by vector instructions.
            sources = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sources]
        return tuple(call(*scalars, query, *given.by_row, *tokens, *tables, *sources, *by_key))


def _of_item(plan: CachePlan, x: Any, each: int = 1) -> pl.BlockSpec:
    """The block of a grid step in an array [items, …], or in one with a block for every ``each`` items."""
    rest = x.shape[1:]

    def index(core: jax.Array, step: jax.Array, *_: Any) -> tuple[Any, ...]:
        item = step * plan.cores + core
        return item if each == 1 else lax.div(item, np.int32(each)), *[0] * len(rest)

    return pl.BlockSpec((1, *rest), index)


def _scratch(plan: CachePlan, given: CacheArrays, sources: list[jax.Array]) -> list[Any]:
    def rows(heads: int, d: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM((heads, plan.R, d), dtype)

    by_key = rows_by_key(plan)
    return [
        *[rows(plan.K, d) for d in (LANES, LANES, plan.value_lanes)],
        *[rows(x.shape[1], LANES, x.dtype) for x in given.by_row],
        *[pltpu.VMEM((plan.buffers, plan.K, *_buffer(plan, x)), x.dtype) for x in sources],
        *([pltpu.VMEM((plan.buffers, by_key, plan.bk), jnp.int32)] if by_key else []),
        pltpu.SMEM((2 * plan.piece,), jnp.int32),
        pltpu.SMEM((len(AT),), jnp.int32),
        pltpu.SemaphoreType.DMA((plan.buffers,)),
        pltpu.SemaphoreType.DMA((2,)),
        *([pltpu.SMEM((1, LANES), jnp.int32), pltpu.VMEM((8, plan.bk), jnp.int32), pltpu.SemaphoreType.DMA((1,))]
          if plan.is_paged else []),
    ]  # fmt: skip


def _buffer(plan: CachePlan, x: jax.Array) -> tuple[int, ...]:
    """The shape of a tile of a kv head in vector memory.

    A transfer between different layouts costs the core a descriptor of strides. For 2-byte elements, vector memory of
    tpu7x has tiles of (16, 128), and main memory of (8, 128); arrays with 8 rows have the latter in both.
    """
    is_wide = x.ndim == 4 and x.dtype.itemsize == 2 and x.shape[3] > LANES and plan.bk % _SUBLANES == 0
    if is_wide and not plan.interpret:  # the interpreter has no transfers to a reshaped reference
        return plan.bk // _SUBLANES, _SUBLANES, x.shape[3]
    return (plan.bk, *x.shape[3:])


def _as_slots(x: Any) -> Any:
    """A reference to an array with the shape of `_buffer`, as [buffers, K, bk, …]."""
    return x if len(x.shape) < 5 else x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _kernel(plan: CachePlan, given: CacheArrays, writes: int) -> Any:
    """The kernel as a function of references, in the order of `_run`."""

    def kernel(*refs: Ref) -> None:
        rest = list(refs)

        def take(count: int) -> list[Any]:
            taken = rest[:count]
            del rest[:count]
            return taken

        items, (block,), scalars = ScheduleRefs(*take(len(ScheduleRefs._fields))), take(1), take(len(given.scalars))
        scales, places = take(len(given.scales)), take(3 if writes else 0)
        (query,), by_row, tokens = take(1), take(len(given.by_row)), take(writes)
        tables = take(2 if plan.is_paged else 0)
        sources = take(plan.sources)
        by_key = take(given.by_key is not None)
        (out,), lse = take(1), take(plan.wants_lse)
        sources = take(plan.sources) if writes else sources
        m, l, acc = take(3)
        state = ItemState(m, l, acc, tuple(take(len(given.by_row))))
        buffers, by_key_buffer = [_as_slots(x) for x in take(plan.sources)], take(given.by_key is not None)
        pages, stream_state, arrived, piece_arrived = take(4)
        missing = MissingPages(plan, items.missing, tables[1], *take(3)) if tables else None
        writer = (
            Writer(plan, places[0], places[1], places[2], tuple(tokens), tuple(sources), tuple(buffers), rest[0])
            if writes
            else None
        )
        stream = Stream(
            plan, items, tables[0] if tables else None, tuple(sources), by_key[0] if by_key else None, tuple(buffers),
            by_key_buffer[0] if by_key_buffer else None, pages, stream_state, arrived, piece_arrived, block[0], writer,
        )  # fmt: skip
        Kernel(plan, stream, scalars, scales, by_row, query, out, lse[0] if lse else None, state, missing).run()

    return kernel


def _vmem(plan: CachePlan, sources: list[jax.Array]) -> int:
    """Bytes of vector memory that the kernel may use."""
    tile = plan.K * plan.bk * sum(-(-x.shape[-1] // LANES) * LANES * x.dtype.itemsize for x in sources if x.ndim == 4)
    tile += 4 * max(plan.K, 8) * plan.bk * (len(sources) - plan.token_arrays)
    rows = plan.K * -(-plan.R // 8) * 8 * 4
    state = rows * (3 * LANES + -(-plan.value_lanes // LANES) * LANES)
    blocks = 2 * rows * (2 * LANES + -(-max(plan.key_lanes, plan.value_lanes) // LANES) * LANES * 2)
    values = plan.buffers * max(rows_by_key(plan), 8) * plan.bk * 4
    scores = 16 * plan.R * min(plan.bk, 4 * plan.chunk)
    return math.ceil(1.1 * (plan.buffers * tile + state + blocks + values + scores)) + (4 << 20)
