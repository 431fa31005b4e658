"""Calls of the flash kernels, and the vector memory that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.references import References, call_kernel, needed

PARALLEL, ARBITRARY = pltpu.GridDimensionSemantics.PARALLEL, pltpu.GridDimensionSemantics.ARBITRARY
# What the compiler may add to blocks and scratch, mostly spilled registers: a share, and at least so many bytes; and a
# tile of each dense mask with 32 bits per element.
_SHARE: Final = 1.1
_LEAST: Final = 8 << 20


def launch(
    plan: FlashPlan, kernel: Callable[[References], None], name: str, refs: References, *,
    grid: tuple[jax.Array | int, ...], cost: pl.CostEstimate | None = None, sequential: bool = False, spilled: int = 0,
) -> Sequence[jax.Array]:  # fmt: skip
    """The results of a kernel, see `attnops_tpu.references.call_kernel` and `compiler_params`."""
    params = compiler_params(plan, len(grid), needed(refs, plan.sublanes), sequential, spilled)
    return call_kernel(kernel, refs, name, grid=grid, params=params, interpret=plan.interpret, cost=cost)


def compiler_params(
    plan: FlashPlan, axes: int, memory: int, sequential: bool = False, spilled: int = 0
) -> pltpu.CompilerParams:
    """For a grid of batch and heads, which are parallel axes unless ``sequential``, and ``axes - 2`` sequential ones.

    Args:
        plan: the plan of the call.
        axes: the number of axes of the grid.
        memory: bytes of blocks and scratch. The limit should be low: what a kernel may use, the program around it
            can't use to keep arrays in vector memory.
        sequential: whether batches and heads must run in order too, on one core.
        spilled: bytes of vector memory for registers that the compiler may spill.
    """
    margin = max(_LEAST, spilled) + 4 * plan.bq * plan.bk * plan.scoring.dense
    return pltpu.CompilerParams(
        dimension_semantics=(*[ARBITRARY if sequential else PARALLEL] * 2, *[ARBITRARY] * (axes - 2)),
        vmem_limit_bytes=min(plan.vmem, int(_SHARE * memory) + margin),
        # Block indices are those of tile schedules, which are checked here; the interpreter checks them too.
        disable_bounds_checks=not plan.bounds_checks,
    )
