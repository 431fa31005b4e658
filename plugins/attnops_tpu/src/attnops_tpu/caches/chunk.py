"""A chunk of a tile's keys, for one kv head: which of its scores are not masked, and the soft cap and the bias."""

from __future__ import annotations

import dataclasses
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
    """The scores [R, size] of a kv head and a chunk of a tile's keys."""

    plan: CachePlan
    refs: CacheRefs  # the references of the grid step
    tile: Tile  # the tile of keys
    buffer: jax.Array  # the index of the tile's buffer
    head: int  # the kv head
    start: jax.Array | int  # the first key, counted from the tile's first
    size: int  # how many keys
    between: Between  # the transfers to start between reads

    @property
    def keys(self) -> Any:
        """The range of keys in the tile."""
        return pl.ds(self.start, self.size)

    @property
    def mask_varies_by_head(self) -> bool:
        """Whether heads have different masks."""
        mask = self.plan.scoring.mask
        return mask is not None and "h" in mask.axes

    def visible(self) -> jax.Array:
        """Which scores are not masked, booleans [R, size]."""
        plan = self.plan
        mask, shape = plan.scoring.mask, (plan.R, self.size)
        q, kv = self._indices()
        visible = jnp.broadcast_to(kv < plan.S, shape)
        if mask is not None:
            given = self._values("mask")
            visible &= jnp.broadcast_to(self._apply(mask, None, q, kv, given), shape)
        if self.refs.missing is not None:
            visible &= jnp.broadcast_to(self.refs.missing.present[:1, self.keys] != 0, shape)
        # The values by key of a FULL tile were not transferred.
        return visible | (jnp.full(shape, self.tile.is_full.astype(jnp.int32)) != 0)

    def seen(self, visible: jax.Array) -> Seen:
        """The keys that some query sees, from `visible`."""
        row = jnp.max(visible.astype(jnp.float32), axis=0, keepdims=True)
        return Seen(row > 0, _to_column(row) > 0)

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
        plan = self.plan
        row = lax.broadcasted_iota(jnp.int32, (plan.R, 1), 0)
        h = self.head * plan.G + lax.div(row, jnp.int32(plan.bq))
        return function.apply(scores, self.tile.entry, h, q, kv, given, (), REPLACEMENTS)

    def _values(self, name: str) -> list[Leaf]:
        """The values of a function: numbers, [R, 1] and [1 or R, size]."""
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
            ref = self.refs.state.by_row[value.place]
            return ref[self.head if ref.shape[0] > 1 else 0][:, :1]
        count = plan.G if value.by_head else 1
        first = value.place + (self.head * plan.G if value.by_head else 0)
        rows = self.refs.by_key_buffer[self.buffer, first : first + count, self.keys]
        if jnp.issubdtype(value.dtype, jnp.floating):
            rows = lax.bitcast_convert_type(rows, jnp.float32)
        if count == 1 or plan.bq == 1:
            return rows
        return jnp.concatenate([jnp.broadcast_to(rows[g : g + 1], (plan.bq, self.size)) for g in range(count)])

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """The indices of queries, [R, 1], and of slots, [1, size]."""
        plan = self.plan
        row = lax.broadcasted_iota(jnp.int32, (plan.R, 1), 0)
        first = lax.rem(self.tile.item, jnp.int32(plan.nq)) * plan.bq
        q = first + lax.rem(row, jnp.int32(plan.bq))
        kv = self.tile.number * plan.bk + self.start + lax.broadcasted_iota(jnp.int32, (1, self.size), 1)
        return q, kv


def _to_column(x: jax.Array) -> jax.Array:
    """[1, n] to [n, 1]."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]
