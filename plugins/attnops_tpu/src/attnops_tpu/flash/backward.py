"""The backward kernel: the gradients of queries, keys and values in one sweep (Dao 2023, arXiv:2307.08691).

The outer loop is over tiles of keys, whose gradients are accumulated in vector memory. The gradients of a span of
queries, for all heads of a kv head, stay in vector memory too, so that nothing is accumulated in main memory. A
sequence of several spans needs as many sweeps. All gradients are transposed, [features, tokens], and added in a fixed
order. Keys are needed transposed too: each tile of keys is transposed once, in vector memory.

With outputs transposed, features stream through the matrix unit and weights are its stationary operand, so that a head
dim of 128 fills units of 256 × 256. The unit works in program order, so the products of a sub-tile are issued before
those that wait for the exponentials of an earlier sub-tile. NOTES.md has the figures.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.launch import launch
from attnops_tpu.flash.operands import Arrays, TileIndex, array_operands, by_query, cost, rows_of_key
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile import (
    SubTile,
    cap_and_bias_vjp,
    log2_unit,
    product,
    zero_masked_keys,
    zero_masked_queries,
)
from attnops_tpu.flash.tile_schedule import Body, TileSchedule, kinds_of
from attnops_tpu.references import Output, Prefetched

if TYPE_CHECKING:
    from attnops.typing import DType, Leaf, PyTree, Ref

# Buffers are read at offset 0, which the compiler must assume may be this one: the rows of a 16-bit register.
_OFFSET: Final = 16
# Primitives of a bias whose derivatives may be infinite, or NaN.
_SINGULAR: Final = frozenset(["div", "integer_pow", "log", "log1p", "pow", "rsqrt", "sqrt"])


class Inputs(NamedTuple):
    """The arrays of the backward pass, with lengths padded to multiples of tiles; or references to a tile's blocks."""

    q: Any  # [B, H, D, Tp], times the folded factor of the scale; blocks [D, bq]
    k: Any  # [B, K, Sp, D]; blocks [bk, D]
    v: Any  # [B, K, Sp, Dv]; blocks [bk, Dv]
    d_out: Any  # [B, H, Dv, Tp]; blocks [Dv, bq]
    # [B, H, 2, Tp], the logsumexp in units of `attnops_tpu.flash.tile.score_unit`, +inf where weights are to be 0; and
    # ``d_out · out − d_lse``; blocks [2, bq].
    rows: Any

    def check(self, plan: FlashPlan) -> None:
        """Assert the shapes of blocks."""
        assert self.q.shape == (plan.D, plan.bq)
        assert self.k.shape == (plan.bk, plan.D)
        assert self.v.shape == (plan.bk, plan.Dv)
        assert self.d_out.shape == (plan.Dv, plan.bq)
        assert self.rows.shape == (2, plan.bq)


class Stage(NamedTuple):
    """Buffers for a sub-tile between its first products and its last."""

    weights: Any  # [rows + `_OFFSET`, cols], the weights after dropout
    d_scores: Any  # [rows + `_OFFSET`, cols], the gradients of scores


class BackwardRefs(NamedTuple):
    """The references of a grid step."""

    entries: Any  # the tile schedule, see `TileSchedule.entries`
    first: Any  # [2], the index of the span's first tile of queries; and 0, which the compiler does not know
    inputs: Inputs  # the tile's blocks
    arrays: Arrays  # the tile's other inputs of scores
    dq_out: Any  # [G, D, span · bq], the result by query, of a split's heads
    dk_out: Any  # [D, bk], the result by key
    dv_out: Any  # [Dv, bk], the result by value
    dk: Any  # float32 [D, bk], the gradients of keys so far
    dv: Any  # float32 [Dv, bk], the gradients of values so far
    k_transposed: Any  # [D, bk], the tile's keys
    stages: tuple[Stage, ...]  # lag + 1 of them, used in turn
    dq: Any  # float32 [G, D, span · bq], the gradients of queries so far; None if they are accumulated in ``dq_out``


def input_operands(plan: FlashPlan, inputs: Inputs) -> Inputs:
    """The operands of `Inputs`."""
    return Inputs(
        q=by_query(inputs.q, plan),
        k=rows_of_key(inputs.k, plan),
        v=rows_of_key(inputs.v, plan),
        d_out=by_query(inputs.d_out, plan),
        rows=by_query(inputs.rows, plan),
    )


@folds_batch
def backward(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, spans: tuple[TileSchedule, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query [B, H, D, Tp], of key [B, K, D, Sp] and of value [B, K, Dv, Sp], in ``plan.out_dtype``.

    Args:
        plan: the plan of the call.
        inputs: query, key, value, the output's gradient, and statistics by query.
        arrays: the other inputs of scores.
        spans: for each span of ``plan.span`` tiles of queries, the schedule by tiles of keys.
    """
    if len(spans) == 1:
        dtype = plan.out_dtype if plan.split == 1 else jnp.float32
        dq, *keys = _span(plan, inputs, arrays, spans[0], jnp.zeros(2, jnp.int32), dtype)
        dk, dv = (_sum_splits(plan, x).astype(plan.out_dtype) for x in keys)
        return dq, dk, dv
    longest = max(v.longest for v in spans)
    entries = jnp.stack([v.padded(longest) for v in spans])
    steps = jnp.stack([jnp.asarray(v.steps, jnp.int32) for v in spans])
    kinds = kinds_of(spans)
    first = jnp.stack([jnp.arange(len(spans), dtype=jnp.int32) * plan.span, jnp.zeros(len(spans), jnp.int32)], axis=1)

    def sweep(carry: PyTree, xs: PyTree) -> PyTree:
        entries, steps, first = xs
        schedule = TileSchedule(entries, spans[0].map_shape, longest, kinds, spans[0].rows, spans[0].bodies, steps)
        dq, dk, dv = _span(plan, inputs, arrays, schedule, first, jnp.float32)
        return (carry[0] + _sum_splits(plan, dk), carry[1] + _sum_splits(plan, dv)), dq

    # Like keys, so that inside `jax.shard_map` they vary over the same mesh axes.
    dk, dv = (
        jnp.zeros_like(inputs.k, shape=(plan.B, plan.K, d, plan.Sp), dtype=jnp.float32) for d in (plan.D, plan.Dv)
    )
    (dk, dv), dq = lax.scan(sweep, (dk, dv), (entries, steps, first))
    dq = jnp.moveaxis(dq, 0, 3).reshape(plan.B, plan.H, plan.D, -1)[..., : plan.Tp]
    return dq, dk.astype(plan.out_dtype), dv.astype(plan.out_dtype)


def _sum_splits(plan: FlashPlan, x: jax.Array) -> jax.Array:
    """[B, K · split, d, Sp] summed to [B, K, d, Sp]."""
    return x if plan.split == 1 else x.reshape(plan.B, plan.K, plan.split, *x.shape[2:]).sum(axis=2)


def _span(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, first: jax.Array, dtype: DType
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One sweep: the gradients of a span of queries, [B, H, D, span · bq]; and of keys and of values, in a dtype.

    ``first``: see `BackwardRefs`.
    """
    width, sizes = plan.span * plan.bq, plan.backward
    K, G = plan.K * plan.split, plan.G // plan.split

    def tile_at(b: jax.Array, k: jax.Array, step: jax.Array, g: jax.Array, entries: Ref, first: Ref) -> TileIndex:
        at = entries, b, lax.div(k, np.int32(plan.split)), step
        entry = schedule.at(*at)
        return TileIndex(schedule.batch(*at), k * G + g, entry.column, entry.row)

    def of_keys(d: int) -> pl.BlockSpec:
        def index(
            b: jax.Array, k: jax.Array, step: jax.Array, g: jax.Array, entries: Ref, first: Ref
        ) -> tuple[jax.Array | int, ...]:
            at = entries, b, lax.div(k, np.int32(plan.split)), step
            return (schedule.batch(*at), k, 0, schedule.at(*at).row)

        return pl.BlockSpec((None, None, d, plan.bk), index)

    of_tile = array_operands(plan, arrays)._replace(sinks=None)
    stage = pltpu.VMEM((sizes.rows + _OFFSET, sizes.cols), plan.dtype)
    refs = BackwardRefs(
        entries=Prefetched(schedule.entries),
        first=Prefetched(first),
        inputs=jax.tree.map(lambda x: x.at(tile_at), input_operands(plan, inputs)),
        arrays=jax.tree.map(lambda x: x.at(tile_at), of_tile),
        dq_out=Output(
            output_like(inputs.q, (plan.B, plan.H, plan.D, width), plan.out_dtype),
            pl.BlockSpec((None, G, plan.D, width), lambda *ids: (tile_at(*ids).b, ids[1], 0, 0)),
        ),
        dk_out=Output(output_like(inputs.q, (plan.B, K, plan.D, plan.Sp), dtype), of_keys(plan.D)),
        dv_out=Output(output_like(inputs.q, (plan.B, K, plan.Dv, plan.Sp), dtype), of_keys(plan.Dv)),
        dk=pltpu.VMEM((plan.D, plan.bk), jnp.float32),
        dv=pltpu.VMEM((plan.Dv, plan.bk), jnp.float32),
        k_transposed=pltpu.VMEM((plan.D, plan.bk), plan.dtype),
        stages=(Stage(stage, stage),) * (sizes.lag + 1),
        dq=None if plan.out_dtype == jnp.float32 else pltpu.VMEM((G, plan.D, width), jnp.float32),
    )
    dq, dk, dv = launch(
        plan, functools.partial(_kernel, plan, schedule), "attnops_flash_backward", refs,
        grid=(plan.B // schedule.joined, K, schedule.steps, G),
        cost=cost(plan, schedule.longest, 3 * plan.D + 2 * plan.Dv),
    )  # fmt: skip
    return dq * plan.scale if plan.out_dtype == jnp.float32 else dq, dk, dv


def _kernel(plan: FlashPlan, schedule: TileSchedule, refs: BackwardRefs) -> None:
    """A grid step: a tile of one query head."""
    refs.inputs.check(plan)
    assert refs.dq_out.shape == (plan.G // plan.split, plan.D, plan.span * plan.bq)
    assert refs.dk.shape == refs.dk_out.shape == refs.k_transposed.shape == (plan.D, plan.bk)
    assert refs.dv.shape == refs.dv_out.shape == (plan.Dv, plan.bk)
    dq = refs.dq_out if refs.dq is None else refs.dq
    b, k, step, g = (pl.program_id(axis) for axis in range(4))
    G = plan.G // plan.split
    at = refs.entries, b, lax.div(k, np.int32(plan.split))
    entry, batch = schedule.at(*at, step), schedule.batch(*at, step)
    index = TileIndex(batch, k * G + g, entry.column, entry.row)
    is_first, is_last = step == 0, step == pl.num_programs(2) - 1
    if schedule.joined > 1:
        is_first |= batch != schedule.batch(*at, jnp.maximum(step - 1, 0))
        # Each map has one entry more than steps.
        is_last |= batch != schedule.batch(*at, step + 1)

    @pl.when(is_first & (g == 0))
    def _() -> None:
        for head in range(G):
            _clear(dq.at[head])

    begins = (entry.first == 1) & (g == 0)

    @pl.when(begins & (entry.kind == int(Coverage.EMPTY)))
    def _() -> None:
        _clear(refs.dk)
        _clear(refs.dv)

    for kind in schedule.kinds:

        @pl.when(entry.kind == kind)
        def _(body: Body = schedule.body(kind)) -> None:  # noqa: B008
            start = (index.q_tile - refs.first[0]) * plan.bq
            _add_tile(plan, refs, index, body, dq.at[g], begins, start)

    @pl.when((entry.last == 1) & (g == G - 1))
    def _() -> None:
        refs.dk_out[...] = (refs.dk[...] * plan.scale_residual).astype(refs.dk_out.dtype)
        refs.dv_out[...] = refs.dv[...].astype(refs.dv_out.dtype)

    if refs.dq is not None:

        @pl.when(is_last & (g == G - 1))
        def _() -> None:
            for head in range(G):
                _write(refs.dq_out.at[head], dq.at[head], plan.scale)


def _add_tile(
    plan: FlashPlan, refs: BackwardRefs, index: TileIndex, body: Body, dq: Ref, begins: Leaf, start: Leaf
) -> None:
    """Add the contribution of a tile to the gradients.

    Args:
        plan: the plan of the call.
        refs: the references.
        index: the index of the tile.
        body: the code of its kind.
        dq: [D, span · bq], the gradients of queries so far.
        begins: whether the tile is the first of its row, so that ``refs.dk`` and ``refs.dv`` hold nothing yet.
        start: the offset of the tile's queries in ``dq``.
    """
    inputs, zero = refs.inputs, refs.first[1]
    rows, cols, lag, keys_first = plan.backward
    columns, lines = range(0, plan.bq, cols), range(0, plan.bk, rows)
    order = itertools.product(columns, lines) if keys_first else ((col, row) for row in lines for col in columns)
    sub_tiles = [
        SubTile(plan, refs.arrays, index, row, rows, col, cols, body.band)
        for col, row in order
        if (row // rows, col // cols) not in body.hidden
    ]
    masked = [body.is_masked(sub.row // rows, sub.col // cols) for sub in sub_tiles]
    # The first sub-tile of each range of keys.
    firsts = {sub.row: i for i, sub in reversed(list(enumerate(sub_tiles)))}
    # At an offset that the compiler knows it would forward stores to loads, keep the buffers in registers, and spill
    # those.
    written = pl.ds(zero * _OFFSET if plan.interpret else pl.multiple_of(zero * _OFFSET, _OFFSET), rows)

    def prepare(i: int, s: jax.Array, d_weights: jax.Array) -> None:
        s, pull_back = cap_and_bias_vjp(sub_tiles[i], s, masked[i])
        weights, d_scores, _ = weights_and_gradients(sub_tiles[i], inputs, masked[i], s, d_weights)
        if pull_back is not None:
            (d_products,) = pull_back(d_scores)
            bias = plan.scoring.bias
            if bias is not None and bias.primitives & _SINGULAR:
                # Of masked scores and of those beyond the last token, d_scores is 0, and 0 · inf is NaN.
                d_products = jnp.where(d_scores == 0, 0.0, d_products)
            d_scores = d_products
        for x, buffer in zip((weights, d_scores), refs.stages[i % (lag + 1)], strict=True):
            buffer[:rows, :] = x.astype(plan.dtype)

    def add(i: int) -> None:
        sub = sub_tiles[i]
        weights, d_scores = (buffer[written, :] for buffer in refs.stages[i % (lag + 1)])
        q, k_transposed = inputs.q[:, sub.queries], refs.k_transposed[:, sub.keys]
        if masked[i] and plan.scoring.has_fully_masked_tokens:
            visible = sub.allowed()
            q, k_transposed = zero_masked_queries(q, visible), zero_masked_keys(k_transposed, visible, axis=1)
        for total, x, d_x in ((refs.dv, inputs.d_out[:, sub.queries], weights), (refs.dk, q, d_scores)):
            before = total[:, sub.keys]
            # Cheaper here, between products, than in a loop of its own.
            before = jnp.where(begins, 0.0, before) if firsts[sub.row] == i else before
            total[:, sub.keys] = before + product(plan, x, d_x, 1, 1)
        at = start + sub.col
        at = pl.ds(at if plan.interpret else pl.multiple_of(at, 128), cols)
        dq[:, at] += product(plan, k_transposed, d_scores)

    for row in lines:
        if row not in firsts:  # all of these are hidden
            for total in (refs.dk, refs.dv):
                total[:, row : row + rows] = jnp.where(begins, 0.0, total[:, row : row + rows])
    for i in range(len(sub_tiles) + lag):
        computed = products(sub_tiles[i], inputs) if i < len(sub_tiles) else None
        if computed is not None and firsts[sub_tiles[i].row] == i:
            keys = sub_tiles[i].keys
            refs.k_transposed[:, keys] = inputs.k[keys, :].T
        if i >= lag:
            add(i - lag)
        if computed is not None:
            prepare(i, *computed)


def _clear(ref: Ref) -> None:
    """Zero a buffer in a loop: in straight-line code the stores would be predicated and mixed with the tile's."""

    def body(i: jax.Array, _: None) -> None:
        rows = pl.ds(i * 8 if ref.shape[0] % 8 else pl.multiple_of(i * 8, 8), 8)
        ref[rows, :] = jnp.zeros((8, ref.shape[1]), ref.dtype)

    lax.fori_loop(0, ref.shape[0] // 8, body, None)
    remainder = ref.shape[0] % 8
    if remainder:
        ref[ref.shape[0] - remainder :, :] = jnp.zeros((remainder, ref.shape[1]), ref.dtype)


def _write(out: Ref, x: Ref, factor: float) -> None:
    """Write a buffer times a factor, in the dtype of ``out``; in a loop, see `_clear`."""
    step = 16 if x.shape[0] % 16 == 0 else x.shape[0]  # a 16-bit register has 16 rows

    def body(i: jax.Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * step, step), step)
        out[rows, :] = (x[rows, :] * factor).astype(out.dtype)

    lax.fori_loop(0, x.shape[0] // step, body, None)


def products(sub: SubTile, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Query times key, and the gradients of the weights, both [rows, cols]."""
    s = product(sub.plan, inputs.k[sub.keys, :], inputs.q[:, sub.queries])
    return s, product(sub.plan, inputs.v[sub.keys, :], inputs.d_out[:, sub.queries])


def weights_and_gradients(
    sub: SubTile, inputs: Inputs, masked: bool, s: jax.Array, d_weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The weights after dropout, the gradients of the scores, and which scores are not masked, None for all."""
    plan = sub.plan
    visible = sub.allowed() if masked else None
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    weights = jnp.exp2((s - inputs.rows[:1, sub.queries]) * log2_unit(plan))
    drop = sub.dropout()
    d_scores = weights * (drop(d_weights) - inputs.rows[1:, sub.queries])
    if visible is not None:
        # Fully masked tokens may hold NaN.
        d_scores = jnp.where(visible, d_scores, 0.0)
    return drop(weights), d_scores, visible
