"""The backward kernels: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Both recompute the weights from the logsumexp (Dao 2023, arXiv:2307.08691). They use no atomics and add in a fixed
order, except `fused`. They also compute the gradients of the values of an elementwise bias per query, key or head.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.blackwell import backward as blackwell
from attnops_triton.flash.loops import place_by_key, place_by_query, schedule_operands, tile_loops
from attnops_triton.flash.operands import Arrays, Operand, base, score_operands
from attnops_triton.flash.partitioned import launch_partitioned
from attnops_triton.flash.plan import LOG2E, FlashPlan, cdiv
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import TileWriter, dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.flash.tile_sizes import known
from attnops_triton.language.launch import launch
from attnops_triton.language.source import SourceWriter, number
from attnops_triton.targets import TENSOR_MEMORY


class Inputs(NamedTuple):
    """The arrays of the backward pass.

    Attributes:
        q: [B, T, H, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        d_out: [B, T, H, Dv].
        m: [B, H, T] float32, the largest score, as the forward pass returns it; +inf for fully masked queries, whose
            weights are then 0.
        log2_sum: [B, H, T], log2 of the sum of exponentials relative to ``m``.
        delta: [B, H, T], ``d_out · out − d_lse``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    m: jax.Array
    log2_sum: jax.Array
    delta: jax.Array


def input_operands(plan: FlashPlan, inputs: Inputs, arrays: Arrays) -> list[Operand]:
    """The operands for `Inputs` and for the other inputs of the scores."""
    return [Operand(name, x) for name, x in zip(Inputs._fields, inputs, strict=True)] + score_operands(plan, arrays)


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
    dq, *d_values = _by_query(plan, inputs, arrays, schedule, wanted)
    return dq, dict(zip(wanted, d_values, strict=True))


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
    dk, dv, *d_values = _by_key(plan, inputs, arrays, schedule, wanted)
    return dk, dv, dict(zip(wanted, d_values, strict=True))


def _by_query(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    @folds_batch
    def run(plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule) -> tuple[jax.Array, ...]:
        operands = [*input_operands(plan, inputs, arrays), *schedule_operands(schedule)]
        outputs = {"dq": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.D), jnp.dtype(plan.gradient_dtype))}
        outputs |= {f"dq_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32) for i in wanted}
        write: SourceWriter
        if plan.by_query.specialised and plan.arch not in TENSOR_MEMORY:
            from attnops_triton.flash.hopper.by_query import attnops_flash_backward_query
            from attnops_triton.flash.hopper.options import HopperOptions, make_options

            options = make_options(HopperOptions, plan, plan.by_query, operands, schedule)
            results = launch_partitioned(
                plan, plan.by_query, attnops_flash_backward_query, options, operands, schedule, outputs,
                4 + options.stores_by_map,
            )  # fmt: skip
            return tuple(results.values())
        if plan.by_query.specialised:
            module = blackwell
            partitioned, programs = module.write_by_query(plan, operands, schedule)
            outputs["scratch"] = partitioned.scratch(programs)
            write = partitioned
        else:
            write, programs = _write_by_query(plan, operands, schedule, wanted)
        results = launch(plan, plan.by_query, write, "attnops_flash_backward_query", operands, outputs, programs)
        results.pop("scratch", None)
        return tuple(results.values())

    return run(plan, inputs, arrays, schedule)


def _by_key(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    @folds_batch
    def run(plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule) -> tuple[jax.Array, ...]:
        results = _run_by_key(plan, inputs, arrays, schedule, wanted)
        return tuple(results.values())

    return run(plan, inputs, arrays, schedule)


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
    operands = [*input_operands(plan, inputs, arrays), *schedule_operands(schedule), *before]
    padded = cdiv(plan.T, plan.by_key.bq) * plan.by_key.bq
    if plan.by_key.specialised:
        lse = inputs.m * (plan.score_unit * LOG2E) + inputs.log2_sum
        # With a logsumexp of inf the weights of queries beyond the last one are 0.
        ends = [jnp.pad(x, ((0, 0), (0, 0), (0, padded - plan.T)), constant_values=value)
                for x, value in ((lse, jnp.inf), (inputs.delta, 0.0))]  # fmt: skip
        others = [x for x in operands if x.name not in ("m", "log2_sum", "delta")]
        operands = [*others, Operand("statistics", jnp.stack(ends, axis=2))]
    heads, dtype = (plan.H, "float32") if plan.splits_groups else (plan.K, plan.gradient_dtype)
    shapes = {"dk": (plan.B, plan.S, heads, plan.D), "dv": (plan.B, plan.S, heads, plan.Dv)}
    outputs = added | {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}
    outputs |= {f"dk_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.S), jnp.float32) for i in wanted}
    aliases = dict(zip(added, (x.name for x in before), strict=True))
    write: SourceWriter
    results = None
    if plan.by_key.specialised and plan.arch not in TENSOR_MEMORY:
        from attnops_triton.flash.hopper import by_key
        from attnops_triton.flash.hopper.options import HopperOptions, make_options

        options = make_options(HopperOptions, plan, plan.by_key, operands, schedule, True, fuses_dq=bool(added))
        maps = 5 + 2 * options.stores_by_map + options.fuses_dq * (2 - options.slices_keys)
        function = by_key.attnops_flash_backward if added else by_key.attnops_flash_backward_key
        results = launch_partitioned(
            plan, plan.by_key, function, options, operands, schedule, outputs, maps, padded, aliases
        )
    elif plan.by_key.specialised:
        module = blackwell
        partitioned, programs = module.write_by_key(plan, operands, schedule, padded)
        outputs["scratch"] = partitioned.scratch(programs)
        write = partitioned
    else:
        write, programs = _write_by_key(plan, operands, schedule, wanted)
    name = "attnops_flash_backward" if added else "attnops_flash_backward_key"
    if results is None:
        results = launch(plan, plan.by_key, write, name, operands, outputs, programs, aliases)
    results.pop("scratch", None)
    if plan.splits_groups:
        for name, shape in shapes.items():
            summed = results[name].reshape(plan.B, plan.S, plan.K, plan.G, shape[-1]).sum(axis=3)
            results[name] = summed.astype(plan.gradient_dtype)
    return results


def _write_by_query(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[SourceWriter, int]:
    write = SourceWriter()
    bq, bk, scoring = plan.by_query.bq, plan.by_query.bk, plan.scoring
    tile = TileWriter.make(write, plan, plan.by_query, operands)
    ragged = not tile.even
    programs = place_by_query(write, plan, bq)
    write(f"q0 = row * {bq}")
    tile.queries()
    tile.load("q", "q", plan.H, "h", plan.D, ragged)
    tile.load("d_out", "q", plan.H, "h", plan.Dv, ragged)
    tile.load_values("", False)
    tile.load_values("q", ragged)
    tile.load_statistics(ragged)
    for i, (_, width) in enumerate(plan.chunks(plan.D)):
        write(f"dq_{i} = tl.full([{bq}, {width}], 0.0, tl.float32)")
    for i in wanted:
        write(f"dq_bias{i} = tl.full([{bq}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and not tile.even
        tile.keys()
        tile.load("k", "kv", plan.K, "k", plan.D, edge)
        tile.load_values("kv", edge)
        tile.product("s", "q", "k", plan.D)
        tile.load("v", "kv", plan.K, "k", plan.Dv, edge)
        tile.product("dp", "d_out", "v", plan.Dv)
        has_ok = recompute_weights(tile, masked, edge)
        if scoring.dropout_prob:
            tile.dropout()
        score_gradients(tile, has_ok)
        tile.cap_and_bias_vjp()
        for i in wanted:
            write(f"dq_bias{i} += tl.reduce(d_bias{i}, 1, total)")
        if has_ok:
            tile.zero_masked_tokens("kv", *(f"k_{i}" for i in range(len(plan.chunks(plan.D)))))
        write(f"ds = ds.to({dtype(plan)})")
        for i in range(len(plan.chunks(plan.D))):
            tile.dot(f"dq_{i}", "ds", f"k_{i}", add=True)

    tile_loops(write, schedule, "kv0", bk, tile.even, body)
    for i in range(len(plan.chunks(plan.D))):
        write(f"dq_{i} = dq_{i} * {number(float(plan.scale))}")
    tile.store("dq", "dq", "q", plan.H, "h", plan.D, f"tl.{plan.gradient_dtype}")
    for i in wanted:
        masked = ", mask=qi < T" if ragged else ""
        write(f"tl.store({base(write, f'dq_bias{i}', '', plan.H, 'T')} + qi, dq_bias{i}{masked})")
    return write, programs


def _write_by_key(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, wanted: tuple[int, ...]
) -> tuple[SourceWriter, int]:
    write = SourceWriter()
    bq, bk, scoring = plan.by_key.bq, plan.by_key.bk, plan.scoring
    tile = TileWriter.make(write, plan, plan.by_key, operands, transposed=True)
    ragged = not tile.even
    programs = place_by_key(write, plan, bk)
    write(f"kv0 = row * {bk}")
    tile.keys()
    tile.load("k", "kv", plan.K, "k", plan.D, ragged)
    tile.load("v", "kv", plan.K, "k", plan.Dv, ragged)
    for name, dim in (("dk", plan.D), ("dv", plan.Dv)):
        for i, (_, width) in enumerate(plan.chunks(dim)):
            write(f"{name}_{i} = tl.full([{bk}, {width}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and not tile.even
        tile.queries()
        tile.load("q", "q", plan.H, "h", plan.D, edge)
        tile.load_values("q", edge)
        tile.product("s", "q", "k", plan.D)
        # Loaded where they are used, which saves registers. The pipeline still fetches them a tile ahead.
        tile.load_statistics(edge, ("m", "log2_sum"))
        has_ok = recompute_weights(tile, masked, scoring.has_fully_masked_tokens)
        tile.load("d_out", "q", plan.H, "h", plan.Dv, edge)
        if has_ok:
            names = [f"q_{i}" for i in range(len(plan.chunks(plan.D)))]
            tile.zero_masked_tokens("q", *names, *(f"d_out_{i}" for i in range(len(plan.chunks(plan.Dv)))))
        weights = "p"
        if scoring.dropout_prob:
            tile.dropout()
            write(f"p_kept = tl.where(keep, p * {number(1 / (1 - scoring.dropout_prob))}, 0.0)")
            weights = "p_kept"
        write(f"weights = {weights}.to({dtype(plan)})")
        for i in range(len(plan.chunks(plan.Dv))):
            tile.dot(f"dv_{i}", "weights", f"d_out_{i}", add=True)
        tile.product("dp", "d_out", "v", plan.Dv)
        tile.load_statistics(edge, ("delta",))
        score_gradients(tile, has_ok)
        tile.cap_and_bias_vjp()
        for i in wanted:
            write(f"dk_bias{i} += tl.reduce(d_bias{i}, 1, total)")
        write(f"ds = ds.to({dtype(plan)})")
        for i in range(len(plan.chunks(plan.D))):
            tile.dot(f"dk_{i}", "ds", f"q_{i}", add=True)

    split = plan.splits_groups
    # One loop over both heads and tiles costs 2 to 4 % more instructions. It is used where nested loops would spill
    # registers between heads: with sums in tensor memory, and with a separate loop over PARTIAL tiles.
    has_two_loops = ragged or schedule.constant is None
    spills = plan.arch in TENSOR_MEMORY or (known(plan.arch) in ("sm_80", "gfx942") and has_two_loops)
    heads_are_alike = schedule.map_shape[1] == 1 and not wanted and not tile.has_values_by_head
    flat = spills and plan.G > 1 and not split and heads_are_alike
    with contextlib.nullcontext() if split or flat else write.block(f"for g in range(0, {plan.G}):"):
        if not split and not flat:
            write(f"h = k * {plan.G} + g")
        tile.load_values("", False)
        tile.load_values("kv", ragged)
        for i in wanted:
            write(f"dk_bias{i} = tl.full([{bk}], 0.0, tl.float32)")
        tile_loops(write, schedule, "q0", bq, tile.even, body, plan.G if flat else 0)
        for i in wanted:
            masked = ", mask=ki < S" if ragged else ""
            write(f"tl.store({base(write, f'dk_bias{i}', '', plan.H, 'S')} + ki, dk_bias{i}{masked})")
    for i in range(len(plan.chunks(plan.D))):
        write(f"dk_{i} = dk_{i} * {number(float(plan.scale))}")
    heads_and_index = (plan.H, "h") if split else (plan.K, "k")
    dtype_of_sums = "tl.float32" if split else f"tl.{plan.gradient_dtype}"
    tile.store("dk", "dk", "kv", *heads_and_index, plan.D, dtype_of_sums)
    tile.store("dv", "dv", "kv", *heads_and_index, plan.Dv, dtype_of_sums)
    return write, programs
