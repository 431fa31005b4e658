"""Batches whose schedule would not fit scalar memory: rows in several calls of the kernel, one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp

from attnops_tpu.caches.operands import CacheArrays
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.schedule import ItemSchedule, following
from attnops_tpu.caches.tile_sizes import rows_a_call
from attnops_tpu.caches.write import Written

_BY_ITEM: Final = "first", "stop", "first_full", "stop_full"
# Runs the kernel for a plan, the query, arrays of blocks, tables of pages, the first block, other inputs, the schedule
# and new tokens.
Run = Callable[..., tuple[jax.Array, ...]]


def run_in_batches(
    run: Run, plan: CachePlan, query: jax.Array, sources: list[jax.Array], tables: list[jax.Array], block: jax.Array,
    given: CacheArrays, items: ItemSchedule, new: Written | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """``run(plan, query, …)`` for all rows, in several calls if needed, each given what those before have written."""
    # A row that writes also has its first and last slot, and its blocks.
    most = rows_a_call(plan.nq, 0 if new is None else 2 + new.blocks.shape[0] // plan.B)
    if most >= plan.B:
        return run(plan, query, sources, tables, block, given, items, new)
    together = plan.cores // math.gcd(plan.cores, plan.nq)  # rows after which cores take turns in the same order again
    size = max(most // together, 1) * together
    by_batch: list[tuple[jax.Array, ...]] = []
    for first in range(0, plan.B, size):
        of_rows = dataclasses.replace(plan, B=min(size, plan.B - first))
        batch = _Batch(plan, of_rows, first)
        # A row of a storage without pages has the block of its number.
        start = block if plan.is_paged or plan.is_packed else block + first
        some_tables = tables if plan.is_packed else [batch.pieces(x) for x in tables]
        results = run(
            of_rows, batch.items(query), sources, some_tables, start, batch.arrays(given),
            batch.schedule(items), None if new is None else batch.written(new),
        )  # fmt: skip
        if new is not None:
            results, sources = results[: -len(sources)], list(results[-len(sources) :])
        by_batch.append(results)
    joined = [jnp.concatenate(x) for x in zip(*by_batch, strict=True)]
    return (*joined, *(sources if new is not None else ()))


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The rows of one call: slices of the arrays of the whole call.

    Attributes:
        plan: the plan of the whole call.
        of_rows: the plan for these rows.
        first: the first of these rows.
    """

    plan: CachePlan
    of_rows: CachePlan
    first: int

    def items(self, x: jax.Array) -> jax.Array:
        start = self.first * self.plan.nq
        return x[start : start + self.of_rows.items]

    def rows(self, x: jax.Array) -> jax.Array:
        return x[self.first : self.first + self.of_rows.B]

    def pieces(self, x: jax.Array) -> jax.Array:
        each = x.shape[0] // self.plan.B
        return x[self.first * each : (self.first + self.of_rows.B) * each]

    def arrays(self, given: CacheArrays) -> CacheArrays:
        by_key = given.by_key
        return given._replace(
            scalars=tuple(self.rows(x) if x.shape[0] == self.plan.B else self.items(x) for x in given.scalars),
            by_row=tuple(map(self.items, given.by_row)),
            by_key=by_key if by_key is None or by_key.shape[0] == 1 or self.plan.is_by_row else self.rows(by_key),
        )

    def schedule(self, items: ItemSchedule) -> ItemSchedule:
        some = items._replace(**{name: self.items(getattr(items, name)) for name in _BY_ITEM})
        missing = items.missing if items.missing.shape[0] == 1 else self.items(items.missing)
        row = self.items(items.row) if self.plan.is_packed else items.row
        after = following(self.of_rows, some.stop > some.first)
        return some._replace(following=after, missing=missing, row=row)

    def written(self, new: Written) -> Written:
        tokens = tuple(map(self.items if self.plan.nq == 1 else self.rows, new.tokens))
        return Written(self.rows(new.first), self.rows(new.stop), self.pieces(new.blocks), tokens)
