"""What happens to the scores of a tile inside a kernel. Scores are transposed, [keys, queries]."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.dropout import dropout_keep
from attnops.kernels import Elementwise
from attnops_tpu.flash.operands import Place
from attnops_tpu.flash.plan import Plan

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2)
# Mosaic lowers these only where it knows the TPU, which a host that exports has not.
INSTEAD: Final[Mapping[str, Callable[..., Any]]] = {
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)).astype(x.dtype),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of one tile: ``rows`` keys from ``row`` on by ``cols`` queries from ``col`` on, and what belongs to it.

    Attributes:
        plan: of the call.
        refs: references to the tile's blocks, by the names of `score_operands`.
        place: which tile.
    """

    plan: Plan
    refs: Mapping[str, Any]
    place: Place
    row: int
    rows: int
    col: int
    cols: int

    @property
    def keys(self) -> slice:
        """The keys within the tile."""
        return slice(self.row, self.row + self.rows)

    @property
    def queries(self) -> slice:
        """The queries within the tile."""
        return slice(self.col, self.col + self.cols)

    @property
    def batch(self) -> Any:
        """Which of the caller's batch."""
        return self.place.b if self.plan.inner == self.plan.B else lax.rem(self.place.b, self.plan.inner)

    def allowed(self) -> jax.Array:
        """Which scores count, [rows, cols] booleans; for PARTIAL tiles."""
        plan, mask, shape = self.plan, self.plan.scoring.mask, (self.rows, self.cols)
        q, kv = self._indices()
        counts = None
        if mask is not None:
            given = [self._by_score(f"dense{i}") != 0 for i in range(plan.scoring.dense)]
            values = self.values("mask", mask)
            counts = mask.apply(None, self.batch, self.place.h, q, kv, values, given, INSTEAD)
            counts = jnp.broadcast_to(counts, shape)
        # Queries beyond the ragged end harm nobody, unless they see what others must not.
        ragged_queries = plan.T % plan.bq and plan.scoring.has_fully_masked_tokens
        for inside in [kv < plan.S] * bool(plan.S % plan.bk) + [q < plan.T] * bool(ragged_queries):
            inside = jnp.broadcast_to(inside, shape)
            counts = inside if counts is None else counts & inside
        return jnp.ones(shape, jnp.bool_) if counts is None else counts

    def change(self, scores: jax.Array, values: list[Any]) -> jax.Array:
        """Soft cap and bias on scores [rows, cols] in units of the whole scale.

        Args:
            scores: float32.
            values: of the bias, where it is elementwise; see `values`.
        """
        scoring = self.plan.scoring
        if scoring.cap is not None:
            scores = scoring.cap * jnp.tanh(scores * (1 / scoring.cap))
        if scoring.bias is not None:
            # Beyond the ragged end the indices are those of the last query and key, so that none is out of range.
            q, kv = (jnp.minimum(i, n - 1) for i, n in zip(self._indices(), (self.plan.T, self.plan.S), strict=True))
            changed = scoring.bias.apply(scores, self.batch, self.place.h, q, kv, values, (), INSTEAD)
            scores = jnp.broadcast_to(changed, scores.shape)
        if scoring.table:
            scores = scores + self._by_distance()
        if scoring.array:
            scores = scores + self._by_score("array")
        return scores

    def bias_values(self) -> list[Any]:
        """The values of an elementwise bias; none where there is none."""
        bias = self.plan.scoring.bias
        return [] if bias is None else self.values("bias", bias)

    def drop(self) -> Callable[[jax.Array], jax.Array]:
        """What dropout does to weights [rows, cols]."""
        prob = self.plan.scoring.dropout_prob
        if not prob:
            return lambda weights: weights
        rows = lax.bitcast_convert_type(self.refs["dropout"][:, self.queries], jnp.uint32)
        keep = dropout_keep(rows, self._indices()[1], prob, self.plan.scoring.dropout_step)
        return lambda weights: jnp.where(keep, weights * (1 / (1 - prob)), 0.0)

    def values(self, prefix: str, function: Elementwise) -> list[Any]:
        """What an elementwise function needs here: numbers, [1, cols] and [rows, 1]."""
        found = []
        for i, (axes, dtype) in enumerate(zip(function.values, function.dtypes, strict=True)):
            ref = self.refs[f"{prefix}{i}"]
            if "q" in axes:
                value = ref[:, self.queries]
            elif "kv" in axes:
                value = turned(ref[:, self.keys])
            else:
                value = ref[self.place.b if ref.shape[0] > 1 else 0, self.place.h if ref.shape[1] > 1 else 0]
            found.append(value != 0 if dtype == jnp.bool_ else value.astype(dtype))
        return found

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """Queries, [1, cols], and keys, [rows, 1]."""
        q = self.place.q_tile * self.plan.bq + self.col + lax.broadcasted_iota(jnp.int32, (1, self.cols), 1)
        kv = self.place.kv_tile * self.plan.bk + self.row + lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        return q, kv

    def _by_score(self, name: str) -> jax.Array:
        """A part of an array of T × S elements; float32, or int32 of integers."""
        x = self.refs[name][self.queries, self.keys]
        return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32).T

    def _by_distance(self) -> jax.Array:
        """The bias by distance: each key's row is the one before it, moved on by a query."""
        width = self.rows + self.cols
        rows = jnp.broadcast_to(self.refs["table"][:, pl.ds(self.first_distance(), width)], (self.rows, width))
        return sheared(self.plan, rows, 0)[:, self.rows :]

    def first_distance(self) -> Any:
        """Where the part's stretch of the table begins, of which score (j, i) takes number ``rows + i - j``."""
        plan = self.plan
        first = self.place.q_tile * plan.bq - self.place.kv_tile * plan.bk + (plan.Sp + self.col - self.row - self.rows)
        return first if plan.interpret else pl.multiple_of(first, 128)


def held(plan: Plan) -> float:
    """What a score, as kernels hold it, is in natural units: without cap and bias the scale's rest is left out."""
    return 1.0 if plan.scoring.changes_scores else plan.rest


def unit(plan: Plan) -> float:
    """What they are multiplied by to become exponents of two."""
    return held(plan) * LOG2E


def sheared(plan: Plan, x: jax.Array, shift: int) -> jax.Array:
    """Each row of ``x`` moved on, cyclically, by ``shift`` and one more than the row before it."""
    if plan.strided_rotation:
        return pltpu.roll(x, shift, 1, stride=1, stride_axis=0)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    x = pltpu.roll(x, shift, 1)
    # By the binary digits of the row's number.
    for digit in range((x.shape[0] - 1).bit_length()):
        x = jnp.where((row >> digit) & 1 == 1, pltpu.roll(x, (1 << digit) % x.shape[1], 1), x)
    return x


def turned(x: jax.Array) -> jax.Array:
    """[1, n] to [n, 1]."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def turned_back(x: jax.Array) -> jax.Array:
    """[n, 1] to [1, n]."""
    return jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]


def without_unseen_keys(x: jax.Array, counts: jax.Array, axis: int) -> jax.Array:
    """``x`` with 0 for the keys, along ``axis``, that no query of the part sees.

    A weight of 0 times whatever such a token holds, NaN for one, must be 0.
    """
    seen = jnp.max(counts.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.where((seen if axis == 0 else turned_back(seen)) > 0, x, jnp.zeros((), x.dtype))


def without_unseen_queries(x: jax.Array, counts: jax.Array) -> jax.Array:
    """``x`` [d, cols] with 0 for the queries that see no key of the part."""
    seen = jnp.max(counts.astype(jnp.float32), axis=0, keepdims=True)
    return jnp.where(seen > 0, x, jnp.zeros((), x.dtype))


def product(plan: Plan, a: jax.Array, b: jax.Array, a_axis: int = 1, b_axis: int = 0) -> jax.Array:
    """A product on the matrix unit, accumulated in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=plan.precision, preferred_element_type=jnp.float32)
