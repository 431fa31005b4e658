"""Small and large tiles of packed rows in one kernel: keys of small ones are transferred while large ones are computed.

Rows that decode are bound by memory, prompts by products. Parts of large items are placed evenly among small items, and
more buffers than otherwise hold the keys of those that come after a part.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import equally_varying, one_by_one
from attnops_tpu.caches.item import finish, run_item
from attnops_tpu.caches.operands import KernelInputs, KernelResults, in_main_memory
from attnops_tpu.caches.parts import MAX_PARTS, Part, Parts, split
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import words_of
from attnops_tpu.caches.references import CacheRefs, memory, references
from attnops_tpu.caches.schedule import ItemSchedule, following, rows_a_call
from attnops_tpu.caches.write_prompts import write_prompts
from attnops_tpu.flash.launch import ARBITRARY, PARALLEL
from attnops_tpu.generations import MAX_CODE
from attnops_tpu.references import Prefetched, call_kernel

# The share of vector memory that tiles of keys have, and the most of them.
_SHARE: Final = 3
_BUFFERS: Final = 16


# Bundles of a kernel's code: of small items whatever their kv heads, and of each up to 8; of large ones whatever their
# size, of a kv head, and of 512 × 512 scores with D = 128; and, if these read queries in place, of their masks and of
# a row of a kv head. Fitted to kernels on v6e, see NOTES.md; it is rather too much than too little.
_SMALL_CODE: Final = 2_000, 350
_LARGE_CODE: Final = 4_500, 180, 450
_IN_PLACE_CODE: Final = 400, 0.35


class MixedPlan(NamedTuple):
    """The plans of both kinds of items, which have the same tiles of keys."""

    small: CachePlan
    large: CachePlan
    parts: int  # the most parts of a large item


class LargeRefs(NamedTuple):
    """The references of large items that small ones do not share; see `attnops_tpu.caches.references.CacheRefs`."""

    packed: Any
    scalars: Any
    query: Any
    by_row: Any
    out: Any  # None for outputs that are written in place
    lse: Any
    state: Any
    scores: Any


class MixedRefs(NamedTuple):
    """The references of a grid step, which computes a small item or a part of a large one."""

    places: tuple[Any, Any]  # int32 [steps] each: the small and the large item of a step; its own, and one that is near
    firsts: tuple[Any, ...]  # int32 [steps] each, the first packed queries of these two items if they are read in place
    is_large: Any  # int32 [steps], whether a step's item is large
    part: Part  # int32 [steps] each, of steps of large items
    small: CacheRefs
    large: LargeRefs


class _Order(NamedTuple):
    """The order of small items and of parts of large ones, small items first if numbered; int32 [steps] each."""

    items: jax.Array
    is_large: jax.Array
    part: Part
    places: tuple[jax.Array, jax.Array]


def mixed_plan(small: tuple[CachePlan, KernelInputs], large: tuple[CachePlan, KernelInputs]) -> MixedPlan | None:
    """The plan of one kernel for small and large items; None if it can't compute both.

    It is of one core, which computes all items in order, scalar memory holds the schedule of all, and the code of both
    is not too much.
    """
    (plan, inputs), other = small, large[0]
    new = inputs.new
    words = 5 + len(large[1].values.scalars) + (0 if new is None else 3 + new.blocks.shape[0] // plan.B)
    words += 4 if plan.N else 0
    parts = min((rows_a_call(1, words, words_of(inputs.prompts)) - plan.B) // other.B, other.nk, MAX_PARTS)
    # Interpreted, tiles of keys of the same given size may be rounded differently.
    if plan.cores > 1 or plan.bk != other.bk or parts < 1:
        return None
    if code_of(plan) + code_of(other) > MAX_CODE:
        return None
    tile = sum(plan.K * plan.bk * math.prod(x.shape[3:]) * x.dtype.itemsize for x in inputs.sources)
    buffers = max(min(plan.vmem // _SHARE // tile, _BUFFERS), plan.buffers)
    plan, other = (dataclasses.replace(x, keys_by_cache_row=True, buffers=buffers) for x in (plan, other))
    return MixedPlan(plan, other, parts)


def code_of(plan: CachePlan) -> float:
    """An estimate of the bundles of code of items, which are straight-line but for loops over tiles."""
    work = 2 if plan.scoring.has_cap_or_bias or plan.dtype != jnp.bfloat16 else 1
    if not plan.transposed:
        fixed, of_head = _SMALL_CODE
        return work * (fixed + of_head * min(plan.K, 8))
    keys = (plan.chunk if plan.is_looped else plan.bk) + plan.masked_chunk  # of a tile without a mask, and of one with
    scores = work * plan.H * plan.bq * keys / 512**2
    wide = 0.45 + 0.55 * (plan.D + plan.Dv) / 256  # only products have more code for more features
    fixed, of_head, of_scores = _LARGE_CODE
    code = fixed + of_head * plan.K + of_scores * scores * wide
    if plan.N:
        of_masks, of_row = _IN_PLACE_CODE
        code += work * of_masks + of_row * plan.K * plan.R
    return code


@one_by_one
def run_mixed(
    plan: MixedPlan, small: KernelInputs, large: KernelInputs, exists: tuple[jax.Array, jax.Array]
) -> tuple[KernelResults, KernelResults]:
    """The kernel for all items; ``exists``: which small and which large items do, the first ones."""
    small, large, exists = equally_varying((small, large, exists))
    parts = split(plan.large, large.schedule, exists[1], exists[0].sum(dtype=jnp.int32), plan.parts)
    order = _order(exists[0], parts)
    steps = plan.small.B + plan.large.B * plan.parts
    whole = plan._replace(
        small=dataclasses.replace(plan.small, B=steps), large=dataclasses.replace(plan.large, B=steps)
    )
    large = large._replace(schedule=parts.schedule)
    refs = _references(plan, whole, in_main_memory(plan.small, small), large, order)
    results = iter(call_kernel(
        lambda given: _run_item(whole, given), refs, "attnops_ragged",
        grid=(1, jnp.maximum(sum(x.sum(dtype=jnp.int32) for x in (exists[0], parts.exists)), 1)),
        params=pltpu.CompilerParams(
            dimension_semantics=(PARALLEL, ARBITRARY), vmem_limit_bytes=memory(plan.large, refs),
            disable_bounds_checks=not plan.small.bounds_checks,
        ),
        interpret=plan.small.interpret,
    ))  # fmt: skip
    wants_lse, writes = plan.small.wants_lse, small.new is not None
    of_small = next(results), next(results) if wants_lse else None
    sources = tuple(next(results) for _ in small.sources) if writes else ()
    of_large = of_small[0] if plan.small.N else next(results), next(results) if wants_lse else None
    return KernelResults(*of_small, sources), KernelResults(*of_large, ())


def _order(small: jax.Array, parts: Parts) -> _Order:
    """The order of steps; ``small``: which small items exist, bool [n]."""
    n, number = small.shape[0], jnp.cumsum(parts.exists) - 1
    apart = (small.sum() / jnp.maximum(number[-1] + 1, 1)).astype(jnp.float32)
    at = jnp.concatenate([jnp.arange(n, dtype=jnp.float32), number * apart - 0.5])
    items = jnp.argsort(jnp.where(jnp.concatenate([small, parts.exists]), at, jnp.inf)).astype(jnp.int32)
    is_large = items >= n
    part = Part(*(is_large & x[jnp.maximum(items - n, 0)] for x in (parts.is_first, parts.is_last)))
    places = (jnp.maximum(jnp.cumsum(x, dtype=jnp.int32) - 1, 0) for x in (~is_large, part.is_first))
    is_large, part = jax.tree.map(lambda x: x.astype(jnp.int32), (is_large, part))
    return _Order(items, is_large, part, tuple(places))  # type: ignore[arg-type]


def _references(
    plan: MixedPlan, whole: MixedPlan, small: KernelInputs, large: KernelInputs, order: _Order
) -> MixedRefs:
    n, m = plan.small.B, plan.large.B * plan.parts

    def of_small(x: jax.Array) -> jax.Array:
        """Numbers of small items, each one or several, in the order of steps."""
        return jnp.pad(x.reshape(n, -1), ((0, m), (0, 0)))[order.items].reshape(-1)

    def of_large(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.repeat(x, plan.parts), (n, 0))[order.items]

    # What is an array by item is one of all; `missing` of a storage without pages is not.
    pairs = zip(small.schedule, large.schedule, strict=True)
    given = ItemSchedule(*(x if len(x) == 1 < n else jnp.concatenate([x[:n], y[:m]])[order.items] for x, y in pairs))
    some = following(whole.small, given.stop > given.first)
    new = small.new
    if new is not None:
        assert new.begin is not None
        # Steps of large items have the tokens of the small item before: so none are transferred.
        begin = new.begin[order.places[0]]
        new = new._replace(first=of_small(new.first), stop=of_small(new.stop), blocks=of_small(new.blocks), begin=begin)
    values = small.values._replace(scalars=tuple(map(of_small, small.values.scalars)))
    small = small._replace(schedule=given._replace(following=some), new=new, values=values)
    values = large.values._replace(scalars=tuple(map(of_large, large.values.scalars)))
    declared, other = references(plan.small, small, 0), references(plan.large, large._replace(values=values), 1)
    places = Prefetched(order.places[0]), Prefetched(order.places[1])
    own = LargeRefs(*(getattr(other, name) for name in LargeRefs._fields))
    firsts: tuple[Prefetched, ...] = ()
    if small.packed is not None and large.packed is not None:
        both = zip((small.packed, large.packed), order.places, strict=True)
        firsts, own = tuple(Prefetched(x.places.first[place]) for x, place in both), own._replace(out=None)
    part = Part(*map(Prefetched, order.part))
    return MixedRefs(places, firsts, Prefetched(order.is_large), part, declared, own)


def _run_item(plan: MixedPlan, refs: MixedRefs) -> None:
    """A grid step."""
    write_prompts(plan.small, refs.small)
    step = pl.program_id(1)
    is_large = refs.is_large[step] != 0
    small = refs.small._replace(prompts=None)
    part = Part(*(x[step] != 0 for x in refs.part))
    large = small._replace(new=None, part=part, **refs.large._asdict())
    if plan.small.N:
        large = large._replace(out=small.out)
    small, large = (x.of_item(place[step]) for x, place in zip((small, large), refs.places, strict=True))
    pl.when(~is_large)(lambda: run_item(plan.small, small))
    pl.when(is_large)(lambda: run_item(plan.large, large))
    finish(small.outputs(plan.small), large.outputs(plan.large))
