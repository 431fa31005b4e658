"""The scores of a tile inside a kernel: soft cap, bias, mask and dropout. Scores are transposed, [keys, queries]."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.dropout import dropout_keep
from attnops.kernels import Elementwise
from attnops_tpu.flash.operands import Arrays, TileIndex
from attnops_tpu.flash.plan import FlashPlan

if TYPE_CHECKING:
    from attnops.typing import Function, Leaf, PyTree, Ref
    from attnops_tpu.caches.plan import CachePlan
    from attnops_tpu.flash.tile_schedule import Limits

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2)
# Primitives that Mosaic lowers only if it knows the TPU, which it does not on a host without one.
REPLACEMENTS: Final[Mapping[str, Function]] = {
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)).astype(x.dtype),
}


@dataclasses.dataclass(frozen=True)
class SubTile:
    """A sub-tile: ``rows`` keys starting at ``row``, by ``cols`` queries starting at ``col``, of one tile."""

    plan: FlashPlan
    arrays: Arrays  # references to the tile's blocks of `attnops_tpu.flash.operands.Arrays`
    index: TileIndex  # the index of the tile
    row: int
    rows: int
    col: int
    cols: int
    band: Limits | None = None  # see `attnops_tpu.flash.tile_schedule.Body`

    @property
    def keys(self) -> slice:
        """The range of keys in the tile."""
        return slice(self.row, self.row + self.rows)

    @property
    def queries(self) -> slice:
        """The range of queries in the tile."""
        return slice(self.col, self.col + self.cols)

    @property
    def batch(self) -> jax.Array:
        """The index in the batch, without an axis mapped by `jax.vmap`."""
        return self.index.b if self.plan.inner == self.plan.B else lax.rem(self.index.b, np.int32(self.plan.inner))

    def allowed(self) -> jax.Array:
        """Which scores are not masked, [rows, cols] booleans; for PARTIAL tiles."""
        plan, mask, shape = self.plan, self.plan.scoring.mask, (self.rows, self.cols)
        q, kv = self._indices()
        visible = None
        if self.band is not None:
            low, high = self.band
            visible = None if low is None else kv <= q - low
            if high is not None:
                visible = kv >= q - high if visible is None else visible & (kv >= q - high)
        elif mask is not None:
            given = [self._by_score(ref) != 0 for ref in self.arrays.dense]
            given += [self._chosen(*x) for x in zip(self.arrays.chosen, plan.scoring.chosen, strict=True)]
            values = self._values(mask, self.arrays.mask)
            visible = mask.apply(None, self.batch, self.index.h, q, kv, values, given, REPLACEMENTS)
            visible = jnp.broadcast_to(visible, shape)
        # Queries beyond the ragged end have no effect, unless only they see a key that may hold NaN.
        ragged_queries = plan.T % plan.bq and plan.scoring.has_fully_masked_tokens
        for inside in [kv < plan.S] * bool(plan.S % plan.bk) + [q < plan.T] * bool(ragged_queries):
            inside = jnp.broadcast_to(inside, shape)
            visible = inside if visible is None else visible & inside
        return jnp.ones(shape, jnp.bool_) if visible is None else visible

    def apply_cap_and_bias(self, scores: jax.Array, values: list[Leaf]) -> jax.Array:
        """Scores [rows, cols] with soft cap and bias.

        Args:
            scores: float32, multiplied by the full scale.
            values: the values of an elementwise bias, see `bias_values`.
        """
        scoring = self.plan.scoring
        if scoring.cap is not None:
            scores = scoring.cap * jnp.tanh(scores * (1 / scoring.cap))
        if scoring.bias is not None:
            # Beyond the ragged end the indices are those of the last query and key, so that none is out of range.
            q, kv = (jnp.minimum(i, n - 1) for i, n in zip(self._indices(), (self.plan.T, self.plan.S), strict=True))
            biased = scoring.bias.apply(scores, self.batch, self.index.h, q, kv, values, (), REPLACEMENTS)
            scores = jnp.broadcast_to(biased, scores.shape)
        if scoring.table:
            scores = scores + self._by_distance()
        if scoring.array:
            scores = scores + self._by_score(self.arrays.array)
        return scores

    def bias_values(self) -> list[Leaf]:
        """The values of an elementwise bias; empty without one."""
        bias = self.plan.scoring.bias
        return [] if bias is None else self._values(bias, self.arrays.bias)

    def dropout(self) -> Callable[[jax.Array], jax.Array]:
        """The function by which dropout changes weights [rows, cols]."""
        prob = self.plan.scoring.dropout_prob
        if not prob:
            return lambda weights: weights
        rows = lax.bitcast_convert_type(self.arrays.dropout[:, self.queries], jnp.uint32)
        keep = dropout_keep(rows, self._indices()[1], prob, self.plan.scoring.dropout_step)
        return lambda weights: jnp.where(keep, weights * (1 / (1 - prob)), 0.0)

    def _values(self, function: Elementwise, refs: Sequence[Ref]) -> list[Leaf]:
        """The values of an elementwise function for the sub-tile: [], [1, cols] and [rows, 1]."""
        values = []
        for ref, axes, dtype in zip(refs, function.values, function.dtypes, strict=True):
            if "q" in axes:
                value = ref[:, self.queries]
            elif "kv" in axes:
                value = to_column(ref[:, self.keys])
            else:
                value = ref[self.index.b if ref.shape[0] > 1 else 0, self.index.h if ref.shape[1] > 1 else 0]
            values.append(value != 0 if dtype == jnp.bool_ else value.astype(dtype))
        return values

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """The indices of queries, [1, cols], and of keys, [rows, 1]."""
        q = self.index.q_tile * self.plan.bq + self.col + lax.broadcasted_iota(jnp.int32, (1, self.cols), 1)
        kv = self.index.kv_tile * self.plan.bk + self.row + lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        return q, kv

    def _by_score(self, ref: Ref) -> jax.Array:
        """The sub-tile [rows, cols] of an array of T × S elements; float32, or int32 for integers."""
        x = ref[self.queries, self.keys]
        return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32).T

    def _chosen(self, ref: Ref, sizes: tuple[int, int]) -> jax.Array:
        """Where a block of keys was chosen for a block of queries, [rows, cols], from `chosen_by_tile`."""
        (q_block, kv_block), (q, kv), plan = map(np.int32, sizes), self._indices(), self.plan
        # The matrix unit looks blocks up, by their indices among those of the tile.
        q = lax.div(q, q_block) - lax.div(self.index.q_tile * plan.bq, q_block)
        kv = lax.div(kv, kv_block) - lax.div(self.index.kv_tile * plan.bk, kv_block)
        of_queries = lax.broadcasted_iota(jnp.int32, (ref.shape[0], self.cols), 0) == q
        of_keys = lax.broadcasted_iota(jnp.int32, (self.rows, ref.shape[1]), 1) == kv
        by_query = _looked_up(ref[...], of_queries.astype(jnp.float32), 0)
        return _looked_up(of_keys.astype(jnp.float32), by_query, 1) != 0

    def _by_distance(self) -> jax.Array:
        """The bias by distance [rows, cols]: each key's row is the row before it, shifted by one query."""
        width = self.rows + self.cols
        rows = jnp.broadcast_to(self.arrays.table[:, pl.ds(self.first_distance(), width)], (self.rows, width))
        return sheared(self.plan, rows, 0)[:, self.rows :]

    def first_distance(self) -> jax.Array:
        """The start of the sub-tile's slice of the table; score (j, i) has its element ``rows + i - j``."""
        plan = self.plan
        first = self.index.q_tile * plan.bq - self.index.kv_tile * plan.bk + (plan.Sp + self.col - self.row - self.rows)
        return first if plan.interpret else pl.multiple_of(first, 128)


def _looked_up(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """A product of zeros and ones, over an axis of ``a`` and the first of ``b``, exact in one pass."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(a, b, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def score_unit(plan: FlashPlan) -> float:
    """Natural units per unit of a kernel's scores: without cap and bias these lack the scale's residual."""
    return 1.0 if plan.scoring.has_cap_or_bias else plan.scale_residual


def log2_unit(plan: FlashPlan) -> float:
    """The factor that converts a kernel's scores to exponents of two."""
    return score_unit(plan) * LOG2E


def sheared(plan: FlashPlan, x: jax.Array, shift: int) -> jax.Array:
    """``x`` with row ``i`` rotated by ``shift + i``."""
    if plan.strided_rotation:
        return pltpu.roll(x, shift, 1, stride=1, stride_axis=0)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    x = pltpu.roll(x, shift, 1)
    # By the binary digits of the row's index.
    for digit in range((x.shape[0] - 1).bit_length()):
        x = jnp.where((row >> digit) & 1 == 1, pltpu.roll(x, (1 << digit) % x.shape[1], 1), x)
    return x


def to_column(x: jax.Array) -> jax.Array:
    """[1, n] to [n, 1]."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def to_row(x: jax.Array) -> jax.Array:
    """[n, 1] to [1, n]."""
    return jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]


def cap_and_bias_vjp(sub: SubTile, s: jax.Array, masked: bool) -> tuple[jax.Array, PyTree]:
    """The scores of products, and their pullback to products times the full scale; None without cap and bias."""
    plan = sub.plan
    if not plan.scoring.has_cap_or_bias:
        return s, None
    values = sub.bias_values()
    scaled = zero_masked_scores(sub, s, masked) * plan.scale_residual
    return jax.vjp(lambda x: sub.apply_cap_and_bias(x, values), scaled)


def zero_masked_scores(sub: SubTile, s: jax.Array, masked: bool) -> jax.Array:
    """Products, with 0 where masked: fully masked tokens may hold NaN, and 0 times a derivative that is NaN is NaN."""
    return jnp.where(sub.allowed(), s, 0.0) if masked and sub.plan.scoring.has_fully_masked_tokens else s


def zero_masked_keys(x: jax.Array, visible: jax.Array, axis: int) -> jax.Array:
    """``x`` with 0 for the keys, along ``axis``, that no query of the sub-tile sees.

    Such tokens may hold NaN, and 0 · NaN is NaN.
    """
    seen = jnp.max(visible.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.where((seen if axis == 0 else to_row(seen)) > 0, x, jnp.zeros((), x.dtype))


def zero_masked_queries(x: jax.Array, visible: jax.Array) -> jax.Array:
    """``x`` [d, cols] with 0 for the queries that see no key of the sub-tile."""
    seen = jnp.max(visible.astype(jnp.float32), axis=0, keepdims=True)
    return jnp.where(seen > 0, x, jnp.zeros((), x.dtype))


def product(plan: FlashPlan | CachePlan, a: jax.Array, b: jax.Array, a_axis: int = 1, b_axis: int = 0) -> jax.Array:
    """A product on the matrix unit, accumulated in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=plan.precision, preferred_element_type=jnp.float32)


def by_sublane(sublanes: int, x: jax.Array) -> jax.Array:
    """[n, cols] to [n / sublanes, sublanes, cols]: reductions along the first axis then need one register at a time."""
    return x.reshape(-1, sublanes, x.shape[1])


def plus(total: jax.Array | None, x: jax.Array) -> jax.Array:
    """``total + x``; ``x`` if there is no total yet."""
    return x if total is None else total + x
