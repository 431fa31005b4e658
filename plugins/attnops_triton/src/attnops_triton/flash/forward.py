"""The forward kernel. A program computes a tile of queries: an online softmax over its active tiles of keys
(arXiv:2307.08691).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.blackwell.forward import attnops_flash_forward as blackwell
from attnops_triton.flash.blackwell.options import BlackwellOptions
from attnops_triton.flash.hopper.forward import attnops_flash_forward as hopper
from attnops_triton.flash.hopper.options import HopperOptions
from attnops_triton.flash.kernels.forward import attnops_flash_forward
from attnops_triton.flash.launch import launch, schedule_operands, schedule_sizes, sizes_by_query
from attnops_triton.flash.operands import Arrays, Operand, score_operands
from attnops_triton.flash.plan import FlashPlan
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.targets import TENSOR_MEMORY


@folds_batch
def forward(
    plan: FlashPlan, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, schedule: TileSchedule
) -> tuple[jax.Array, ...]:
    """The output, the logsumexp as two terms and, if asked for, the largest scores.

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
        exponentials relative to ``m``. With ``plan.max_logits`` also ``m`` [B, H, T] without sinks, NaN where a score
        is NaN or +inf.
    """
    operands = [
        Operand("q", q),
        Operand("k", k),
        Operand("v", v),
        *schedule_operands(schedule),
        *score_operands(arrays),
    ]
    if arrays.sinks is not None:
        operands.append(Operand("sinks", arrays.sinks))
    outputs = {
        "out": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.Dv), jnp.dtype(plan.out_dtype)),
        "m_out": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
        "log2_sum_out": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32),
    }
    if plan.max_logits and arrays.sinks is not None:
        outputs["max_out"] = outputs["m_out"]
    sizes, programs = sizes_by_query(plan, plan.forward)
    function, options = attnops_flash_forward, dict[str, Any]()
    if plan.forward.specialised:
        function, options = hopper, {"kind": HopperOptions}
        if plan.arch in TENSOR_MEMORY:
            function, options = blackwell, {"kind": BlackwellOptions}
    results = launch(
        plan, plan.forward, function, operands, outputs, programs, sizes | schedule_sizes(schedule),
        map_by_head=schedule.map_shape[1] > 1, **options,
    )  # fmt: skip
    m, log2_sum = results["m_out"], results["log2_sum_out"]
    if not plan.max_logits:
        return results["out"], m, log2_sum
    highest = results["max_out"] if "max_out" in results else jnp.where(jnp.isnan(log2_sum), jnp.nan, m)
    return results["out"], m, log2_sum, highest
