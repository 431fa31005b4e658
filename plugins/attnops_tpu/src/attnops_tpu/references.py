"""The references of a kernel, declared once: arrays and their blocks, results and scratch.

A kernel has a NamedTuple with a field for each of its references, beside which the shape is written. A declaration is
an instance of it whose leaves are `Prefetched`, `Input`, `Output` and scratch, such as ``pltpu.VMEM(shape, dtype)``.
`call_kernel` makes the call from it, and gives the kernel an instance whose leaves are the references. What a call does
not have is None, or an empty tuple.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.interpreter import for_a_tpu, interpret_params

if TYPE_CHECKING:
    from attnops.typing import DType, PyTree

References = TypeVar("References")
_LANES: Final = 128


@dataclasses.dataclass(frozen=True)
class Prefetched:
    """An array in scalar memory, complete; index maps are given these too, in the order of their declaration."""

    array: jax.Array


@dataclasses.dataclass(frozen=True)
class Input:
    """An array, and the block of each grid step."""

    array: jax.Array
    spec: pl.BlockSpec
    # What the index map is given after the step, in place of all that is prefetched; None for all.
    by: Prefetched | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """A result, and the block of each grid step."""

    array: jax.ShapeDtypeStruct  # its shape and dtype
    spec: pl.BlockSpec  # its blocks
    # The array in whose place it is written, which it equals where the kernel writes nothing; None for none. The kernel
    # has one reference for both. An `Input` in place of an array is read first: each of its blocks before the output's
    # block that takes its place.
    over: jax.Array | Input | None = None


ANY: Final = pl.BlockSpec(memory_space=pl.ANY)
"""The block of an array that stays in main memory."""


def call_kernel(
    kernel: Callable[[References], None],
    refs: References,
    name: str,
    *,
    grid: tuple[jax.Array | int, ...],
    params: pltpu.CompilerParams,
    interpret: bool,
    cost: pl.CostEstimate | None = None,
) -> Sequence[jax.Array]:
    """The results of a kernel, in the order of their declaration.

    Args:
        kernel: is given a NamedTuple like ``refs``, of references.
        refs: the declaration.
        name: the name of the kernel.
        grid: the grid.
        params: the options of the compiler.
        interpret: whether it runs in Pallas's interpreter.
        cost: the estimate by which the compiler overlaps the kernel with transfers.
    """
    leaves, structure = jax.tree.flatten(refs)
    places: dict[str, list[int]] = {"scalars": [], "inputs": [], "outputs": [], "scratch": []}
    places_of_inputs = {id(x): place for place, x in enumerate(leaves) if isinstance(x, Input)}
    over: dict[int, int] = {}  # the place of the input, by that of the output
    for place, x in enumerate(leaves):
        if isinstance(x, Prefetched):
            places["scalars"].append(place)
        elif isinstance(x, Input):
            places["inputs"].append(place)
        elif isinstance(x, Output):
            places["outputs"].append(place)
            if x.over is not None:
                over[place] = places_of_inputs[id(x.over)] if isinstance(x.over, Input) else place
                places["inputs"] += [place] if over[place] == place else []
        else:
            places["scratch"].append(place)
    # Where a place is both an input and an output, the kernel gets the output's reference.
    order = [place for group in places.values() for place in group]
    scalars, inputs, outputs, scratch = ([leaves[place] for place in group] for group in places.values())

    def body(*given: Any) -> None:
        by_place = dict(zip(order, given, strict=True))
        kernel(jax.tree.unflatten(structure, [by_place[place] for place in range(len(leaves))]))

    def spec_of(x: Input) -> pl.BlockSpec:
        if x.by is None or x.spec.index_map is None:
            return x.spec
        at, index = len(grid) + next(i for i, y in enumerate(scalars) if y is x.by), x.spec.index_map
        return pl.BlockSpec(x.spec.block_shape, lambda *given: index(*given[: len(grid)], given[at]))

    call: Callable[..., Sequence[jax.Array]] = pl.pallas_call(
        body,
        out_shape=[x.array for x in outputs],
        input_output_aliases={
            len(scalars) + places["inputs"].index(over[place]): i
            for i, place in enumerate(places["outputs"]) if place in over
        },
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[ANY if isinstance(x, Output) else spec_of(x) for x in inputs],
            out_specs=[x.spec for x in outputs],
            scratch_shapes=scratch,
        ),
        compiler_params=params,
        cost_estimate=cost,
        interpret=interpret_params(interpret),
        name=name,
    )  # fmt: skip
    # Kernels and index maps have numbers of 32 bits, even where x64 is on: Mosaic has no others.
    arrays = [*(x.array for x in scalars), *(x.over if isinstance(x, Output) else x.array for x in inputs)]
    with jax.enable_x64(False):
        return call(*arrays[:-1], arrays[-1] if interpret else for_a_tpu(arrays[-1]))


def needed(refs: PyTree, sublanes: int = 8) -> int:
    """Bytes of vector memory that a declaration needs: for two buffers of each array's block, and for scratch.

    ``sublanes``: rows of a vector register.
    """
    total = 0
    for x in jax.tree.leaves(refs):
        if isinstance(x, (Input, Output)):
            total += 0 if x.spec.block_shape is None else 2 * _bytes(x.spec.block_shape, x.array.dtype, sublanes)
        elif getattr(x, "memory_space", None) == pltpu.VMEM:
            total += _bytes(x.shape, x.dtype, sublanes)
    return total


def _bytes(shape: Sequence[Any], dtype: DType, sublanes: int) -> int:
    """Bytes of an array, whose last two axes are padded to registers; rows that divide ``sublanes`` are not."""
    *outer, rows, lanes = (1 if n is None else int(getattr(n, "block_size", n)) for n in shape)
    itemsize = jnp.dtype(dtype).itemsize
    of_register = sublanes * 4 // itemsize
    rows = rows if sublanes % rows == 0 else -(-rows // of_register) * of_register
    return math.prod(outer) * rows * -(-lanes // _LANES) * _LANES * itemsize
