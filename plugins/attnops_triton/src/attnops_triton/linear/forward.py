"""Linear attention: from the arrays of a call to the kernels and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
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

Named = dict[str, jax.Array]


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> LinearOutput:
    """See `attnops_linear.LinearAttention.forward_native`."""
    return forward_with_states(metadata, query, key, value, keeps=False, **options)[0]


def forward_with_states(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False, keeps: bool = True,
) -> tuple[LinearOutput, Named]:  # fmt: skip
    """The output, and what reverse mode keeps of more than `FEW` tokens, in the dtype of products' operands: the states
    before the N chunks, [B, H, N, D, Dv], and with the delta rule what its systems have as solutions, [B, T, H, Dv].
    """
    plan, given = prepared(metadata, query, key, value, decay, beta, scale, mask)
    if initial_state is not None:
        given["initial"] = initial_state.astype(jnp.float32)
    results = _call(dataclasses.replace(plan, keeps=keeps), given)
    out, state = results.pop("out"), results.pop("state")
    return LinearOutput(out.astype(query.dtype), state if return_state else None), results


def prepared(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None,
    beta: jax.Array | None, scale: float | None, mask: Any,
) -> tuple[LinearPlan, Named]:  # fmt: skip
    """The plan of a call, and its arrays by their names in `Arrays`, whose first axis is B, or 1."""
    is_token, starts = (None, None) if mask is None else mask
    dtype = jnp.result_type(query, key, value)
    plan = make_plan(
        metadata, query, value, dtype.name, decay, scale, resets=starts is not None, pads=is_token is not None
    )
    given = {name: x.astype(plan.stored) for name, x in (("query", query), ("key", key), ("value", value))}
    given |= {name: x.astype(jnp.float32) for name, x in (("decay", decay), ("beta", beta)) if x is not None}
    if mask is not None:
        flags = jnp.zeros(query.shape[:2], jnp.int8) if starts is None else starts.astype(jnp.int8)
        given["flags"] = flags if is_token is None else jnp.where(is_token, flags, jnp.int8(2))
    if plan.decay == "constant":  # of no row
        given["decay"] = given["decay"][None]
    return plan, given


@folds_batch
def _call(plan: LinearPlan, given: Named) -> Named:
    """The outputs [B, T, H, Dv], the last state [B, H, D, Dv] and, if it is kept, what reverse mode keeps."""
    plan, given = of_rows(plan, given)
    B, H, T = plan.B, plan.H, plan.length
    N, columns = cdiv(T, plan.tiles.C), cdiv(plan.Dv, plan.tiles.columns)
    outputs = {
        "out": jax.ShapeDtypeStruct((B, T, H, plan.Dv), jnp.float32 if plan.interpret else plan.out_dtype),
        "state": jax.ShapeDtypeStruct((B, H, plan.D, plan.Dv), jnp.float32),
    }
    if plan.keeps:
        outputs["states"] = jax.ShapeDtypeStruct((B, H, N, plan.D, plan.Dv), plan.stored)
        if "beta" in given:
            outputs["solved"] = jax.ShapeDtypeStruct((B, T, H, plan.Dv), plan.stored)
    sizes = Sizes(T, N, columns)
    if not plan.T:
        given = some(given, ("query", "key", "value", "flags", "initial")) | scores(plan, given)
    function = attnops_linear_tokens if plan.T else attnops_linear_chunks
    return launch(plan, plan.tiles, function, given, outputs, B * H * columns, sizes)


def of_rows(plan: LinearPlan, given: Named) -> tuple[LinearPlan, Named]:
    """Arrays with the rows of the batch, and their plan.

    An array of constant decays keeps its single row, unless slices of a `jax.vmap` have other ones.
    """
    B = plan.B
    if plan.decay == "constant" and given["decay"].shape[0] > 1:
        rows = jnp.repeat(given["decay"], B // given["decay"].shape[0], axis=0)[:, None]
        given = given | {"decay": jnp.broadcast_to(rows, (B, plan.length, plan.H))}
        plan = dataclasses.replace(plan, decay="head")
    return plan, {
        name: x if name == "decay" and plan.decay == "constant" else jnp.broadcast_to(x, (B, *x.shape[1:]))
        for name, x in given.items()
    }


def scores(plan: LinearPlan, given: Named) -> Named:
    """What chunks compute without a state."""
    B, H, T, C = plan.B, plan.H, plan.length, plan.tiles.C
    N, wide = cdiv(T, C), jnp.float32 if plan.parts > 1 else plan.stored
    squares = {"scores": wide if plan.backward else plan.stored} | ({"inverse": wide} if "beta" in given else {})
    found = {name: jax.ShapeDtypeStruct((B, H, N, C, C), x) for name, x in squares.items()}
    if plan.gated or "beta" in given:
        found["gates"] = jax.ShapeDtypeStruct((B, H, N, plan.gates, C), jnp.float32)
    given = some(given, ("query", "key", "decay", "beta", "flags"))
    return launch(plan, plan.scores, attnops_linear_scores, given, found, B * H * N, Sizes(T, N, 1))


def some(given: Named, names: Iterable[str]) -> Named:
    """Those of the arrays that have these names."""
    return {name: given[name] for name in names if name in given}


def launch(
    plan: LinearPlan, tiles: LinearTiles, function: Any, given: Named, outputs: dict[str, jax.ShapeDtypeStruct],
    programs: int, sizes: Sizes,
) -> Named:  # fmt: skip
    """The outputs of a kernel by name; a given first state is updated in place."""
    if not all(0 <= x < 1 << 31 for x in (*sizes, programs)):
        raise ValueError(f"{sizes._asdict() | {'programs': programs}} must be integers of 32 bits")
    named = {name: name for name in Arrays._fields if name in given or name in outputs}
    kernel = KernelFunction(function, Arrays(**named), Sizes(*Sizes._fields), plan.options(tiles))
    operands = [Operand(name, given[name]) for name in kernel.pointers if name in given]
    found = {name: outputs[name] for name in kernel.pointers if name in outputs}
    aliases = {"state": "initial"} if "initial" in given and "state" in outputs else {}
    return launch_any(plan, tiles, kernel, tuple(sizes), operands, found, programs, frozenset(), aliases)
