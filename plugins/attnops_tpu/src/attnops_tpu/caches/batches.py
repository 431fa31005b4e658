"""Batches whose schedule would not fit scalar memory: rows in several calls of the kernel, one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp

from attnops_tpu.caches.operands import Arrays
from attnops_tpu.caches.plan import Plan
from attnops_tpu.caches.schedule import Schedule, following
from attnops_tpu.caches.tile_sizes import rows_a_call
from attnops_tpu.caches.write import Written

_BY_ITEM: Final = "first", "stop", "first_full", "stop_full"
# Of a plan, the query, arrays of blocks, tables of pages, the first block, other inputs, the schedule and new tokens.
Run = Callable[..., tuple[jax.Array, ...]]


def run_in_batches(
    run: Run, plan: Plan, query: jax.Array, sources: list[jax.Array], tables: list[jax.Array], block: jax.Array,
    given: Arrays, items: Schedule, new: Written | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """``run(plan, query, …)``, of all rows together or of some after others; what one writes the next is given."""
    # Of a row that writes: its first and last slot, and its blocks.
    most = rows_a_call(plan.nq, 0 if new is None else 2 + new.blocks.shape[0] // plan.B)
    if most >= plan.B:
        return run(plan, query, sources, tables, block, given, items, new)
    together = plan.cores // math.gcd(plan.cores, plan.nq)  # whose items are given to the cores in the same turns
    size = max(most // together, 1) * together
    found: list[tuple[jax.Array, ...]] = []
    for first in range(0, plan.B, size):
        own = dataclasses.replace(plan, B=min(size, plan.B - first))
        part = _Part(plan, own, first)
        # A row of a storage without pages has the block of its number.
        start = block if plan.is_paged or plan.is_packed else block + first
        own_tables = tables if plan.is_packed else [part.pieces(x) for x in tables]
        results = run(
            own, part.items(query), sources, own_tables, start, part.arrays(given),
            part.schedule(items), None if new is None else part.written(new),
        )  # fmt: skip
        if new is not None:
            results, sources = results[: -len(sources)], list(results[-len(sources) :])
        found.append(results)
    joined = [jnp.concatenate(x) for x in zip(*found, strict=True)]
    return (*joined, *(sources if new is not None else ()))


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows from ``first`` on: what belongs to them of arrays of the whole plan."""

    plan: Plan
    own: Plan
    first: int

    def items(self, x: jax.Array) -> jax.Array:
        start = self.first * self.plan.nq
        return x[start : start + self.own.items]

    def rows(self, x: jax.Array) -> jax.Array:
        return x[self.first : self.first + self.own.B]

    def pieces(self, x: jax.Array) -> jax.Array:
        each = x.shape[0] // self.plan.B
        return x[self.first * each : (self.first + self.own.B) * each]

    def arrays(self, given: Arrays) -> Arrays:
        by_key = given.by_key
        return given._replace(
            scalars=tuple(self.rows(x) if x.shape[0] == self.plan.B else self.items(x) for x in given.scalars),
            by_row=tuple(map(self.items, given.by_row)),
            by_key=by_key if by_key is None or by_key.shape[0] == 1 or self.plan.is_by_row else self.rows(by_key),
        )

    def schedule(self, items: Schedule) -> Schedule:
        own = items._replace(**{name: self.items(getattr(items, name)) for name in _BY_ITEM})
        missing = items.missing if items.missing.shape[0] == 1 else self.items(items.missing)
        row = self.items(items.row) if self.plan.is_packed else items.row
        return own._replace(following=following(self.own, own.stop > own.first), missing=missing, row=row)

    def written(self, new: Written) -> Written:
        tokens = tuple(map(self.items if self.plan.nq == 1 else self.rows, new.tokens))
        return Written(self.rows(new.first), self.rows(new.stop), self.pieces(new.blocks), tokens)
