"""Run a flash kernel: the sizes that it is called with, its options, and the order of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from attnops_triton.flash.kernels.parameters import Sizes, grouped, options_of
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes, cdiv
from attnops_triton.flash.sizes import divisible
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.launch import launch_any
from attnops_triton.language.source import KernelFunction

# Bytes of keys and values that neighbouring programs read together, so that they stay in the L2 cache.
_CACHE = 24 << 20


def launch(
    plan: FlashPlan, tiles: TileSizes, function: Any, operands: list[Operand],
    outputs: Mapping[str, jax.ShapeDtypeStruct], programs: int, sizes: Mapping[str, int],
    aliases: Mapping[str, str] = MappingProxyType({}), **options: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """The outputs of a kernel by name.

    Args:
        plan: the plan of the call.
        tiles: the tile sizes of the kernel.
        function: a function of `attnops_triton.flash.kernels`, `attnops_triton.flash.hopper` or
            `attnops_triton.flash.blackwell`.
        operands: the inputs.
        outputs: shapes and dtypes of the outputs.
        programs: the size of the grid.
        sizes: its integers, besides lengths and the batches of arrays.
        aliases: by output that is written in place of an operand, the operand's name.
        options: those of `attnops_triton.flash.kernels.parameters.options_of`.
    """
    batched = sum((x.array.shape[0] > 1) << i for i, x in enumerate(operands))
    sizes = {"T": plan.T, "S": plan.S, "batched": batched, **sizes}
    if plan.scoring.mask is not None or plan.scoring.has_cap_or_bias:
        sizes["inner"] = plan.inner
    if not all(0 <= value < 1 << 31 for value in sizes.values()):
        raise ValueError(f"{sizes} must be integers of 32 bits")
    every = (*(x.name for x in operands), *outputs)
    names, given = grouped([(name, name) for name in every]), options_of(plan, tiles, operands, **options)
    blocks = tuple((name, block) for name in every if (block := given.block(name)) is not None)
    kernel = KernelFunction(function, names, Sizes(**{name: name for name in sizes}), given, blocks)
    arrays = {x.name: x for x in operands}
    ordered = [arrays[name] for name in kernel.pointers if name in arrays]
    shapes = {name: outputs[name] for name in kernel.pointers if name in outputs}
    integers = tuple(sizes[name] for name in kernel.integers)
    return launch_any(plan, tiles, kernel, integers, ordered, shapes, programs, divisible(plan, tiles), aliases)


def sizes_by_query(plan: FlashPlan, tiles: TileSizes) -> tuple[dict[str, int], int]:
    """The sizes that place a program for each tile of queries, and the number of programs.

    Programs of as many heads as fit the L2 cache are neighbours, and so are those of the query heads of a kv head.
    """
    per_head = plan.S * (plan.D + plan.Dv) * plan.itemsize
    return _sizes(cdiv(plan.T, tiles.bq), plan.B * plan.H, max(1, _CACHE // per_head) * plan.G)


def sizes_by_key(plan: FlashPlan, tiles: TileSizes) -> tuple[dict[str, int], int]:
    """The sizes that place a program for each tile of keys, and the number of programs."""
    rows = cdiv(plan.S, tiles.bk)
    if plan.splits_groups:
        return _sizes(rows, plan.B * plan.H, plan.B * plan.H)
    per_head = plan.T * plan.G * (plan.D + plan.Dv) * plan.itemsize
    return _sizes(rows, plan.B * plan.K, max(1, _CACHE // per_head))


def _sizes(rows: int, heads: int, together: int) -> tuple[dict[str, int], int]:
    return {"rows": rows, "heads": heads, "together": min(together, heads)}, rows * heads


def schedule_sizes(schedule: TileSchedule) -> dict[str, int]:
    """The sizes that find a row's tiles."""
    if schedule.constant is not None:
        names = ("full_start", "full_stop", "partial_start", "partial_stop")
        return dict(zip(names, schedule.constant, strict=True))
    batches, heads = schedule.map_shape
    return {"rows": schedule.rows, "map_batch": heads * (batches > 1), "width": schedule.width}


def schedule_operands(schedule: TileSchedule) -> list[Operand]:
    """The arrays that find a row's tiles."""
    named = [(name, getattr(schedule, name)) for name in ("ranges", "columns", "words", "first")]
    return [Operand(name, array) for name, array in named if array is not None]
