"""The references of the kernel over caches: their shapes, and the one list that declares them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import output_like
from attnops_tpu.caches.in_place import Outputs, PackedRefs, Places, begin_of
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.operands import KernelInputs, rows_by_key
from attnops_tpu.caches.parts import Part
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import Prompts, sizes
from attnops_tpu.caches.schedule import ItemSchedule
from attnops_tpu.caches.stream_state import StreamState
from attnops_tpu.caches.tile_sizes import LAG, LANES, SUB_ROWS
from attnops_tpu.references import ANY, Input, Output, Prefetched, needed

if TYPE_CHECKING:
    from attnops.typing import PyTree, Ref


class ItemState(NamedTuple):
    """What is kept from tile to tile, in vector memory."""

    # If scores are transposed, so are these, with ``plan.rows_of_number`` for 128, and there is no ``by_row``.
    m: Any  # [K, R, 128], the largest score so far, in all lanes
    l: Any  # [K, R, 128], the sum of the weights, separately for each lane
    acc: Any  # [K, R, value_lanes], the sum of weights times values
    by_row: tuple[Any, ...]  # values by row [K or 1, R, 128] each, in all lanes


class PromptBuffers(NamedTuple):
    """Chunks of `attnops_tpu.caches.prompts` in vector memory, a buffer for each that is being transferred."""

    tokens: tuple[Any, ...]  # [buffers, K, chunk + group, d], new tokens, and then what is written
    old: tuple[Any, ...]  # [buffers, K, chunk, d], what a chunk's slots hold
    read: Any  # semaphores [buffers]
    written: Any  # semaphores [buffers]


class MissingRefs(NamedTuple):
    """What masks the keys of missing pages."""

    loaded: Any  # int32 [1, 128] in scalar memory, the words of a tile among them
    present: Any  # int32 [sublanes, bk], 1 for each key of a tile whose page is in the table; all 1 between two tiles
    arrived: Any  # a semaphore [1]


class CacheRefs(NamedTuple):
    """The references of a grid step, which computes an item."""

    packed: PackedRefs | None  # outputs that are written in place; None if a step returns a whole tile
    schedule: ItemSchedule  # in scalar memory, as all up to ``scales``
    block: Any  # [1], the first block of the cache; `run_item` reads it once
    scalars: tuple[Any, ...]  # [B] or [items] each, values that are one number per item
    scales: tuple[Any, ...]  # [K] each, the scales of keys, and of values; empty unless scales are by head
    query: Any  # [1, K, R, key_lanes], or [bq, K, G, key_lanes] if queries are read in place
    by_row: tuple[Any, ...]  # [1, K or 1, R padded to lanes] each, values by row
    # the new tokens, of which first, stop and blocks are in scalar memory; None for a call that writes none.
    new: Written | None
    # new tokens of rows with several tiles of queries, and their buffers; None for a call that writes none.
    prompts: tuple[Prompts, PromptBuffers] | None
    table: Any  # [rows · pieces, 1, piece] in main memory, the blocks of pages; None without pages
    words: Any  # [rows · pieces, 1, 128] in main memory, whether pages are in the table; None without pages
    out: Any  # [1, K, R, value_lanes], or, in main memory, [N, K, G, value_lanes]
    lse: Any  # [1, K, R, 128], or [1, K, 1, R] if scores are transposed; None if the call does not return it
    sources: tuple[Any, ...]  # in main memory, see `attnops_tpu.caches.operands.KernelInputs`
    by_key: Any  # values by key [B or 1, nk, rows, bk] in main memory; None for none
    state: ItemState  # the online softmax so far
    # transposed scores, float32 [chunk + sublanes, 256] each, see `attnops_tpu.caches.transposed`; else empty
    scores: tuple[Any, ...]
    buffers: tuple[Any, ...]  # tiles of the sources [buffers, K, bk, d], and of scales [buffers, K, bk]
    by_key_buffer: Any  # tiles of ``by_key`` [buffers, rows, bk]
    # two pieces of the table, [2 · piece] in scalar memory: with one axis, the address of an entry is a sum.
    pages: Any
    stream: Any  # the numbers of `attnops_tpu.caches.stream_state.StreamState`, in scalar memory
    arrived: Any  # semaphores [buffers]
    piece_arrived: Any  # semaphores [2], one for each piece of ``pages``
    missing: MissingRefs | None  # what masks missing pages; None without pages
    written: Any  # a semaphore [1]; None for a call that writes none
    # which part of its item a grid step computes, in scalar registers; None for all of it, and in a declaration
    part: Part | None = None

    def of_item(self, item: jax.Array) -> CacheRefs:
        """The references of the grid step of an item."""
        return self if self.packed is None else self._replace(packed=self.packed._replace(item=item))

    def outputs(self, plan: CachePlan) -> Outputs | None:
        """What writes outputs in place."""
        return None if self.packed is None else Outputs(plan, self.packed, self.out)

    def check(self, plan: CachePlan) -> None:
        """Assert the shapes of references."""
        K, R, rows = plan.K, plan.R, rows_by_key(plan)
        state = (plan.rows_of_number, R) if plan.transposed else (R, LANES)
        assert self.query.shape == ((plan.bq, K, plan.G) if plan.N else (1, K, R)) + (plan.key_lanes,)
        assert self.out.shape == ((plan.N, K, plan.G) if plan.N else (1, K, R)) + (plan.value_lanes,)
        assert self.lse is None or self.lse.shape == (1, K, *((1, R) if plan.transposed else (R, LANES)))
        assert self.state.m.shape == self.state.l.shape == (K, *state)
        assert self.state.acc.shape == (K, *((plan.value_lanes, R) if plan.transposed else (R, plan.value_lanes)))
        assert all(x.shape[:3] == (plan.buffers, K, plan.bk) for x in self.buffers)
        assert len(self.buffers) == len(self.sources) == plan.sources
        assert self.by_key is None or self.by_key.shape[1:] == (plan.nk, rows, plan.bk)
        assert self.table is None or self.table.shape[1:] == (1, plan.piece)


class Tile(NamedTuple):
    """A tile of keys of an item, in scalar registers."""

    item: jax.Array  # the item of the grid step
    row: jax.Array  # the row of the cache
    entry: jax.Array  # the entry of the batch: the row, or, for packed rows, the item
    number: jax.Array  # the index of the tile in the row
    first: jax.Array  # the first unit of the tile that is transferred, counted from the tile's first
    stop: jax.Array  # the unit after the last
    is_full: jax.Array  # whether nothing is masked


def references(plan: CachePlan, inputs: KernelInputs, places: int | None = None) -> CacheRefs:
    """The declaration of the kernel's references.

    ``places``: which prefetched array has the item of each grid step, 0 or 1, two before that with its first query;
    None if items follow one another.
    """
    values, new, rows = inputs.values, inputs.new, rows_by_key(plan)
    by_item = functools.partial(_by_item, plan, places=places)
    table, words = (Input(x, ANY) for x in inputs.tables) if plan.is_paged else (None, None)
    query, packed = by_item(inputs.query), inputs.packed
    if packed is not None:
        query = Input(inputs.query, _in_place(plan, inputs.query.shape[3], places))

    def result(shape: tuple[int, int], dtype: np.dtype) -> Output:
        array = output_like(inputs.query, (plan.items, plan.K, *shape), dtype)
        # Queries of two sizes of tiles are as large as many rows of padding; a step reads its own and the next ones.
        shapes = (array.shape, array.dtype), (inputs.query.shape, inputs.query.dtype)
        is_like = places is not None and packed is None and shapes[0] == shapes[1]
        return Output(array, by_item(array).spec, over=query if is_like else None)

    def state(heads: int, d: int, dtype: np.dtype | None = None) -> Any:
        shape = (d, plan.R) if plan.transposed else (plan.R, d)
        return pltpu.VMEM((heads, *shape), jnp.float32 if dtype is None else dtype)

    lanes = plan.rows_of_number if plan.transposed else LANES  # that have the same number
    lse = (1, plan.R) if plan.transposed else (plan.R, LANES)
    scores = pltpu.VMEM((plan.chunk + plan.sublanes, SUB_ROWS), jnp.float32)

    return CacheRefs(
        packed=None if packed is None else PackedRefs(
            Places(*map(Prefetched, packed.places)), None,
            pltpu.VMEM((plan.K, plan.R, plan.key_lanes), inputs.query.dtype),
            pltpu.VMEM((plan.K, plan.bq, plan.G, plan.value_lanes), plan.out_dtype), pltpu.SemaphoreType.DMA((1,)),
        ),
        schedule=ItemSchedule(*map(Prefetched, inputs.schedule)),
        block=Prefetched(inputs.block),
        scalars=tuple(map(Prefetched, values.scalars)),
        scales=tuple(map(Prefetched, values.scales)),
        query=query,
        by_row=tuple(map(by_item, values.by_row)),
        new=None if new is None else _written(plan, new, by_item),
        prompts=None if inputs.prompts is None else (_prompts(inputs.prompts), _prompt_buffers(plan, inputs.sources)),
        table=table,
        words=words,
        out=result((plan.R, plan.value_lanes), plan.out_dtype) if packed is None
        else Output(output_like(packed.out, packed.out.shape, packed.out.dtype), ANY, over=packed.out),
        lse=result(lse, np.dtype(np.float32)) if plan.wants_lse else None,
        sources=tuple(
            Input(x, ANY) if new is None and inputs.prompts is None
            else Output(output_like(inputs.query, x.shape, x.dtype), ANY, over=x)
            for x in inputs.sources
        ),
        by_key=None if values.by_key is None else Input(values.by_key, ANY),
        state=ItemState(
            m=state(plan.K, lanes),
            l=state(plan.K, lanes),
            acc=state(plan.K, plan.value_lanes),
            by_row=() if plan.transposed else tuple(state(x.shape[1], LANES, x.dtype) for x in values.by_row),
        ),
        scores=(scores,) * (LAG + 1) if plan.transposed else (),
        buffers=tuple(pltpu.VMEM((plan.buffers, plan.K, *_buffer(plan, x)), x.dtype) for x in inputs.sources),
        by_key_buffer=pltpu.VMEM((plan.buffers, rows, plan.bk), jnp.int32) if rows else None,
        pages=pltpu.SMEM((2 * plan.piece,), jnp.int32),
        stream=pltpu.SMEM((StreamState.size,), jnp.int32),
        arrived=pltpu.SemaphoreType.DMA((plan.buffers,)),
        piece_arrived=pltpu.SemaphoreType.DMA((2,)),
        missing=MissingRefs(
            loaded=pltpu.SMEM((1, LANES), jnp.int32),
            present=pltpu.VMEM((plan.sublanes, plan.bk), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((1,)),
        ) if plan.is_paged else None,
        written=None if new is None else pltpu.SemaphoreType.DMA((1,)),
    )  # fmt: skip


def memory(plan: CachePlan, refs: PyTree) -> int:
    """Bytes of vector memory that a kernel may use: what it declares, scores that are spilled, and a margin."""
    scores = 16 * plan.R * min(plan.bk, 4 * plan.chunk)
    return min(plan.vmem, math.ceil(1.1 * (needed(refs, plan.sublanes) + scores)) + (4 << 20))


def _written(plan: CachePlan, new: Written, by_item: Callable[[jax.Array], Input]) -> Written:
    begin = None if new.begin is None else Prefetched(new.begin)
    tokens = tuple(by_item(x) if begin is None else _by_token(plan, x, begin) for x in new.tokens)
    return Written(Prefetched(new.first), Prefetched(new.stop), Prefetched(new.blocks), begin, tokens)


def _by_token(plan: CachePlan, x: jax.Array, begin: Prefetched) -> Input:
    """The T tokens that an item may have, of all [tokens, K, d]."""

    def index(core: jax.Array, step: jax.Array, begin: Any) -> tuple[Any, ...]:
        return begin[step * plan.cores + core], 0, 0

    return Input(x, pl.BlockSpec(tuple(map(pl.Element, (plan.T, *x.shape[1:]))), index), by=begin)


def _prompts(new: Prompts) -> Prompts:
    return jax.tree.map(Prefetched, new)._replace(tokens=tuple(Input(x, ANY) for x in new.tokens))


def _prompt_buffers(plan: CachePlan, arrays: Sequence[jax.Array]) -> PromptBuffers:
    chunk, groups, buffers = sizes(plan, arrays)

    def buffer(x: jax.Array, slots: int) -> Any:
        return pltpu.VMEM((buffers, plan.K, slots, *x.shape[3:]), x.dtype)

    tokens = tuple(buffer(x, chunk + group) for x, group in zip(arrays, groups, strict=True))
    semaphores = pltpu.SemaphoreType.DMA((buffers,))
    return PromptBuffers(tokens, tuple(buffer(x, chunk) for x in arrays), semaphores, semaphores)


def _by_item(plan: CachePlan, x: Any, places: int | None = None) -> Input:
    """An array [items, …], and the block of a grid step."""
    rest = x.shape[1:]

    def index(core: jax.Array, step: jax.Array, *prefetched: Any) -> tuple[Any, ...]:
        return step * plan.cores + core if places is None else prefetched[places][step], *[0] * len(rest)

    return Input(x, pl.BlockSpec((1, *rest), index))


def _in_place(plan: CachePlan, lanes: int, places: int | None) -> pl.BlockSpec:
    """The block of a grid step of packed queries [N, K, G, lanes], which begins at any of them."""

    def index(core: jax.Array, step: jax.Array, *prefetched: Any) -> tuple[Any, ...]:
        first = prefetched[0][step * plan.cores + core] if places is None else prefetched[2 + places][step]
        return begin_of(first, plan.N, plan.bq), 0, 0, 0

    return pl.BlockSpec(tuple(map(pl.Element, (plan.bq, plan.K, plan.G, lanes))), index)


def _buffer(plan: CachePlan, x: jax.Array) -> tuple[int, ...]:
    """The shape of a tile of a kv head in vector memory.

    A transfer between different layouts costs the core a descriptor of strides. For 2-byte elements, vector memory of
    tpu7x has tiles of (16, 128), and main memory of (8, 128); arrays with 8 rows have the latter in both.
    """
    is_wide = x.ndim == 4 and x.dtype.itemsize == 2 and x.shape[3] > LANES and plan.bk % plan.sublanes == 0
    if is_wide and not plan.interpret:  # the interpreter has no transfers to a reshaped reference
        return plan.bk // plan.sublanes, plan.sublanes, x.shape[3]
    return (plan.bk, *x.shape[3:])


def as_slots(x: Ref) -> Ref:
    """A reference to an array with the shape of `_buffer`, as [buffers, K, bk, …]."""
    return x if len(x.shape) < 5 else x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])
