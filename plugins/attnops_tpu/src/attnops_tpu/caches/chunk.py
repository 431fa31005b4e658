"""A chunk of a tile's keys, for one kv head: which of its scores are not masked, and the soft cap and the bias."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attnops.kernels import Elementwise
from attnops_tpu.caches.between import Between
from attnops_tpu.caches.operands import Kind, Value, values_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile
from attnops_tpu.flash.tile import REPLACEMENTS

if TYPE_CHECKING:
    from attnops.typing import Leaf


class Seen(NamedTuple):
    """Which keys of a chunk some query sees, booleans [1, size] and [size, 1]."""

    row: jax.Array
    column: jax.Array


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The scores of a kv head and a chunk of a tile's keys: [rows, size], or [size, rows] if scores are transposed."""

    plan: CachePlan
    refs: CacheRefs  # the references of the grid step
    tile: Tile  # the tile of keys
    buffer: jax.Array  # the index of the tile's buffer
    head: int  # the kv head
    start: jax.Array | int  # the first key, counted from the tile's first
    size: int  # how many keys
    between: Between  # the transfers to start between reads
    at: slice  # which rows of queries, all of them unless scores are transposed

    @property
    def keys(self) -> Any:
        """The range of keys in the tile."""
        return pl.ds(self.start, self.size)

    @property
    def mask_varies_by_head(self) -> bool:
        """Whether heads have different masks."""
        mask = self.plan.scoring.mask
        return mask is not None and "h" in mask.axes

    @property
    def rows(self) -> int:
        """Rows of queries."""
        return self.at.stop - self.at.start

    def visible(self) -> jax.Array:
        """Which scores are not masked, booleans."""
        plan = self.plan
        mask, shape = plan.scoring.mask, (self.size, self.rows) if plan.transposed else (self.rows, self.size)
        q, kv = self._indices()
        # Each costs some instructions a register: no tile reaches beyond S if tiles divide it.
        given = [kv < plan.S] if plan.S % plan.bk else []
        if mask is not None:
            given.append(self._apply(mask, None, q, kv, self._values("mask")))
        if self.refs.missing is not None:
            present = self.refs.missing.present[:1, self.keys]
            given.append((_to_column(plan, present) if plan.transposed else present) != 0)
        visible = functools.reduce(
            jnp.bitwise_and, [jnp.broadcast_to(x, shape) for x in given or [jnp.ones(shape, bool)]]
        )
        if self.refs.by_key_buffer is not None:
            # The values by key of a FULL tile were not transferred.
            visible |= jnp.full(shape, self.tile.is_full.astype(jnp.int32)) != 0
        return visible

    def seen(self, visible: jax.Array) -> Seen:
        """The keys that some query sees, from `visible`."""
        if self.plan.transposed:
            seen = jnp.max(visible.astype(jnp.float32), axis=1, keepdims=True) > 0
            return Seen(seen, seen)
        row = jnp.max(visible.astype(jnp.float32), axis=0, keepdims=True)
        return Seen(row > 0, _to_column(self.plan, row) > 0)

    def with_cap_and_bias(self, scores: jax.Array) -> jax.Array:
        """Scores, float32 times the full scale, with soft cap and bias."""
        plan = self.plan
        scoring = plan.scoring
        if scoring.cap is not None:
            scores = scoring.cap * jnp.tanh(scores * (1 / scoring.cap))
        if scoring.bias is not None:
            # Beyond the ragged end the indices are those of the last query and key, so that none is out of range.
            q, kv = (jnp.minimum(i, n - 1) for i, n in zip(self._indices(), (plan.T, plan.S), strict=True))
            biased = self._apply(scoring.bias, scores, q, kv, self._values("bias"))
            scores = jnp.broadcast_to(biased, scores.shape)
        return scores

    def _apply(
        self, function: Elementwise, scores: jax.Array | None, q: jax.Array, kv: jax.Array, given: list[Leaf]
    ) -> jax.Array:
        h = self.head * self.plan.G + self.plan.head_of(self._row())
        return function.apply(scores, self.tile.entry, h, q, kv, given, (), REPLACEMENTS)

    def _values(self, name: str) -> list[Leaf]:
        """The values of a function: numbers, and arrays that scores broadcast with."""
        arrays = []
        for value in values_of(self.plan, name):
            x = self._value(value)
            arrays.append(x != 0 if value.dtype == jnp.bool_ else x.astype(value.dtype))
        return arrays

    def _value(self, value: Value) -> jax.Array:
        plan = self.plan
        if value.kind is Kind.SCALAR:
            return self.refs.scalars[value.place][self.tile.item if value.by_query else self.tile.entry]
        if value.kind is Kind.BY_ROW:
            if plan.transposed:
                given = self.refs.by_row[value.place]
                return given[0, pl.ds(self.head if given.shape[1] > 1 else 0, 1), self.at]
            ref = self.refs.state.by_row[value.place]
            return ref[self.head if ref.shape[0] > 1 else 0][:, :1]
        count = plan.G if value.by_head else 1
        first = value.place + (self.head * plan.G if value.by_head else 0)
        rows = self.refs.by_key_buffer[self.buffer, first : first + count, self.keys]
        if jnp.issubdtype(value.dtype, jnp.floating):
            rows = lax.bitcast_convert_type(rows, jnp.float32)
        if plan.transposed:
            columns = [_to_column(plan, rows[g : g + 1]) for g in range(count)]
            of_head = plan.head_of(self._row())
            return functools.reduce(lambda x, g: jnp.where(of_head >= g, columns[g], x), range(1, count), columns[0])
        if count == 1 or plan.bq == 1:
            return rows
        if plan.N:
            return jnp.concatenate([rows] * plan.bq)
        return jnp.concatenate([jnp.broadcast_to(rows[g : g + 1], (plan.bq, self.size)) for g in range(count)])

    def _row(self) -> jax.Array:
        """The rows of queries, [rows, 1], or [1, rows] if scores are transposed."""
        shape, axis = ((1, self.rows), 1) if self.plan.transposed else ((self.rows, 1), 0)
        return self.at.start + lax.broadcasted_iota(jnp.int32, shape, axis)

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """The indices of queries and of slots, which scores broadcast with."""
        plan = self.plan
        first = lax.rem(self.tile.item, jnp.int32(plan.nq)) * plan.bq
        q = first + plan.query_of(self._row())
        shape, axis = ((self.size, 1), 0) if plan.transposed else ((1, self.size), 1)
        kv = self.tile.number * plan.bk + self.start + lax.broadcasted_iota(jnp.int32, shape, axis)
        return q, kv


def _to_column(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[1, n] to [n, 1]."""
    return jnp.broadcast_to(x, (plan.sublanes, x.shape[1])).T[:, :1]
