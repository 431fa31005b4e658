"""From a kernel's text to its results: compiled and launched by jax-triton, or interpreted on the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from attnops.operations.varying import equally_varying
from attnops_triton.operands import Operand
from attnops_triton.plan import Plan, Tiles
from attnops_triton.source import Writer


def launch(
    plan: Plan, tiles: Tiles, write: Writer, name: str, operands: list[Operand],
    outputs: Mapping[str, jax.ShapeDtypeStruct], programs: int,
) -> dict[str, jax.Array]:  # fmt: skip
    """Run a kernel.

    Args:
        plan: of the call.
        tiles: warps and stages.
        write: the kernel's lines.
        name: the kernel's.
        operands: what it is given, by parameter.
        outputs: what it writes, by parameter.
        programs: the size of the grid.
    """
    from attnops_triton.compat import jit, triton_call
    from attnops_triton.interpreter import interpreted

    kernel = write.kernel(name, [f"{x}_ptr" for x in (*(o.name for o in operands), *outputs)])
    arrays, shapes = [operand.array for operand in operands], tuple(outputs.values())
    run: Any
    if plan.interpret:
        run = functools.partial(interpreted, kernel, shapes, programs)
    else:
        run = functools.partial(
            triton_call, jit(kernel), shapes, programs, name, tiles.warps, tiles.stages, capability(plan.arch)
        )
    return dict(zip(outputs, _varying_like(run(*arrays), arrays), strict=True))


def capability(arch: str) -> int | None:
    """The compute capability that jax-triton is told; None for that of the device at hand."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else None


def _varying_like(results: Any, arrays: list[Any]) -> list[Any]:
    """The results, varying over the mesh axes that the arrays vary over: inside `jax.shard_map` nothing else says so."""
    *found, _ = equally_varying((*results, tuple(arrays)))
    return found
