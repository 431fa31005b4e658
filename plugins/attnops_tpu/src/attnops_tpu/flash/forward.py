"""The forward kernel: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over transposed scores.

It is skewed by one visit: a grid step computes the scores of its tile into vector memory and, in the same straight line
of code, turns the scores that it finds there, of the tile before, into weights and multiplies them by values. The two
chains do not depend on one another, so that the compiler fills the matrix unit's latency in one with the other, and
it can't hold the scores of a whole tile in registers, of which there are far too few. NOTES.md has the figures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.operands import (
    Arrays,
    Operand,
    Place,
    by_query,
    compiler_params,
    cost,
    rows_of_key,
    rows_of_query,
    rows_of_spans,
    score_operands,
)
from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.tile import Part, held, product, unit
from attnops_tpu.flash.visits import Visits
from attnops_tpu.interpreter import interpret_params

SUBLANES = 8


class _State(NamedTuple):
    """What stays in vector memory from step to step. A number a query is held by each of the 8 sublanes.

    Attributes:
        scores: [bk, bq] of the last tile.
        top: [8, bq] the largest score of the row of tiles so far.
        done: [8, bq] the same up to the tile before, whose weights are relative to it.
        fade: [8, bq] what the accumulated is multiplied by, ``top`` having risen.
        total: [8, bq] the sum of the weights; of each sublane its own.
        accumulated: [Dv, bq] the sum of weights times values.
    """

    scores: Any
    top: Any
    done: Any
    fade: Any
    total: Any
    accumulated: Any


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, spans: tuple[Visits, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, H, Tp, Dv] in the query's dtype, or float32 of a part, and logsumexp [B, H, 1, Tp] float32.

    Third, of the logsumexp's shape, is what the logsumexp lost in rounding, as an exponent of two: at a score of 1e5 it
    is of the size of the weights' logarithms.

    Args:
        plan: of the call.
        q: [B, H, Tp, D], with the folded part of the scale.
        k: [B, K, Sp, D].
        v: [B, K, Sp, Dv].
        arrays: what scores depend on beside these.
        spans: the visits by tiles of queries, for so many rows each.
    """
    parts = [_rows(plan, q, k, v, arrays, visits) for visits in spans]
    return tuple(  # type: ignore[return-value]
        rows_of_spans(plan, spans, found, axis) for found, axis in zip(zip(*parts, strict=True), (2, 3, 3), strict=True)
    )


@folds_batch
def _rows(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, visits: Visits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `forward`, but only the rows of these visits are written."""
    of_scores = [
        rows_of_query("q", q, plan),
        rows_of_key("k", k, plan),
        *score_operands(plan, arrays),
    ]
    of_values = [rows_of_key("v", v, plan)]
    if arrays.dropout is not None:
        of_values.append(by_query("dropout", arrays.dropout, plan.bq))
    if arrays.sinks is not None:
        of_values.append(Operand("sinks", arrays.sinks))
    names = [operand.name for operand in (*of_scores, *of_values)]

    def now(b: Any, h: Any, step: Any, entries: Any) -> Place:
        visit = visits.at(entries, b, h, step)
        return Place(b, h, visit.row, visit.column)

    def before(b: Any, h: Any, step: Any, entries: Any) -> Place:
        return now(b, h, jnp.maximum(step - 1, 0), entries)

    def kernel(entries: Any, *refs: Any) -> None:
        named = dict(zip(names, refs, strict=False))
        out, lse, loss = refs[len(names) : len(names) + 3]
        state = _State(*refs[len(names) + 3 :])
        b, h, step = (pl.program_id(axis) for axis in range(3))
        visit, last = visits.at(entries, b, h, step), visits.at(entries, b, h, jnp.maximum(step - 1, 0))
        places = now(b, h, step, entries), before(b, h, step, entries)

        @pl.when(step == 0)
        def _() -> None:
            state.scores[...] = jnp.full(state.scores.shape, -jnp.inf, jnp.float32)
            state.top[...] = jnp.full(state.top.shape, -jnp.inf, jnp.float32)
            state.fade[...] = jnp.zeros(state.fade.shape, jnp.float32)
            _clear(state)

        for kind in visits.kinds:

            @pl.when(visit.kind == kind)
            def _(masked: bool = kind == Coverage.PARTIAL) -> None:
                _step(plan, named, places, state, visit.first == 1, masked)

        @pl.when(visit.kind == int(Coverage.EMPTY))
        def _() -> None:
            _step(plan, named, places, state, None, False)
            state.scores[...] = jnp.full(state.scores.shape, -jnp.inf, jnp.float32)
            state.top[...] = jnp.full(state.top.shape, -jnp.inf, jnp.float32)

        @pl.when((step > 0) & (last.last == 1))
        def _() -> None:
            sinks = named.get("sinks")
            sink = None if sinks is None else sinks[b if sinks.shape[0] > 1 else 0, h]
            _finish(plan, out, lse, loss, state, sink)

        @pl.when(visit.first == 1)
        def _() -> None:
            _clear(state)

    def out_index(*ids: Any) -> tuple[Any, ...]:
        p = before(*ids)
        return (p.b, p.h, p.q_tile, 0)

    def row_index(*ids: Any) -> tuple[Any, ...]:
        p = before(*ids)
        return (p.b, p.h, 0, p.q_tile)

    return pl.pallas_call(
        kernel,
        out_shape=[
            output_like(q, (plan.B, plan.H, plan.Tp, plan.Dv), plan.out_dtype),
            *[output_like(q, (plan.B, plan.H, 1, plan.Tp), jnp.float32)] * 2,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.B, plan.H, visits.steps + 1),
            in_specs=[operand.spec(now) for operand in of_scores] + [operand.spec(before) for operand in of_values],
            out_specs=[
                pl.BlockSpec((None, None, plan.bq, plan.Dv), out_index),
                *[pl.BlockSpec((None, None, 1, plan.bq), row_index)] * 2,
            ],
            scratch_shapes=[
                pltpu.VMEM((plan.bk, plan.bq), jnp.float32),
                *[pltpu.VMEM((SUBLANES, plan.bq), jnp.float32)] * 4,
                pltpu.VMEM((plan.Dv, plan.bq), jnp.float32),
            ],
        ),
        compiler_params=compiler_params(plan, 3),
        cost_estimate=cost(plan, visits.longest, plan.D + plan.Dv),
        interpret=interpret_params(plan.interpret),
        name="attnops_flash_forward",
    )(visits.entries, *(operand.array for operand in (*of_scores, *of_values)))


def _step(plan: Plan, refs: Any, places: tuple[Place, Place], state: _State, first: Any, masked: bool) -> None:
    """The scores of the tile at ``places[0]``, and what becomes of those of the tile before, at ``places[1]``.

    Args:
        plan: of the call.
        refs: by operand.
        places: of this tile and of the one before.
        state: see `_State`.
        first: whether this tile begins a row; None for no tile.
        masked: whether it is PARTIAL.
    """
    c = unit(plan)
    rows, cols = plan.forward.rows, plan.forward.cols
    for col in range(0, plan.bq, cols):
        at = slice(col, col + cols)
        old = state.top[:, at]
        level = _finite(old)[None]
        fade = state.fade[:, at]
        top = total = None
        for row in range(0, plan.bk, rows):
            keys = slice(row, row + rows)
            weights = jnp.exp2((_by_sublane(state.scores[keys, at]) - level) * c)
            total = _plus(total, weights.sum(axis=0))
            weights, v = weights.reshape(rows, cols), refs["v"][keys, :]
            if plan.scoring.has_fully_masked_tokens:
                # A weight of 0 times whatever a token holds that nobody sees, NaN for one, must be 0.
                v = jnp.where(weights.max(axis=1, keepdims=True) != 0, v, jnp.zeros((), v.dtype))
            if first is not None:
                # The matrix unit works in program order: these products fill the time until the weights are there.
                s = _scores(Part(plan, refs, places[0], row, rows, col, cols), refs, masked)
                state.scores[keys, at] = s
                highest = _by_sublane(s).max(axis=0)
                top = highest if top is None else jnp.maximum(top, highest)
            weights = Part(plan, refs, places[1], row, rows, col, cols).drop()(weights)
            out = product(plan, v, weights.astype(plan.dtype), 0, 0)
            # Straight to memory: kept as a value it takes half of the registers.
            before = state.accumulated[:, at]
            if row == 0:
                before = (fade[None] * _by_sublane(before)).reshape(plan.Dv, cols)
            state.accumulated[:, at] = before + out
        state.total[:, at] = fade * state.total[:, at] + total
        state.done[:, at] = old
        if top is not None:
            old = jnp.where(first, -jnp.inf, old)
            new = jnp.maximum(old, jnp.broadcast_to(top.max(axis=0, keepdims=True), top.shape))
            state.top[:, at] = new
            state.fade[:, at] = jnp.exp2((old - _finite(new)) * c)


def _scores(part: Part, refs: Any, masked: bool) -> jax.Array:
    plan = part.plan
    s = product(plan, refs["k"][part.keys, :], refs["q"][part.queries, :], 1, 1)
    if plan.scoring.changes_scores:
        s = part.change(s * plan.rest, part.bias_values())
    return jnp.where(part.allowed(), s, -jnp.inf) if masked else s


def _finish(plan: Plan, out: Any, lse: Any, loss: Any, state: _State, sink: Any) -> None:
    """Divide by the denominator, to which the sink belongs; queries that saw nothing give 0 and −inf."""
    top, c = _finite(state.done[:1]), unit(plan)
    total = state.total[...].sum(axis=0, keepdims=True)
    saw_any, accumulated = total != 0, state.accumulated[...]  # NaN was seen
    if sink is not None:
        sink = sink * (1 / held(plan))
        new = jnp.maximum(top, sink)
        fade = jnp.exp2((top - new) * c)
        total = total * fade + jnp.exp2((sink - new) * c)
        accumulated, top = accumulated * fade, new
    denominator = jnp.where(saw_any, total, 1.0)
    logsumexp = top * held(plan) + jnp.log(denominator)
    out[...] = jnp.where(saw_any, accumulated * (1 / denominator), 0.0).T.astype(out.dtype)
    lse[...] = jnp.where(saw_any, logsumexp, -jnp.inf)
    loss[...] = jnp.where(saw_any, (top - logsumexp * (1 / held(plan))) * c + jnp.log2(denominator), 0.0)


def _clear(state: _State) -> None:
    state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
    state.accumulated[...] = jnp.zeros(state.accumulated.shape, jnp.float32)


def _finite(top: jax.Array) -> jax.Array:
    """A maximum, or 0 where nothing was seen, so that ``exp(−inf − maximum)`` is 0 and not NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _by_sublane(x: jax.Array) -> jax.Array:
    """[n, cols] to [n / 8, 8, cols]: what is then done along the first axis needs one register at a time."""
    return x.reshape(-1, SUBLANES, x.shape[1])


def _plus(total: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if total is None else total + x
