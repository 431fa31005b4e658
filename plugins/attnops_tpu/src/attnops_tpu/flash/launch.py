"""Calls of kernels: the grid, the blocks of operands, and the vector memory that these need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.interpreter import interpret_params

if TYPE_CHECKING:
    from attnops.typing import DType, Function

PARALLEL, ARBITRARY = pltpu.GridDimensionSemantics.PARALLEL, pltpu.GridDimensionSemantics.ARBITRARY
# What the compiler may add to blocks and scratch, mostly spilled registers: a share, and at least so many bytes; and a
# tile of each dense mask with 32 bits per element.
_SHARE: Final = 1.1
_LEAST: Final = 8 << 20
_LANES: Final = 128


class Scratch(NamedTuple):
    """A buffer in vector memory that is kept from step to step."""

    shape: tuple[int, ...]
    dtype: DType


class Result(NamedTuple):
    """An output of a kernel, and the block of each grid step."""

    array: jax.ShapeDtypeStruct
    spec: pl.BlockSpec


def launch(
    plan: FlashPlan,
    kernel: Function,
    name: str,
    *,
    grid: tuple[jax.Array | int, ...],
    scalars: Sequence[jax.Array],
    inputs: Iterable[tuple[jax.Array, pl.BlockSpec]],
    results: Sequence[Result],
    scratch: Sequence[Scratch] = (),
    cost: pl.CostEstimate | None = None,
    aliases: Mapping[int, int] | None = None,
    sequential: bool = False,
    spilled: int = 0,
) -> Sequence[jax.Array]:
    """The results of a kernel.

    Args:
        plan: the plan of the call.
        kernel: takes references to ``scalars``, to blocks of ``inputs`` and ``results``, and to ``scratch``.
        name: the name of the kernel.
        grid: batch and heads, and sequential axes.
        scalars: arrays in scalar memory, which index maps are given too.
        inputs: arrays and their blocks.
        results: the outputs.
        scratch: further buffers.
        cost: the estimate by which the compiler overlaps the kernel with transfers.
        aliases: the results, by index, that are written over an input, by index.
        sequential: whether batches and heads must run in order too, on one core.
        spilled: bytes of vector memory for registers that the compiler may spill.
    """
    inputs = list(inputs)
    blocks = [(spec, array.dtype) for array, spec in inputs] + [(spec, array.dtype) for array, spec in results]
    given: Callable[..., Sequence[jax.Array]] = pl.pallas_call(
        kernel,
        out_shape=[result.array for result in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[result.spec for result in results],
            scratch_shapes=[pltpu.VMEM(buffer.shape, jnp.dtype(buffer.dtype)) for buffer in scratch],
        ),
        input_output_aliases={len(scalars) + i: j for i, j in (aliases or {}).items()},
        compiler_params=compiler_params(plan, len(grid), needed(blocks, scratch), sequential, spilled),
        cost_estimate=cost,
        interpret=interpret_params(plan.interpret),
        name=name,
    )
    # Kernels and index maps have numbers of 32 bits, even where x64 is on: Mosaic has no others.
    with jax.enable_x64(False):
        return given(*scalars, *(array for array, _ in inputs))


def compiler_params(
    plan: FlashPlan, axes: int, memory: int, sequential: bool = False, spilled: int = 0
) -> pltpu.CompilerParams:
    """For a grid of batch and heads, which are parallel axes unless ``sequential``, and ``axes - 2`` sequential ones.

    Args:
        plan: the plan of the call.
        axes: the number of axes of the grid.
        memory: bytes of blocks and scratch, from `needed`. The limit should be low: what a kernel may use, the program
            around it can't use to keep arrays in vector memory.
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


def needed(blocks: Iterable[tuple[pl.BlockSpec, DType]], scratch: Iterable[Scratch]) -> int:
    """Bytes of vector memory for the blocks of arrays, of which there are two buffers each, and for scratch."""
    shapes = [(spec.block_shape, dtype) for spec, dtype in blocks if spec.block_shape is not None]
    return 2 * sum(_bytes(*block) for block in shapes) + sum(_bytes(*buffer) for buffer in scratch)


def _bytes(shape: Sequence[Any], dtype: DType) -> int:
    """Bytes of an array, whose last two axes are padded to registers; a single row is not."""
    *outer, rows, lanes = (1 if n is None else int(n) for n in shape)
    itemsize = jnp.dtype(dtype).itemsize
    sublanes = 8 * 4 // itemsize
    rows = rows if rows == 1 else -(-rows // sublanes) * sublanes
    return math.prod(outer) * rows * -(-lanes // _LANES) * _LANES * itemsize
