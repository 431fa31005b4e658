"""The forward kernel: an online softmax over the tiles of keys that a tile of queries visits (arXiv:2307.08691)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.loops import place_by_query, visit_loops, visit_operands
from attnops_triton.flash.operands import Arrays, Operand, base, score_operands
from attnops_triton.flash.plan import LOG2E, Plan
from attnops_triton.flash.tile import Tile, dtype
from attnops_triton.flash.visits import Visits
from attnops_triton.language.launch import launch
from attnops_triton.language.source import Writer, number


@folds_batch
def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, visits: Visits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, T, H, Dv], and the logsumexp in two parts, each [B, H, T] float32.

    Their sum would round: where scores are large, by more than the weights can bear that are computed from it again.

    Args:
        plan: of the call.
        q: [B, T, H, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        arrays: what scores depend on beside these.
        visits: by tiles of queries.

    Returns:
        The output; the largest score, sinks among them, in units of ``plan.unit``, −inf for a row that saw nothing;
        and the logarithm to base 2 of the sum of exponentials less it.
    """
    operands = [
        Operand("q", q),
        Operand("k", k),
        Operand("v", v),
        *visit_operands(visits),
        *score_operands(plan, arrays),
    ]
    if arrays.sinks is not None:
        operands.append(Operand("sinks", arrays.sinks))
    outputs = {
        "out": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.Dv), jnp.dtype(plan.out_dtype)),
        "level": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
        "rest": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
    }
    write = Writer()
    programs = _write(write, plan, operands, visits)
    found = launch(plan, plan.forward, write, "attnops_flash_forward", operands, outputs, programs)
    return found["out"], found["level"], found["rest"]


def _write(write: Writer, plan: Plan, operands: list[Operand], visits: Visits) -> int:
    bq, bk, scoring = plan.forward.bq, plan.forward.bk, plan.scoring
    tile = Tile.make(write, plan, bq, bk, operands)
    ragged = plan.T % bq != 0
    pieces = range(len(plan.pieces(plan.Dv)))
    programs = place_by_query(write, plan, bq)
    write(f"q0 = row * {bq}")
    tile.queries()
    tile.rows("q", "q", plan.H, "h", plan.D, ragged)
    tile.values_of("", False)
    tile.values_of("q", ragged)
    write(f'm = tl.full([{bq}], float("-inf"), tl.float32)', f"l = tl.full([{bq}], 0.0, tl.float32)")
    for i, (_, width) in enumerate(plan.pieces(plan.Dv)):
        write(f"acc_{i} = tl.full([{bq}, {width}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and plan.S % bk != 0
        tile.keys()
        tile.rows("k", "kv", plan.K, "k", plan.D, edge)
        tile.values_of("kv", edge)
        tile.product("s", "q", "k", plan.D)
        tile.change()
        if masked and tile.allowed(edge):
            write('s = tl.where(ok, s, float("-inf"))')
        write("m_new = tl.maximum(m, tl.reduce(s, 1, largest))")
        if masked or scoring.has_bias:
            # A row that has seen nothing yet: −inf less −inf is no number.
            write('base = tl.where(m_new == float("-inf"), 0.0, m_new)')
        else:
            write("base = m_new")
        tile.weights("base")
        write(
            f"alpha = tl.exp2((m - base) * {number(plan.unit * LOG2E)})",
            "l = l * alpha + tl.reduce(p, 1, total)",
        )
        if scoring.dropout_prob:
            tile.keep()
            write("p = tl.where(keep, p, 0.0)")
        tile.rows("v", "kv", plan.K, "k", plan.Dv, edge)
        if masked and (scoring.mask is not None or plan.packed):
            tile.hide("kv", *(f"v_{i}" for i in pieces))
        write(f"p = p.to({dtype(plan)})")
        for i in pieces:
            write(f"acc_{i} = acc_{i} * alpha[:, None]")
            tile.dot(f"acc_{i}", "p", f"v_{i}", add=True)
        write("m = m_new")

    visit_loops(write, visits, "kv0", bk, body)
    unit = number(plan.unit * LOG2E)
    # By the sum, which a score of NaN makes NaN, where the maximum may not be.
    write("seen = l != 0.0", "m = tl.where(seen, m, 0.0)")
    factor = 1 / (1 - scoring.dropout_prob)
    if scoring.sinks:
        write(
            f"given = tl.load({base('sinks', tile.shapes['sinks'])})",
            f"sink = tl.minimum(given * {number(1 / plan.unit)}, 3e38)",
            "top = tl.maximum(m, sink)",
            f"shrink = tl.exp2((m - top) * {unit})",
            f"l = l * shrink + tl.exp2((sink - top) * {unit})",
            'l = tl.where((given == given) & (given < float("inf")), l, float("nan"))',
            f"factor = {number(factor)} * shrink",
            "m = top",
        )
    else:
        write(f"factor = {number(factor)}")
    write("l = tl.where(seen, l, 1.0)", "factor = tl.where(seen, factor / l, 0.0)")
    for i in pieces:
        write(f"acc_{i} = acc_{i} * factor[:, None]")
    tile.store_rows("out", "acc", "q", plan.H, "h", plan.Dv, f"tl.{plan.out_dtype}")
    masked = f", mask=qi < {plan.T}" if ragged else ""
    shape = (plan.B, plan.H, plan.T)
    write(f'tl.store({base("level", shape)} + qi, tl.where(seen, m, float("-inf")){masked})')
    write(f"tl.store({base('rest', shape)} + qi, tl.log2(l){masked})")
    return programs
