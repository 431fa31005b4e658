"""The backward kernel: queries', keys' and values' gradients in one sweep (Dao 2023, arXiv:2307.08691).

The outer loop is over tiles of keys, whose gradients are accumulated in vector memory; there also stay the gradients
of a span of queries, all heads of a kv head, so that nothing is added up in main memory. A sequence of several spans
takes as many sweeps. Everything is transposed, [features, tokens], and added in a fixed order.

With outputs transposed, the features are what streams through the matrix unit and the weights are what it holds, so
that a head dim of 128 fills units of 256 × 256. The unit works in program order: products of a part stand before those
that wait for the exponentials of an earlier one. NOTES.md has the figures.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.operands import (
    Arrays,
    Operand,
    Place,
    by_query,
    columns_of_key,
    compiler_params,
    cost,
    rows_of_key,
    score_operands,
)
from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.tile import Part, product, unit, without_unseen_keys, without_unseen_queries
from attnops_tpu.flash.visits import Visits
from attnops_tpu.interpreter import interpret_params

# By so many rows a buffer could be read further down, for all that the compiler knows; a tile of 16-bit registers.
_MOVE: Final = 16


class Inputs(NamedTuple):
    """What the kernels of the backward pass share, tokens padded to whole tiles.

    Attributes:
        q: [B, H, D, Tp], with the folded part of the scale.
        k: [B, K, Sp, D].
        k_transposed: [B, K, D, Sp].
        v: [B, K, Sp, Dv].
        d_out: [B, H, Dv, Tp].
        lse: [B, H, 1, Tp], the logsumexp in the units of scores as kernels hold them; +inf where weights are to be 0.
        delta: [B, H, 1, Tp], ``d_out · out − d_logsumexp``.
    """

    q: jax.Array
    k: jax.Array
    k_transposed: jax.Array
    v: jax.Array
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array


def input_operands(plan: Plan, inputs: Inputs, arrays: Arrays) -> list[Operand]:
    """`Inputs` and what scores depend on beside them."""
    return [
        by_query("q", inputs.q, plan.bq),
        rows_of_key("k", inputs.k, plan),
        columns_of_key("k_transposed", inputs.k_transposed, plan),
        rows_of_key("v", inputs.v, plan),
        by_query("d_out", inputs.d_out, plan.bq),
        by_query("lse", inputs.lse, plan.bq),
        by_query("delta", inputs.delta, plan.bq),
        *score_operands(plan, arrays),
        *([] if arrays.dropout is None else [by_query("dropout", arrays.dropout, plan.bq)]),
    ]


@folds_batch
def backward(
    plan: Plan, inputs: Inputs, arrays: Arrays, spans: tuple[Visits, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query [B, H, D, Tp] float32 without the scale, of key [B, K, D, Sp] and value [B, K, Dv, Sp].

    Args:
        plan: of the call.
        inputs: see `Inputs`.
        arrays: what scores depend on beside these.
        spans: the visits of each span of queries, by tiles of keys; spans are of ``plan.span`` tiles of queries.
    """
    if len(spans) == 1:
        dtype = plan.out_dtype if plan.split == 1 else jnp.float32
        dq, *keys = _span(plan, inputs, arrays, spans[0], jnp.zeros(2, jnp.int32), dtype)
        dk, dv = (_together(plan, x).astype(plan.out_dtype) for x in keys)
        return dq, dk, dv
    longest = max(v.longest for v in spans)
    entries = jnp.stack([v.padded(longest) for v in spans])
    steps = jnp.stack([jnp.asarray(v.steps, jnp.int32) for v in spans])
    maps, kinds = spans[0].maps, tuple(sorted({kind for v in spans for kind in v.kinds}, reverse=True))
    first = jnp.stack([jnp.arange(len(spans), dtype=jnp.int32) * plan.span, jnp.zeros(len(spans), jnp.int32)], axis=1)

    def sweep(carry: Any, xs: Any) -> Any:
        entries, steps, first = xs
        dq, dk, dv = _span(
            plan, inputs, arrays, Visits(entries, maps, longest, kinds, spans[0].rows, steps), first, jnp.float32
        )
        return (carry[0] + _together(plan, dk), carry[1] + _together(plan, dv)), dq

    # Like keys, so that in `jax.shard_map` they vary as these do.
    dk, dv = (
        jnp.zeros_like(inputs.k, shape=(plan.B, plan.K, d, plan.Sp), dtype=jnp.float32) for d in (plan.D, plan.Dv)
    )
    (dk, dv), dq = lax.scan(sweep, (dk, dv), (entries, steps, first))
    dq = jnp.moveaxis(dq, 0, 3).reshape(plan.B, plan.H, plan.D, -1)[..., : plan.Tp]
    return dq, dk.astype(plan.out_dtype), dv.astype(plan.out_dtype)


def _together(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, K · split, d, Sp] summed to [B, K, d, Sp]."""
    return x if plan.split == 1 else x.reshape(plan.B, plan.K, plan.split, *x.shape[2:]).sum(axis=2)


def _span(
    plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits, first: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One sweep; of the query's gradient, the span's [B, H, D, span · bq]. ``first`` is its first tile, and a 0."""
    operands = input_operands(plan, inputs, arrays)
    width, parts = plan.span * plan.bq, plan.backward
    K, G = plan.K * plan.split, plan.G // plan.split

    def where(b: Any, k: Any, step: Any, g: Any, entries: Any, first: Any) -> Place:
        visit = visits.at(entries, b, lax.div(k, plan.split), step)
        return Place(b, k * G + g, visit.column, visit.row)

    def kernel(entries: Any, first: Any, *refs: Any) -> None:
        named = dict(zip((o.name for o in operands), refs, strict=False))
        dq, dk_out, dv_out, dk, dv, *buffers = refs[len(operands) :]
        b, k, step, g = (pl.program_id(axis) for axis in range(4))
        visit = visits.at(entries, b, lax.div(k, plan.split), step)
        place = where(b, k, step, g, entries, first)

        @pl.when((step == 0) & (g == 0))
        def _() -> None:
            for head in range(G):
                _clear(dq.at[head])

        @pl.when((visit.first == 1) & (g == 0))
        def _() -> None:
            _clear(dk)
            _clear(dv)

        for kind in visits.kinds:

            @pl.when(visit.kind == kind)
            def _(masked: bool = kind == Coverage.PARTIAL) -> None:
                start = (place.q_tile - first[0]) * plan.bq
                _add_tile(plan, named, place, masked, (dq.at[g], dk, dv), start, buffers, first[1])

        @pl.when((visit.last == 1) & (g == G - 1))
        def _() -> None:
            dk_out[...] = (dk[...] * plan.rest).astype(dk_out.dtype)
            dv_out[...] = dv[...].astype(dv_out.dtype)

    def of_keys(d: int) -> pl.BlockSpec:
        def index(b: Any, k: Any, step: Any, g: Any, entries: Any, first: Any) -> tuple[Any, ...]:
            return (b, k, 0, visits.at(entries, b, lax.div(k, plan.split), step).row)

        return pl.BlockSpec((None, None, d, plan.bk), index)

    return pl.pallas_call(
        kernel,
        out_shape=[
            output_like(inputs.q, (plan.B, plan.H, plan.D, width), jnp.float32),
            output_like(inputs.q, (plan.B, K, plan.D, plan.Sp), dtype),
            output_like(inputs.q, (plan.B, K, plan.Dv, plan.Sp), dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.B, K, visits.steps, G),
            in_specs=[operand.spec(where) for operand in operands],
            out_specs=[
                pl.BlockSpec((None, G, plan.D, width), lambda b, k, step, g, entries, first: (b, k, 0, 0)),
                of_keys(plan.D),
                of_keys(plan.Dv),
            ],
            scratch_shapes=[
                *(pltpu.VMEM((d, plan.bk), jnp.float32) for d in (plan.D, plan.Dv)),
                *[pltpu.VMEM((parts.rows + _MOVE, parts.cols), plan.dtype)] * (2 * (parts.lag + 1)),
            ],
        ),
        compiler_params=compiler_params(plan, 4),
        cost_estimate=cost(plan, visits.longest, 3 * plan.D + 2 * plan.Dv),
        interpret=interpret_params(plan.interpret),
        name="attnops_flash_backward",
    )(visits.entries, first, *(operand.array for operand in operands))


def _add_tile(
    plan: Plan, refs: Any, place: Place, masked: bool, gradients: Any, start: Any, buffers: Any, zero: Any
) -> None:
    """Add what a tile contributes.

    Args:
        plan: of the call.
        refs: by operand.
        place: which tile.
        masked: whether it is PARTIAL.
        gradients: of queries [D, span · bq], of keys [D, bk] and of values [Dv, bk].
        start: where the tile's queries begin in the first.
        buffers: for the weights and the gradients of scores of the parts between two stages, [rows + `_MOVE`, cols].
        zero: 0, which the compiler must not know: else it sees that what is read from a buffer was just written, keeps
            it in registers, and spills those.
    """
    dq, dk, dv = gradients
    rows, cols, lag, keys_first = plan.backward
    columns, lines = range(0, plan.bq, cols), range(0, plan.bk, rows)
    order = itertools.product(columns, lines) if keys_first else ((col, row) for row in lines for col in columns)
    parts = [Part(plan, refs, place, row, rows, col, cols) for col, row in order]
    written = pl.ds(zero * _MOVE if plan.interpret else pl.multiple_of(zero * _MOVE, _MOVE), rows)

    def prepare(i: int, s: jax.Array, d_weights: jax.Array) -> None:
        s, pull_back = scores(parts[i], s, masked)
        weights, d_scores, _ = weights_and_gradients(parts[i], refs, masked, s, d_weights)
        if pull_back is not None:
            (d_scores,) = pull_back(d_scores)
        for x, buffer in zip((weights, d_scores), buffers[2 * (i % (lag + 1)) :], strict=False):
            buffer[:rows, :] = x.astype(plan.dtype)

    def add(i: int) -> None:
        part = parts[i]
        weights, d_scores = (buffer[written, :] for buffer in buffers[2 * (i % (lag + 1)) :][:2])
        q, k_transposed = refs["q"][:, part.queries], refs["k_transposed"][:, part.keys]
        if masked and plan.scoring.has_fully_masked_tokens:
            counts = part.allowed()
            q, k_transposed = without_unseen_queries(q, counts), without_unseen_keys(k_transposed, counts, axis=1)
        dv[:, part.keys] += product(plan, refs["d_out"][:, part.queries], weights, 1, 1)
        dk[:, part.keys] += product(plan, q, d_scores, 1, 1)
        at = start + part.col
        at = pl.ds(at if plan.interpret else pl.multiple_of(at, 128), cols)
        dq[:, at] += product(plan, k_transposed, d_scores)

    for i in range(len(parts) + lag):
        found = products(parts[i], refs) if i < len(parts) else None
        if i >= lag:
            add(i - lag)
        if found is not None:
            prepare(i, *found)


def _clear(ref: Any) -> None:
    """Zeros, in a loop: as straight code they would become predicated stores in the midst of the tile's."""

    def body(i: Any, _: None) -> None:
        rows = pl.ds(i * 8 if ref.shape[0] % 8 else pl.multiple_of(i * 8, 8), 8)
        ref[rows, :] = jnp.zeros((8, ref.shape[1]), ref.dtype)

    lax.fori_loop(0, ref.shape[0] // 8, body, None)
    rest = ref.shape[0] % 8
    if rest:
        ref[ref.shape[0] - rest :, :] = jnp.zeros((rest, ref.shape[1]), ref.dtype)


def products(part: Part, refs: Any) -> tuple[jax.Array, jax.Array]:
    """Query times key, and the gradients of the weights, [rows, cols] both."""
    s = product(part.plan, refs["k"][part.keys, :], refs["q"][:, part.queries])
    return s, product(part.plan, refs["v"][part.keys, :], refs["d_out"][:, part.queries])


def scores(part: Part, s: jax.Array, masked: bool) -> tuple[jax.Array, Any]:
    """The scores of a product, and how gradients come back to it in units of the whole scale; None for unchanged."""
    plan = part.plan
    if not plan.scoring.changes_scores:
        return s, None
    values = part.bias_values()
    return jax.vjp(lambda x: part.change(x, values), known(part, s, masked) * plan.rest)


def known(part: Part, s: jax.Array, masked: bool) -> jax.Array:
    """Products, 0 for those of what nobody sees: it may hold NaN, and so would the derivatives there, times 0."""
    return jnp.where(part.allowed(), s, 0.0) if masked and part.plan.scoring.has_fully_masked_tokens else s


def weights_and_gradients(
    part: Part, refs: Any, masked: bool, s: jax.Array, d_weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The weights, as they were multiplied with values; the gradients of the scores; which count, None for all."""
    plan = part.plan
    counts = part.allowed() if masked else None
    if counts is not None:
        s = jnp.where(counts, s, -jnp.inf)
    weights = jnp.exp2((s - refs["lse"][:, part.queries]) * unit(plan))
    drop = part.drop()
    d_scores = weights * (drop(d_weights) - refs["delta"][:, part.queries])
    if counts is not None:
        # What nobody sees may hold NaN.
        d_scores = jnp.where(counts, d_scores, 0.0)
    return drop(weights), d_scores, counts
