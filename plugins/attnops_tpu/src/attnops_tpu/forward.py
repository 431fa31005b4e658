"""The forward kernel: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over transposed scores."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.masks import Coverage
from attnops_tpu.interpreter import interpret_params
from attnops_tpu.operands import Arrays, Operand, Place, score_operands
from attnops_tpu.plan import Plan
from attnops_tpu.tile import LN2, Part, product, unit, without_unseen_keys
from attnops_tpu.visits import Visits

# A running maximum never falls below it, so that exp(−inf − maximum) is 0 and not NaN.
_LOWEST: Final = -1e30


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, visits: Visits
) -> tuple[jax.Array, jax.Array]:
    """Output [B, H, Dv, Tp] in the query's dtype and logsumexp [B, H, 1, Tp] float32.

    Args:
        plan: of the call.
        q: [B, H, D, Tp], with the folded part of the scale.
        k: [B, K, Sp, D].
        v: [B, K, Dv, Sp].
        arrays: what scores depend on beside these.
        visits: by tiles of queries.
    """
    operands = [
        Operand("q", q, (None, None, plan.D, plan.bq), lambda p: (p.b, p.h, 0, p.q_tile)),
        Operand("k", k, (None, None, plan.bk, plan.D), lambda p: (p.b, p.h // plan.G, p.kv_tile, 0)),
        Operand("v", v, (None, None, plan.Dv, plan.bk), lambda p: (p.b, p.h // plan.G, 0, p.kv_tile)),
        *score_operands(plan, arrays),
    ]
    if arrays.sinks is not None:
        operands.append(Operand("sinks", arrays.sinks))

    def where(b: Any, h: Any, step: Any, entries: Any) -> Place:
        visit = visits.at(entries, b, h, step)
        return Place(b, h, visit.row, visit.column)

    def kernel(entries: Any, *refs: Any) -> None:
        inputs, (out, lse, top, total, accumulated) = refs[: len(operands)], refs[len(operands) :]
        named = dict(zip((o.name for o in operands), inputs, strict=True))
        ids = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        visit = visits.at(entries, *ids)
        place = where(*ids, entries)

        @pl.when(visit.first == 1)
        def _() -> None:
            top[...] = jnp.full(top.shape, _LOWEST, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            accumulated[...] = jnp.zeros(accumulated.shape, jnp.float32)

        for kind in (Coverage.FULL, Coverage.PARTIAL):

            @pl.when(visit.kind == int(kind))
            def _(masked: bool = kind == Coverage.PARTIAL) -> None:
                _add_tile(plan, named, place, masked, top, total, accumulated)

        @pl.when(visit.last == 1)
        def _() -> None:
            sink = named["sinks"][place.h] if arrays.sinks is not None else None
            _finish(plan, out, lse, top[...], total[...], accumulated[...], sink)

    def rows(d: int) -> pl.BlockSpec:
        def index(*ids: Any) -> tuple[Any, ...]:
            p = where(*ids)
            return (p.b, p.h, 0, p.q_tile)

        return pl.BlockSpec((None, None, d, plan.bq), index)

    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((plan.B, plan.H, plan.Dv, plan.Tp), plan.dtype),
            jax.ShapeDtypeStruct((plan.B, plan.H, 1, plan.Tp), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.B, plan.H, visits.steps),
            in_specs=[operand.spec(where) for operand in operands],
            out_specs=[rows(plan.Dv), rows(1)],
            scratch_shapes=[
                pltpu.VMEM((1, plan.bq), jnp.float32),
                pltpu.VMEM((1, plan.bq), jnp.float32),
                pltpu.VMEM((plan.Dv, plan.bq), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=plan.vmem
        ),
        interpret=interpret_params(plan.interpret),
        name="attnops_flash_forward",
    )(visits.entries, *(operand.array for operand in operands))


def _add_tile(plan: Plan, refs: Any, place: Place, masked: bool, top: Any, total: Any, accumulated: Any) -> None:
    scoring, c = plan.scoring, unit(plan)
    rows, cols = plan.forward

    def scores(part: Part) -> tuple[jax.Array, jax.Array | None]:
        s = product(plan, refs["k"][part.keys, :], refs["q"][:, part.queries])
        if scoring.changes_scores:
            s = part.change(s * plan.rest, part.bias_values())
        counts = part.allowed() if masked else None
        return (s if counts is None else jnp.where(counts, s, -jnp.inf)), counts

    for col in range(0, plan.bq, cols):
        at = slice(col, col + cols)
        m, l, acc = top[:, at], total[:, at], accumulated[:, at]
        for row in range(0, plan.bk, rows):
            part = Part(plan, refs, place, row, rows, col, cols)
            s, counts = scores(part)
            new = jnp.maximum(m, jnp.max(s, axis=0, keepdims=True))
            weights = jnp.exp2(s * c - new * c)
            fade = jnp.exp2((m - new) * c)
            l = l * fade + jnp.sum(weights, axis=0, keepdims=True)
            v = refs["v"][:, part.keys]
            if counts is not None and scoring.hides_tokens:
                v = without_unseen_keys(v, counts, axis=1)
            acc = acc * fade + product(plan, v, part.drop()(weights).astype(plan.dtype))
            m = new
        top[:, at], total[:, at], accumulated[:, at] = m, l, acc


def _finish(plan: Plan, out: Any, lse: Any, top: Any, total: Any, accumulated: Any, sink: Any) -> None:
    """Divide by the denominator, to which the sink belongs; rows that saw nothing give 0 and −inf."""
    top = top * (unit(plan) * LN2)  # in natural units
    saw_any = total > 0
    if sink is not None:
        new = jnp.maximum(top, sink)
        fade = jnp.exp(top - new)
        total = total * fade + jnp.exp(sink - new)
        accumulated, top = accumulated * fade, new
    denominator = jnp.where(saw_any, total, 1.0)
    out[...] = (accumulated * jnp.where(saw_any, 1 / denominator, 0.0)).astype(out.dtype)
    lse[...] = jnp.where(saw_any, top + jnp.log(denominator), -jnp.inf)
