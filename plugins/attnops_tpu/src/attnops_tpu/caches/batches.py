"""Batches whose schedule would not fit scalar memory: rows in several calls of the kernel, one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp

from attnops_tpu.caches.in_place import Places
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.operands import CacheArrays, KernelInputs, KernelResults
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import words_of
from attnops_tpu.caches.schedule import ItemSchedule, following, rows_a_call

_BY_ITEM: Final = "first", "stop", "first_full", "stop_full"


def run_in_batches(
    run: Callable[[CachePlan, KernelInputs], KernelResults], plan: CachePlan, inputs: KernelInputs
) -> KernelResults:
    """``run(plan, inputs)`` for all rows, in several calls if needed, each given what those before have written."""
    new = inputs.new
    # A row that writes also has its first and last slot, its first token, and its blocks.
    words = 0 if new is None else 3 + new.blocks.shape[0] // plan.B
    words += 0 if inputs.packed is None else 2
    most = rows_a_call(plan.nq, words, words_of(inputs.prompts))
    if most >= plan.B:
        return run(plan, inputs)
    together = plan.cores // math.gcd(plan.cores, plan.nq)  # rows after which the order of cores repeats
    size = max(most // together, 1) * together
    by_batch: list[KernelResults] = []
    for first in range(0, plan.B, size):
        of_rows = dataclasses.replace(plan, B=min(size, plan.B - first))
        results = run(of_rows, _Batch(plan, of_rows, first).inputs(inputs))
        # The first call has written all prompts.
        inputs = inputs._replace(sources=results.sources or inputs.sources, prompts=None)
        if inputs.packed is not None:
            inputs = inputs._replace(packed=inputs.packed._replace(out=results.out))
        by_batch.append(results)
    out = jnp.concatenate([results.out for results in by_batch]) if inputs.packed is None else inputs.packed.out
    lse = [results.lse for results in by_batch if results.lse is not None]
    # Calls after the first may write nothing, and then return no sources.
    written = inputs.sources if by_batch[0].sources else ()
    return KernelResults(out, jnp.concatenate(lse) if lse else None, written)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The rows of one call: slices of the arrays of the whole call."""

    plan: CachePlan  # the plan of the whole call
    of_rows: CachePlan  # the plan for these rows
    first: int  # the first of these rows

    def inputs(self, inputs: KernelInputs) -> KernelInputs:
        """The inputs of these rows."""
        plan, packed = self.plan, inputs.packed
        return inputs._replace(
            query=self.items(inputs.query) if packed is None else inputs.query,
            tables=inputs.tables if plan.is_packed else tuple(map(self.pieces, inputs.tables)),
            # A row of a storage without pages has the block of its number.
            block=inputs.block if plan.is_paged or plan.is_packed else inputs.block + self.first,
            values=self.values(inputs.values),
            schedule=self.schedule(inputs.schedule),
            new=None if inputs.new is None else self.written(inputs.new),
            packed=None if packed is None else packed._replace(places=Places(*map(self.items, packed.places))),
        )

    def items(self, x: jax.Array) -> jax.Array:
        start = self.first * self.plan.nq
        return x[start : start + self.of_rows.items]

    def rows(self, x: jax.Array) -> jax.Array:
        return x[self.first : self.first + self.of_rows.B]

    def pieces(self, x: jax.Array) -> jax.Array:
        each = x.shape[0] // self.plan.B
        return x[self.first * each : (self.first + self.of_rows.B) * each]

    def values(self, given: CacheArrays) -> CacheArrays:
        by_key = given.by_key
        if by_key is not None and by_key.shape[0] > 1 and not self.plan.keys_by_cache_row:
            by_key = self.rows(by_key)
        return given._replace(
            scalars=tuple(self.rows(x) if x.shape[0] == self.plan.B else self.items(x) for x in given.scalars),
            by_row=tuple(map(self.items, given.by_row)),
            by_key=by_key,
        )

    def schedule(self, items: ItemSchedule) -> ItemSchedule:
        some = items._replace(**{name: self.items(getattr(items, name)) for name in _BY_ITEM})
        missing = items.missing if items.missing.shape[0] == 1 else self.items(items.missing)
        row = self.items(items.row) if self.plan.is_packed else items.row
        after = following(self.of_rows, some.stop > some.first)
        return some._replace(following=after, missing=missing, row=row)

    def written(self, new: Written) -> Written:
        of_rows = new._replace(first=self.rows(new.first), stop=self.rows(new.stop), blocks=self.pieces(new.blocks))
        if new.begin is None:
            return of_rows._replace(tokens=tuple(map(self.items, new.tokens)))
        return of_rows._replace(begin=self.items(new.begin))
