"""Linear attention: from the arrays of a call to the kernels and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attnops import OperationMetadata
from attnops.kernels import folds_batch
from attnops_linear import LinearOutput
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import cdiv
from attnops_triton.language.launch import launch_any
from attnops_triton.language.source import KernelFunction
from attnops_triton.linear.kernels.parts import Arrays, Sizes
from attnops_triton.linear.kernels.scores import attnops_linear_scores
from attnops_triton.linear.kernels.states import attnops_linear_chunks, attnops_linear_tokens
from attnops_triton.linear.plan import LinearPlan, LinearTiles, make_plan


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False,
) -> LinearOutput:  # fmt: skip
    """See `attnops_linear.LinearAttention.forward_native`."""
    is_token, starts = (None, None) if mask is None else mask
    dtype = jnp.result_type(query, key, value)
    plan = make_plan(
        metadata, query, value, dtype.name, decay, scale, resets=starts is not None, pads=is_token is not None
    )
    # The interpreter has no bfloat16.
    stored = jnp.float32 if plan.emulated else dtype
    given = {name: x.astype(stored) for name, x in (("query", query), ("key", key), ("value", value))}
    given |= {
        name: x.astype(jnp.float32)
        for name, x in (("decay", decay), ("beta", beta), ("initial", initial_state))
        if x is not None
    }
    if mask is not None:
        flags = jnp.zeros(query.shape[:2], jnp.int8) if starts is None else starts.astype(jnp.int8)
        given["flags"] = flags if is_token is None else jnp.where(is_token, flags, jnp.int8(2))
    if plan.decay == "constant":  # of no row
        given["decay"] = given["decay"][None]
    outputs, state = _call(plan, given)
    return LinearOutput(outputs.astype(query.dtype), state if return_state else None)


@folds_batch
def _call(plan: LinearPlan, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The outputs [B, T, H, Dv] and the last state [B, H, D, Dv], of arrays whose first axis is B, or 1."""
    B, H, T, C = plan.B, plan.H, plan.length, plan.tiles.C
    # An array of constant decays keeps its single row, unless slices of a `jax.vmap` have other ones.
    if plan.decay == "constant" and given["decay"].shape[0] > 1:
        decay = jnp.broadcast_to(jnp.repeat(given["decay"], B // given["decay"].shape[0], axis=0)[:, None], (B, T, H))
        plan, given = dataclasses.replace(plan, decay="head"), given | {"decay": decay}
    given = {
        name: x if name == "decay" and plan.decay == "constant" else jnp.broadcast_to(x, (B, *x.shape[1:]))
        for name, x in given.items()
    }
    N, columns = cdiv(T, C), cdiv(plan.Dv, plan.tiles.columns)
    stored = given["query"].dtype
    outputs = {
        "out": jax.ShapeDtypeStruct((B, T, H, plan.Dv), jnp.float32 if plan.interpret else plan.out_dtype),
        "state": jax.ShapeDtypeStruct((B, H, plan.D, plan.Dv), jnp.float32),
    }
    sizes = Sizes(T, N, columns)
    if not plan.T:
        wide = jnp.float32 if plan.parts > 1 else stored
        squares = {"scores": stored} | ({"inverse": wide} if "beta" in given else {})
        found = {name: jax.ShapeDtypeStruct((B, H, N, C, C), x) for name, x in squares.items()}
        if plan.gated:
            found["gates"] = jax.ShapeDtypeStruct((B, H, N, 2, C), jnp.float32)
        names = ("query", "key", "decay", "beta", "flags")
        some = {name: given[name] for name in names if name in given}
        some = _launch(plan, plan.scores, attnops_linear_scores, some, found, B * H * N, sizes)
        names = ("query", "key", "value", "flags", "initial")
        given = {name: given[name] for name in names if name in given} | some
    function = attnops_linear_tokens if plan.T else attnops_linear_chunks
    results = _launch(plan, plan.tiles, function, given, outputs, B * H * columns, sizes)
    return results["out"], results["state"]


def _launch(
    plan: LinearPlan, tiles: LinearTiles, function: Any, given: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct], programs: int, sizes: Sizes,
) -> dict[str, jax.Array]:  # fmt: skip
    """The outputs of a kernel by name; a given first state is updated in place."""
    if not all(0 <= x < 1 << 31 for x in (*sizes, programs)):
        raise ValueError(f"{sizes._asdict() | {'programs': programs}} must be integers of 32 bits")
    named = {name: name for name in Arrays._fields if name in given or name in outputs}
    kernel = KernelFunction(function, Arrays(**named), Sizes(*Sizes._fields), plan.options(tiles))
    operands = [Operand(name, given[name]) for name in kernel.pointers if name in given]
    found = {name: outputs[name] for name in kernel.pointers if name in outputs}
    aliases = {"state": "initial"} if "initial" in given and "state" in outputs else {}
    return launch_any(plan, tiles, kernel, tuple(sizes), operands, found, programs, frozenset(), aliases)
