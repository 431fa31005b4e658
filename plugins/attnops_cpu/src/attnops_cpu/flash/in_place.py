"""Attention of few queries by the kernel over caches, if it is not differentiated.

It packs nothing: packing would cost more than the products of few queries. Its scores are rounded differently from the
scores of a backward pass; if the call is differentiated, a forward pass with the same rounding runs instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from attnops import OperationOutput
from attnops.kernels import FlashCall
from attnops_cpu.flash.backend import CpuFlash
from attnops_cpu.flash.plan import CpuPlan


class InPlaceFlash(CpuFlash):
    """`CpuFlash` whose forward pass reads keys and values in place."""

    def plan(self, call: FlashCall) -> CpuPlan:
        return dataclasses.replace(super().plan(call), in_place=True)


def unless_differentiated(
    function: Callable[..., OperationOutput], differentiated: Callable[..., OperationOutput], *args: Any, **options: Any
) -> OperationOutput:
    """``function(*args, **options)``; if it is differentiated, the result of ``differentiated`` and its tangents."""
    leaves, tree = jax.tree.flatten((args, options))
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return function(*args, **options)
    indices = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def call(run: Callable[..., OperationOutput], arrays: dict[int, Any]) -> OperationOutput:
        args, options = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return run(*args, **options)

    @jax.custom_jvp
    def run(*arrays: jax.Array) -> OperationOutput:
        return call(function, dict(zip(indices, arrays, strict=True)))

    def rule(given: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[OperationOutput, OperationOutput]:
        arrays, moving = dict(zip(indices, given, strict=True)), dict(zip(indices, tangents, strict=True))
        moving = {i: t for i, t in moving.items() if not isinstance(t, SymbolicZero)}

        def of_moving(*values: jax.Array) -> OperationOutput:
            return call(differentiated, arrays | dict(zip(moving, values, strict=True)))

        output, tangent = jax.jvp(of_moving, [arrays[i] for i in moving], [*moving.values()])
        return output, tangent

    run.defjvp(rule, symbolic_zeros=True)
    return run(*(leaves[i] for i in indices))
