"""The forward kernel. A program computes a tile of queries: an online softmax over its active tiles of keys
(arXiv:2307.08691).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.blackwell import forward as blackwell
from attnops_triton.flash.loops import place_by_query, schedule_operands, tile_loops
from attnops_triton.flash.operands import Arrays, Operand, base, score_operands
from attnops_triton.flash.partitioned import launch_partitioned
from attnops_triton.flash.plan import LOG2E, FlashPlan
from attnops_triton.flash.steps import write_denominator
from attnops_triton.flash.tile import TileWriter, dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.launch import launch
from attnops_triton.language.source import SourceWriter, number
from attnops_triton.targets import TENSOR_MEMORY


@folds_batch
def forward(
    plan: FlashPlan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, schedule: TileSchedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output, and the logsumexp as two terms.

    The backward pass recomputes weights from both terms. Their float32 sum would be too imprecise for large scores.

    Args:
        plan: the plan of the call.
        q: [B, T, H, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        schedule: the active tiles of keys of each tile of queries.

    Returns:
        The output [B, T, H, Dv]; ``m`` [B, H, T] float32, the largest score of each query (sinks included) divided by
        ``plan.score_unit``, −inf if the query is fully masked; and ``log2_sum`` [B, H, T] float32, log2 of the sum of
        exponentials relative to ``m``.
    """
    operands = [
        Operand("q", q),
        Operand("k", k),
        Operand("v", v),
        *schedule_operands(schedule),
        *score_operands(plan, arrays),
    ]
    if arrays.sinks is not None:
        operands.append(Operand("sinks", arrays.sinks))
    outputs = {
        "out": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.Dv), jnp.dtype(plan.out_dtype)),
        "m": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
        "log2_sum": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
    }
    write: SourceWriter
    if plan.forward.specialised and plan.arch not in TENSOR_MEMORY:
        from attnops_triton.flash.hopper.forward import attnops_flash_forward
        from attnops_triton.flash.hopper.options import HopperOptions, make_options

        options = make_options(HopperOptions, plan, plan.forward, operands, schedule)
        named = {x if x == "out" else f"{x}_out": shape for x, shape in outputs.items()}
        results = launch_partitioned(plan, plan.forward, attnops_flash_forward, options, operands, schedule, named, 4)
        return results["out"], results["m_out"], results["log2_sum_out"]
    if plan.forward.specialised:
        partitioned, programs = blackwell.write_forward(plan, operands, schedule)
        outputs["scratch"] = partitioned.scratch(programs)
        write = partitioned
    else:
        write, programs = _write(plan, operands, schedule)
    results = launch(plan, plan.forward, write, "attnops_flash_forward", operands, outputs, programs)
    return results["out"], results["m"], results["log2_sum"]


def _write(plan: FlashPlan, operands: list[Operand], schedule: TileSchedule) -> tuple[SourceWriter, int]:
    write = SourceWriter()
    bq, bk, scoring = plan.forward.bq, plan.forward.bk, plan.scoring
    tile = TileWriter.make(write, plan, plan.forward, operands)
    ragged = not tile.even
    chunks = range(len(plan.chunks(plan.Dv)))
    programs = place_by_query(write, plan, bq)
    write(f"q0 = row * {bq}")
    tile.queries()
    tile.load("q", "q", plan.H, "h", plan.D, ragged)
    tile.load_values("", False)
    tile.load_values("q", ragged)
    write(f'm = tl.full([{bq}], float("-inf"), tl.float32)', f"l = tl.full([{bq}], 0.0, tl.float32)")
    for i, (_, width) in enumerate(plan.chunks(plan.Dv)):
        write(f"acc_{i} = tl.full([{bq}, {width}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and not tile.even
        tile.keys()
        tile.load("k", "kv", plan.K, "k", plan.D, edge)
        tile.load_values("kv", edge)
        tile.product("s", "q", "k", plan.D)
        tile.apply_cap_and_bias()
        if masked and tile.allowed(edge):
            write('s = tl.where(ok, s, float("-inf"))')
        write("m_new = tl.maximum(m, tl.reduce(s, 1, largest))")
        if masked or scoring.has_bias:
            # If all scores so far are masked, m_new is −inf, and −inf − −inf would be NaN.
            write('base = tl.where(m_new == float("-inf"), 0.0, m_new)')
        else:
            write("base = m_new")
        tile.weights("base")
        write(
            f"alpha = tl.exp2((m - base) * {number(plan.score_unit * LOG2E)})",
            "l = l * alpha + tl.reduce(p, 1, total)",
        )
        if scoring.dropout_prob:
            tile.dropout()
            write("p = tl.where(keep, p, 0.0)")
        tile.load("v", "kv", plan.K, "k", plan.Dv, edge)
        if masked and (scoring.mask is not None or plan.bit_mask):
            tile.zero_masked_tokens("kv", *(f"v_{i}" for i in chunks))
        write(f"p = p.to({dtype(plan)})")
        for i in chunks:
            write(f"acc_{i} = acc_{i} * alpha[:, None]")
            tile.dot(f"acc_{i}", "p", f"v_{i}", add=True)
        write("m = m_new")

    tile_loops(write, schedule, "kv0", bk, tile.even, body)
    _write_result(tile, ragged)
    return write, programs


def _write_result(tile: TileWriter, ragged: bool) -> None:
    """Write the division by the denominator and the stores. Fully masked queries get an output of 0 and an ``m`` of
    −inf.
    """
    write, plan = tile.write, tile.plan
    write_denominator(tile)
    for i in range(len(plan.chunks(plan.Dv))):
        write(f"acc_{i} = acc_{i} * factor[:, None]")
    tile.store("out", "acc", "q", plan.H, "h", plan.Dv, f"tl.{plan.out_dtype}")
    masked = ", mask=qi < T" if ragged else ""
    write(f'tl.store({base(write, "m", "", plan.H, "T")} + qi, tl.where(seen, m, float("-inf")){masked})')
    write(f"tl.store({base(write, 'log2_sum', '', plan.H, 'T')} + qi, tl.log2(l){masked})")
