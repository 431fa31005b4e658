"""Run a kernel: compiled for a GPU, or interpreted on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp

from attnops.kernels import TraceContext, equally_varying
from attnops_triton.caches.plan import CachePlan, CacheTileSizes
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.language.build import Recipe
from attnops_triton.language.source import KernelFunction
from attnops_triton.linear.plan import LinearPlan, LinearTiles

if TYPE_CHECKING:
    from attnops.typing import Array, Function, PyTree

AnyPlan: TypeAlias = FlashPlan | CachePlan | LinearPlan
AnyTiles: TypeAlias = TileSizes | CacheTileSizes | LinearTiles

# Part of the key of JAX's cache of traced functions, so that functions are traced again for each recording.
_RECORD: TraceContext[Recording | None] = TraceContext("attnops-triton:recording", None)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel and its launch parameters.

    Attributes:
        recipe: the recipe of its program.
        integers: the integer arguments.
        tiles: tile sizes, warps and stages.
        plan: the plan of the call.
        programs: the size of the grid.
    """

    recipe: Recipe
    integers: tuple[int, ...]
    tiles: AnyTiles
    plan: AnyPlan
    programs: int


@dataclasses.dataclass(eq=False)
class Recording:
    """The launches inside a `recording` context; hashed by identity."""

    launched: list[Launched] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def recording() -> Iterator[list[Launched]]:
    """A context in which kernels are listed instead of run, and return zeros."""
    record = Recording()
    with _RECORD(record):
        yield record.launched


def is_recording() -> bool:
    """Whether launches are listed, so that kernels may be compiled, but do not run."""
    return _RECORD.value is not None


def launch_any(
    plan: AnyPlan, tiles: AnyTiles, kernel: KernelFunction, integers: tuple[int, ...], operands: list[Operand],
    outputs: Mapping[str, jax.ShapeDtypeStruct], programs: int, divisible: frozenset[str],
    aliases: Mapping[str, str] = MappingProxyType({}), stored: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, jax.Array]:  # fmt: skip
    """Run a kernel.

    Args:
        plan: the plan of the call.
        tiles: warps and stages.
        kernel: the kernel.
        integers: its integer arguments.
        operands: the inputs, in the order of its pointers.
        outputs: shapes and dtypes of the outputs, in the order of its pointers.
        programs: the size of the grid.
        divisible: the integer arguments that the program may rely on to be multiples of 16.
        aliases: by output that is written in place of an operand, the operand's name.
        stored: by operand or output that holds floats as integers with the same bits, the floats' dtype.
    """
    from attnops_triton.language.call import triton_call
    from attnops_triton.language.interpreter import interpreted

    arrays, shapes = [operand.array for operand in operands], tuple(outputs.values())
    names = [*(operand.name for operand in operands), *outputs]
    dtypes = tuple(stored.get(name, x.dtype.name) for name, x in zip(names, (*arrays, *shapes), strict=True))
    recipe = Recipe(kernel, dtypes, divisible, tiles.warps, tiles.stages, plan.arch, tiles.registers)
    pairs = tuple((names.index(source), list(outputs).index(name)) for name, source in aliases.items())
    record = _RECORD.value
    if record is not None:
        record.launched.append(Launched(recipe, integers, tiles, plan, programs))
        zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        return dict(zip(outputs, _varying_like(zeros, arrays), strict=True))
    run: Function
    if plan.interpret:
        jax.monitoring.record_event("/attnops/kernel/interpreted")
        run = functools.partial(interpreted, kernel, integers, shapes, programs, dtypes, aliases=pairs)
    else:
        run = functools.partial(triton_call, recipe, integers, shapes, programs, aliases=pairs)
    return dict(zip(outputs, _varying_like(run(*arrays), arrays), strict=True))


def _varying_like(results: PyTree, arrays: list[Array]) -> list[jax.Array]:
    """The results, varying over the same mesh axes as the arrays, as `jax.shard_map` requires."""
    *varying, _ = equally_varying((*results, tuple(arrays)))
    return varying
