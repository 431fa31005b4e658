"""The forward kernel: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over transposed scores.

It is software-pipelined over tiles: in the same straight-line code, a grid step computes the scores of its tile into
vector memory, and converts the scores of the previous tile, which it reads from there, to weights that it multiplies by
values. The two chains are independent, so the compiler fills the matrix unit's latency in one with the other; and it
can't hold the scores of a complete tile in registers, of which there are far too few. NOTES.md has the figures.

After the last tile a step drains the pipeline. If one core runs all batches and heads, in order, this is one step per
kernel: the last tile of a head is the previous tile of the next head's first. If cores share them, it is one per head.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.launch import launch
from attnops_tpu.flash.operands import (
    Arrays,
    TileIndex,
    array_operands,
    concatenate_rows,
    cost,
    rows_of_key,
    rows_of_query,
)
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile import SubTile, by_sublane, log2_unit, plus, product, score_unit
from attnops_tpu.flash.tile_schedule import Body, Hidden, TileSchedule
from attnops_tpu.references import Output, Prefetched

if TYPE_CHECKING:
    from attnops.typing import Leaf, Ref

EMPTY: Final = int(Coverage.EMPTY)
# Primitives of masks by position alone.
COMPARISONS: Final = frozenset({"add", "and", "ge", "gt", "le", "lt", "not", "or", "sub"})


class TileState(NamedTuple):
    """References to vector memory that is kept from step to step. A number per query is repeated in all sublanes."""

    scores: Ref  # [bk, bq], the scores of the previous tile
    m: Ref  # [8, bq], the largest score of the row of tiles so far
    m_before: Ref  # [8, bq], ``m`` without the previous tile, whose weights are relative to it
    alpha: Ref  # [8, bq], the factor by which ``l`` and ``acc`` are rescaled from ``m_before`` to ``m``
    l: Ref  # [8, bq], the sum of the weights, separately for each sublane
    acc: Ref  # [Dv, bq], the sum of weights times values


class ForwardRefs(NamedTuple):
    """The references of a grid step, which computes scores of its tile and accumulates those of the previous tile."""

    entries: Any  # the tile schedule, see `TileSchedule.entries`
    q: Any  # [bq, D], this tile's queries, times the folded factor of the scale
    k: Any  # [bk, D], this tile's keys
    arrays: Arrays  # this tile's inputs of scores
    v: Any  # [bk, Dv], the previous tile's values
    previous_arrays: Arrays  # the previous tile's dropout, and sinks
    out: Any  # [bq, Dv], the output of the previous tile's row
    rows: Any  # [plan.rows, bq], its logsumexp, the rounding error and, if asked for, the largest scores
    state: TileState  # the online softmax so far, and the scores of the previous tile


def forward(
    plan: FlashPlan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, chunks: tuple[TileSchedule, ...]
) -> tuple[jax.Array, jax.Array]:
    """The output, and numbers per query: the logsumexp, its rounding error and, if asked for, the largest scores.

    Args:
        plan: the plan of the call.
        q: [B, H, Tp, D], times the folded factor of the scale.
        k: [B, K, Sp, D].
        v: [B, K, Sp, Dv].
        arrays: the other inputs of scores.
        chunks: schedules by tiles of queries, for consecutive chunks of rows.

    Returns:
        The output [B, H, Tp, Dv], in the query's dtype, or float32 for a partial softmax; and, float32
        [B, H, plan.rows, Tp], the logsumexp, its rounding error as an exponent of two (at a score of 1e5 it is as large
        as the logarithms of weights), and the largest scores.
    """
    results = zip(*(_rows(plan, q, k, v, arrays, schedule) for schedule in chunks), strict=True)
    return tuple(  # type: ignore[return-value]
        concatenate_rows(plan, chunks, of_chunks, axis) for of_chunks, axis in zip(results, (2, 3), strict=True)
    )


@folds_batch
def _rows(
    plan: FlashPlan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, schedule: TileSchedule
) -> tuple[jax.Array, jax.Array]:
    """The results of `forward`, in which only the rows of this schedule are written."""
    out, rows = launch(
        plan,
        functools.partial(_kernel, plan, schedule),
        "attnops_flash_forward",
        _references(plan, q, k, v, arrays, schedule),
        grid=(plan.B // schedule.joined, plan.H, schedule.steps + 1),
        cost=cost(plan, schedule.longest, plan.D + plan.Dv),
        sequential=plan.sequential,
        spilled=_bytes_a_score(plan) * plan.bq * plan.bk,
    )
    return out, rows


def _references(
    plan: FlashPlan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, schedule: TileSchedule
) -> ForwardRefs:
    current, previous = functools.partial(_current_tile, schedule), functools.partial(_previous_tile, plan, schedule)
    operands = array_operands(plan, arrays)
    of_weights = Arrays(dropout=operands.dropout, sinks=operands.sinks)

    def out_index(*ids: jax.Array) -> tuple[jax.Array | int, ...]:
        index = previous(*ids)
        return (index.b, index.h, index.q_tile, 0)

    def row_index(*ids: jax.Array) -> tuple[jax.Array | int, ...]:
        index = previous(*ids)
        return (index.b, index.h, 0, index.q_tile)

    a_number = pltpu.VMEM((plan.sublanes, plan.bq), jnp.float32)
    return ForwardRefs(
        entries=Prefetched(schedule.entries),
        q=rows_of_query(q, plan).at(current),
        k=rows_of_key(k, plan).at(current),
        arrays=jax.tree.map(lambda x: x.at(current), operands._replace(dropout=None, sinks=None)),
        v=rows_of_key(v, plan).at(previous),
        previous_arrays=jax.tree.map(lambda x: x.at(previous), of_weights),
        out=Output(
            output_like(q, (plan.B, plan.H, plan.Tp, plan.Dv), plan.out_dtype),
            pl.BlockSpec((None, None, plan.bq, plan.Dv), out_index),
        ),
        # One array, since each costs every step some 15 bundles.
        rows=Output(
            output_like(q, (plan.B, plan.H, plan.rows, plan.Tp), jnp.float32),
            pl.BlockSpec((None, None, plan.rows, plan.bq), row_index),
        ),
        state=TileState(
            scores=pltpu.VMEM((plan.bk, plan.bq), jnp.float32),
            m=a_number,
            m_before=a_number,
            alpha=a_number,
            l=a_number,
            acc=pltpu.VMEM((plan.Dv, plan.bq), jnp.float32),
        ),
    )


def _bytes_a_score(plan: FlashPlan) -> int:
    """Bytes per score that the compiler may spill, with a margin: it may compute the mask of a tile before all else.

    Documents whose ids are traced and a `MaskFn` need up to 6, at 2048 × 2048; a causal mask, 1.
    """
    mask, scoring = plan.scoring.mask, plan.scoring
    if mask is None and not scoring.dropout_prob:
        return 0
    is_simple = mask is None or (not mask.values and mask.primitives <= COMPARISONS)
    return 4 if is_simple and not scoring.dense and not scoring.chosen and not scoring.dropout_prob else 8


def _current_tile(schedule: TileSchedule, b: jax.Array, h: jax.Array, step: jax.Array, entries: Ref) -> TileIndex:
    entry = schedule.at(entries, b, h, step)
    return TileIndex(schedule.batch(entries, b, h, step), h, entry.row, entry.column)


def _previous_tile(
    plan: FlashPlan, schedule: TileSchedule, b: jax.Array, h: jax.Array, step: jax.Array, entries: Ref
) -> TileIndex:
    return _current_tile(schedule, *_previous_step(plan, schedule, b, h, step), entries)


def _previous_step(
    plan: FlashPlan, schedule: TileSchedule, b: jax.Array, h: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The batch of the grid, head and entry of the previous step; for the first step its own."""
    before = jnp.maximum(step - 1, 0)
    if not plan.sequential or plan.B // schedule.joined * plan.H == 1:
        return b, h, before
    is_start, end = step == 0, schedule.longest - 1
    if schedule.joined == plan.B:
        return b, jnp.maximum(h - is_start, 0), jnp.where(is_start & (h > 0), end, before)
    is_batch_start = is_start & (h == 0)
    return (
        jnp.maximum(b - is_batch_start, 0),
        jnp.where(is_batch_start & (b > 0), plan.H - 1, jnp.maximum(h - is_start, 0)),
        jnp.where(is_start & (b + h > 0), end, before),
    )


def _kernel(plan: FlashPlan, schedule: TileSchedule, refs: ForwardRefs) -> None:
    """A grid step."""
    assert refs.q.shape == (plan.bq, plan.D)
    assert refs.k.shape == (plan.bk, plan.D)
    assert refs.v.shape == (plan.bk, plan.Dv)
    assert refs.out.shape == (plan.bq, plan.Dv)
    assert refs.rows.shape == (plan.rows, plan.bq)
    assert refs.state.scores.shape == (plan.bk, plan.bq)
    assert refs.state.acc.shape == (plan.Dv, plan.bq)
    entries, state = refs.entries, refs.state
    b, h, step = (pl.program_id(axis) for axis in range(3))
    entry, before = schedule.at(entries, b, h, step), _previous_step(plan, schedule, b, h, step)
    indices = _current_tile(schedule, b, h, step, entries), _current_tile(schedule, *before, entries)
    is_first, is_last = step == 0, step == pl.num_programs(2) - 1
    if plan.sequential:
        is_first &= b + h == 0
        is_last &= (b == plan.B // schedule.joined - 1) & (h == plan.H - 1)

    previous = schedule.at(entries, *before)
    # A row without tiles; entries that pad a map do nothing. After another such row there are no scores to accumulate.
    is_row = (entry.kind == EMPTY) & (entry.first == 1)
    drains = is_row & (is_first | (previous.kind != EMPTY) | (previous.first == 0)) | is_last
    for kind, variants in itertools.groupby(schedule.variants, key=lambda variant: variant.kind):
        runs = drains if kind == EMPTY else entry.kind == kind
        first = None if kind == EMPTY else entry.first == 1
        of_kind = list(variants)
        for variant in of_kind:
            follows = runs
            if variant is not of_kind[-1]:
                follows = runs & functools.reduce(operator.or_, [previous.kind == before for before in variant.before])
                runs &= ~follows
            hidden = schedule.hidden_before(variant)
            pl.when(follows)(
                functools.partial(_step, plan, refs, indices, first, schedule.body(kind), hidden, schedule.fills(kind))
            )

    @pl.when(is_row)
    def _() -> None:
        state.scores[...] = jnp.full(state.scores.shape, -jnp.inf, jnp.float32)
        state.m[...] = jnp.full(state.m.shape, -jnp.inf, jnp.float32)
        state.alpha[...] = jnp.zeros(state.alpha.shape, jnp.float32)

    # The first step has accumulated whatever was in memory.
    pl.when(is_first)(functools.partial(_clear, state))

    @pl.when((entry.first == 1) & ~is_first | is_last)
    def _() -> None:
        sinks = refs.previous_arrays.sinks
        sink = None if sinks is None else sinks[indices[1].b if sinks.shape[0] > 1 else 0, indices[1].h]
        _finish(plan, refs, sink)
        _clear(state)


def _step(
    plan: FlashPlan, refs: ForwardRefs, indices: tuple[TileIndex, TileIndex], first: Leaf, body: Body,
    hidden_before: Hidden = (), fills_hidden: bool = False,
) -> None:  # fmt: skip
    """Compute the scores of the current tile, and accumulate those of the previous tile.

    Args:
        plan: the plan of the call.
        refs: the references.
        indices: the indices of the current and the previous tile.
        first: whether the current tile begins a row; None if there is no current tile.
        body: the code of the current tile's kind.
        hidden_before: the sub-tiles of the previous tile that are not read: all their scores are masked.
        fills_hidden: whether the next step reads the scores of the current tile's hidden sub-tiles, which are -inf.
    """
    c, state = log2_unit(plan), refs.state
    rows, cols = plan.forward.rows, plan.forward.cols
    for col in range(0, plan.bq, cols):
        at = slice(col, col + cols)
        m_before = state.m[:, at]
        base = _finite(m_before)[None]
        alpha = state.alpha[:, at]
        m_tile = l_tile = None
        is_scaled = False
        for row in range(0, plan.bk, rows):
            keys, sub_tile = slice(row, row + rows), (col // cols, row // rows)
            if sub_tile not in hidden_before:
                weights = jnp.exp2((by_sublane(plan.sublanes, state.scores[keys, at]) - base) * c)
                l_tile = plus(l_tile, weights.sum(axis=0))
                weights, v = weights.reshape(rows, cols), refs.v[keys, :]
                if plan.scoring.has_fully_masked_tokens:
                    # Fully masked tokens may hold NaN, and 0 · NaN is NaN.
                    v = jnp.where(weights.max(axis=1, keepdims=True) != 0, v, jnp.zeros((), v.dtype))
            if sub_tile in body.hidden:
                if fills_hidden:
                    state.scores[keys, at] = jnp.full((rows, cols), -jnp.inf, jnp.float32)
            elif first is not None:
                # The matrix unit works in program order: these products fill the time until the weights are there.
                sub = SubTile(plan, refs.arrays, indices[0], row, rows, col, cols, body.band)
                s = _scores(sub, refs, body.is_masked(*sub_tile))
                state.scores[keys, at] = s
                highest = by_sublane(plan.sublanes, s).max(axis=0)
                m_tile = highest if m_tile is None else jnp.maximum(m_tile, highest)
            if sub_tile in hidden_before:
                continue
            before = SubTile(plan, refs.previous_arrays, indices[1], row, rows, col, cols)
            weights = before.dropout()(weights)
            out = product(plan, v, weights.astype(plan.dtype), 0, 0)
            # Accumulated in memory: as a value it would occupy half of the registers.
            acc = state.acc[:, at]
            if not is_scaled:
                acc, is_scaled = (alpha[None] * by_sublane(plan.sublanes, acc)).reshape(plan.Dv, cols), True
            state.acc[:, at] = acc + out
        # If all of these sub-tiles are hidden, alpha is 1, or there is nothing to rescale yet.
        if l_tile is not None:
            state.l[:, at] = alpha * state.l[:, at] + l_tile
        state.m_before[:, at] = m_before
        if first is not None:
            if m_tile is None:
                m_tile = jnp.full((plan.sublanes, cols), -jnp.inf, jnp.float32)
            m_before = jnp.where(first, -jnp.inf, m_before)
            m = jnp.maximum(m_before, jnp.broadcast_to(m_tile.max(axis=0, keepdims=True), m_tile.shape))
            state.m[:, at] = m
            state.alpha[:, at] = jnp.exp2((m_before - _finite(m)) * c)


def _scores(sub: SubTile, refs: ForwardRefs, masked: bool) -> jax.Array:
    plan = sub.plan
    s = product(plan, refs.k[sub.keys, :], refs.q[sub.queries, :], 1, 1)
    if plan.scoring.has_cap_or_bias:
        s = sub.apply_cap_and_bias(s * plan.scale_residual, sub.bias_values())
    return jnp.where(sub.allowed(), s, -jnp.inf) if masked else s


def _finish(plan: FlashPlan, refs: ForwardRefs, sink: Leaf) -> None:
    """Divide by the denominator, sinks included; queries that see no key give 0 and −inf."""
    state = refs.state
    m, c = _finite(state.m_before[:1]), log2_unit(plan)
    l = state.l[...].sum(axis=0, keepdims=True)
    sees_any, acc = l != 0, state.acc[...]  # NaN too
    if plan.max_logits:
        # A row without tiles may still have the maximum of the row before it.
        highest = jnp.where(sees_any, m * score_unit(plan), -jnp.inf)
        refs.rows[2:] = jnp.where(l == l, highest, jnp.nan)
    if sink is not None:
        sink = sink * (1 / score_unit(plan))
        new_m = jnp.maximum(m, sink)
        alpha = jnp.exp2((m - new_m) * c)
        l = l * alpha + jnp.exp2((sink - new_m) * c)
        acc, m = acc * alpha, new_m
    l = jnp.where(sees_any, l, 1.0)
    logsumexp = m * score_unit(plan) + jnp.log(l)
    refs.out[...] = jnp.where(sees_any, acc * (1 / l), 0.0).T.astype(refs.out.dtype)
    refs.rows[:1] = jnp.where(sees_any, logsumexp, -jnp.inf)
    residual = (m - logsumexp * (1 / score_unit(plan))) * c + jnp.log2(l)
    refs.rows[1:2] = jnp.where(sees_any, residual, 0.0)


def _clear(state: TileState) -> None:
    state.l[...] = jnp.zeros(state.l.shape, jnp.float32)
    state.acc[...] = jnp.zeros(state.acc.shape, jnp.float32)


def _finite(m: jax.Array) -> jax.Array:
    """``m``, and 0 where it is −inf: exp(−inf − 0) is 0, where exp(−inf + inf) is NaN."""
    return jnp.where(m == -jnp.inf, 0.0, m)
