"""The backward kernels: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Both recompute the weights from the logsumexp (Dao 2023, arXiv:2307.08691). They use no atomics and add in a fixed
order, except `fused`. They also compute the gradients of the values of an elementwise bias per query, key or head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.blackwell import backward as blackwell
from attnops_triton.flash.blackwell.options import BackwardOptions
from attnops_triton.flash.hopper import by_key as hopper_by_key
from attnops_triton.flash.hopper import by_query as hopper_by_query
from attnops_triton.flash.hopper.options import HopperOptions
from attnops_triton.flash.kernels.backward import attnops_flash_backward_key, attnops_flash_backward_query
from attnops_triton.flash.launch import launch, schedule_operands, schedule_sizes, sizes_by_key, sizes_by_query
from attnops_triton.flash.operands import Arrays, Operand, score_operands
from attnops_triton.flash.plan import LOG2E, FlashPlan, cdiv
from attnops_triton.flash.sizes import is_even
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.translate import differentiable
from attnops_triton.targets import TENSOR_MEMORY, known


class Inputs(NamedTuple):
    """The arrays of the backward pass."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, K, D]
    v: jax.Array  # [B, S, K, Dv]
    d_out: jax.Array  # [B, T, H, Dv]
    # [B, H, T] float32, the largest score, as the forward pass returns it; +inf for fully masked queries, whose weights
    # are then 0.
    m: jax.Array
    log2_sum: jax.Array  # [B, H, T], log2 of the sum of exponentials relative to ``m``
    delta: jax.Array  # [B, H, T], ``d_out · out − d_lse``


def input_operands(inputs: Inputs, arrays: Arrays) -> list[Operand]:
    """The operands for `Inputs` and for the other inputs of the scores."""
    return [Operand(name, x) for name, x in zip(Inputs._fields, inputs, strict=True)] + score_operands(arrays)


def by_query(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[jax.Array, dict[int, jax.Array]]:
    """The gradient of query, [B, T, H, D], and of values of the bias, [B, H, T] each.

    Args:
        plan: the plan of the call.
        inputs: query, key, value, the output's cotangent, and the statistics per query.
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        schedule: the active tiles of keys of each tile of queries.
        wanted: indices of the bias's values, per query or per head, whose gradients are computed; for a value per head
            the sum over T is left to the caller.
    """
    run = folds_batch(functools.partial(_run_by_query, wanted=wanted))
    results = run(plan, inputs, arrays, schedule)
    return results["dq"], {i: results[f"dq_bias{i}"] for i in wanted}


def by_key(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """The gradients of key, [B, S, K, D], of value, [B, S, K, Dv], and of values of the bias, [B, H, S] each.

    Args:
        plan: the plan of the call.
        inputs: query, key, value, the output's cotangent, and the statistics per query.
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        schedule: the active tiles of queries of each tile of keys.
        wanted: indices of the bias's values per key whose gradients are computed.
    """
    run = folds_batch(functools.partial(_run_by_key, wanted=wanted))
    results = run(plan, inputs, arrays, schedule)
    return results["dk"], results["dv"], {i: results[f"dk_bias{i}"] for i in wanted}


def _run_by_query(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]
) -> dict[str, jax.Array]:
    """The outputs of the kernel by tiles of queries, by name."""
    operands = [*input_operands(inputs, arrays), *schedule_operands(schedule)]
    outputs = {"dq": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.D), jnp.dtype(plan.gradient_dtype))}
    outputs |= {f"dq_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32) for i in wanted}
    sizes, programs = sizes_by_query(plan, plan.by_query)
    function, options = attnops_flash_backward_query, _differentiates(plan, schedule, wanted)
    if plan.by_query.specialised:
        options |= {"kind": HopperOptions}
        function = hopper_by_query.attnops_flash_backward_query
        if plan.arch in TENSOR_MEMORY:
            function = blackwell.attnops_flash_backward_query
            options["kind"] = BackwardOptions
    return launch(
        plan, plan.by_query, function, operands, outputs, programs, sizes | schedule_sizes(schedule), **options
    )


@folds_batch
def fused(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, for a call without bias; dq is summed in any order.

    Args:
        plan: the plan of the call, whose ``fuses_dq`` is true.
        inputs: query, key, value, the output's cotangent, and the statistics per query.
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        schedule: the active tiles of queries of each tile of keys.
    """
    zeros = Operand("dq_before", jnp.zeros((plan.B, plan.T, plan.H, plan.D), jnp.float32))
    outputs = {"dq": jax.ShapeDtypeStruct(zeros.array.shape, jnp.float32)}
    results = _run_by_key(plan, inputs, arrays, schedule, (), (zeros,), outputs)
    dq = (results["dq"] * plan.scale).astype(plan.gradient_dtype)
    return dq, results["dk"], results["dv"]


def _run_by_key(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...],
    before: tuple[Operand, ...] = (), outputs: dict[str, jax.ShapeDtypeStruct] | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The outputs of the kernel by tiles of keys, by name.

    The kernel adds to the arrays ``before``; ``outputs``, in the same order, are the sums.
    """
    added = outputs or {}
    operands = [*input_operands(inputs, arrays), *schedule_operands(schedule), *before]
    padded = cdiv(plan.T, plan.by_key.bq) * plan.by_key.bq
    if plan.by_key.specialised:
        lse = inputs.m * (plan.score_unit * LOG2E) + inputs.log2_sum
        # With a logsumexp of inf the weights of queries beyond the last one are 0. `jax.vmap` may map delta alone.
        ends = [jnp.pad(x, ((0, 0), (0, 0), (0, padded - plan.T)), constant_values=value)
                for x, value in ((lse, jnp.inf), (inputs.delta, 0.0))]  # fmt: skip
        others = [x for x in operands if x.name not in ("m", "log2_sum", "delta")]
        operands = [*others, Operand("statistics", jnp.stack(jnp.broadcast_arrays(*ends), axis=2))]
    heads, dtype = (plan.H, "float32") if plan.splits_groups else (plan.K, plan.gradient_dtype)
    shapes = {"dk": (plan.B, plan.S, heads, plan.D), "dv": (plan.B, plan.S, heads, plan.Dv)}
    outputs = added | {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}
    outputs |= {f"dk_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.S), jnp.float32) for i in wanted}
    aliases = dict(zip(added, (x.name for x in before), strict=True))
    sizes, programs = sizes_by_key(plan, plan.by_key)
    function, options = attnops_flash_backward_key, _differentiates(plan, schedule, wanted)
    options |= {"transposed": True, "flat": _is_flat(plan, arrays, schedule, wanted)}
    if plan.by_key.specialised:
        function = hopper_by_key.attnops_flash_backward if added else hopper_by_key.attnops_flash_backward_key
        options["kind"] = HopperOptions
        if plan.arch in TENSOR_MEMORY:
            function = blackwell.attnops_flash_backward_key
            options["kind"] = BackwardOptions
        options["fuses_dq"] = bool(added)
        if added and not HopperOptions.can_slice(plan.D):
            operands.append(Operand("k_columns", inputs.k))
    results = launch(
        plan, plan.by_key, function, operands, outputs, programs, sizes | schedule_sizes(schedule), aliases,
        **options,
    )  # fmt: skip
    if plan.splits_groups:
        for name, shape in shapes.items():
            summed = results[name].reshape(plan.B, plan.S, plan.K, plan.G, shape[-1]).sum(axis=3)
            results[name] = summed.astype(plan.gradient_dtype)
    return results


def _is_flat(plan: FlashPlan, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]) -> bool:
    """Whether the kernel by keys has one loop over both heads and tiles.

    It costs 2 to 4 % more instructions. It is used where nested loops would spill registers between heads: with sums in
    tensor memory, and with a separate loop over PARTIAL tiles. Specialised kernels have it wherever heads have the same
    tiles.
    """
    has_two_loops = not is_even(plan, plan.by_key) or schedule.constant is None
    spills = plan.arch in TENSOR_MEMORY or (known(plan.arch) in ("sm_80", "gfx942") and has_two_loops)
    if plan.by_key.specialised:
        return plan.G > 1 and not plan.splits_groups and schedule.map_shape[1] == 1
    heads_are_alike = schedule.map_shape[1] == 1 and not wanted
    heads_are_alike &= all(x.shape[1] == 1 for x in (*arrays.mask, *arrays.bias))
    return spills and plan.G > 1 and not plan.splits_groups and heads_are_alike


def _differentiates(plan: FlashPlan, schedule: TileSchedule, wanted: tuple[int, ...]) -> dict[str, Any]:
    """Options of the backward kernels."""
    bias = plan.scoring.bias
    places = () if bias is None else tuple(differentiable(bias).index(i) for i in wanted)
    return {"differentiates": True, "wanted": places, "map_by_head": schedule.map_shape[1] > 1}
