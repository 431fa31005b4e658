"""Launches of kernels with partitions of warps (`attnops_triton.flash.hopper`, `attnops_triton.flash.blackwell`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from attnops_triton.flash.loops import programs_by_key, programs_by_query
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.flash.sizes import divisible
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.launch import launch_any
from attnops_triton.language.source import KernelFunction

_MAP = 128  # bytes of a tensor map


def launch_partitioned(
    plan: FlashPlan, tiles: TileSizes, function: Any, options: Any, operands: list[Operand], schedule: TileSchedule,
    outputs: Mapping[str, jax.ShapeDtypeStruct], maps: int, padded: int = 0,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, jax.Array]:  # fmt: skip
    """The outputs of a kernel by name.

    Args:
        plan: the plan of the call.
        tiles: the tiles of the kernel.
        function: the kernel.
        options: its options.
        operands: the inputs.
        schedule: the active tiles.
        outputs: shapes and dtypes of the outputs.
        maps: the number of tensor maps that a program creates.
        padded: queries of padded statistics.
        aliases: by output that is written in place of an operand, the operand's name.
    """
    from attnops_triton.flash.kernels.parameters import Sizes, grouped

    place = programs_by_key(plan, tiles.bk) if options.transposed else programs_by_query(plan, tiles.bq)
    programs = place["rows"] * place["heads"]
    sizes = {"T": plan.T, "S": plan.S, "inner": plan.inner, **place}
    sizes["batched"] = sum((o.array.shape[0] > 1) << i for i, o in enumerate(operands))
    if schedule.constant is None:
        sizes["map_batch"] = schedule.map_shape[1] * (schedule.map_shape[0] > 1)
        if schedule.columns is not None:
            sizes["width"] = schedule.width
    else:
        names = ("full_start", "full_stop", "partial_start", "partial_stop")
        sizes |= zip(names, schedule.constant, strict=True)
    if padded:
        sizes |= {"padded": padded, "statistics_rows": plan.B * plan.H * 2}
    scratch = maps * _MAP
    given = {o.name: o for o in operands}
    outputs = {**outputs, "scratch": jax.ShapeDtypeStruct((programs * scratch,), jnp.int8)}
    names = Sizes(**{name: name if name in sizes else None for name in Sizes._fields})
    arrays = grouped([(name, name) for name in (*given, *outputs)])
    kernel = KernelFunction(function, arrays, names, options, scratch)
    results = launch_any(
        plan, tiles, kernel, tuple(sizes[name] for name in kernel.integers),
        [given[name] for name in kernel.pointers if name in given],
        {name: outputs[name] for name in kernel.pointers if name in outputs},
        programs, divisible(plan, tiles), aliases,
    )  # fmt: skip
    return {name: x for name, x in results.items() if name != "scratch"}
