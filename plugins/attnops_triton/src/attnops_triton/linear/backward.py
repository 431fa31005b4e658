"""Reverse mode of linear attention: from the gradients of a call's results to the kernels and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attnops import OperationMetadata
from attnops.kernels import folds_batch
from attnops_linear import LinearOutput
from attnops_triton.flash.plan import cdiv
from attnops_triton.linear.forward import Named, launch, of_rows, prepared, scores, some
from attnops_triton.linear.kernels.gradients import attnops_linear_chunks_backward, attnops_linear_gradients
from attnops_triton.linear.kernels.parts import Sizes
from attnops_triton.linear.plan import LinearPlan


def backward(
    metadata: OperationMetadata, kept: Named, d: LinearOutput, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The gradients of the arrays, by name, each in its array's dtype.

    Args:
        metadata: the operation's metadata.
        kept: what `attnops_triton.linear.forward.forward_with_states` keeps.
        d: the gradients of the output and, or None, of the last state.
        query: [B, T, K, D]; it and the others are the arguments of that.
        key: [B, T, K, D].
        value: [B, T, Hv, Dv].
        decay: [Hv], [B, T, Hv] or None.
        beta: [B, T, Hv] or None.
        scale: of queries.
        initial_state: [B, Hv, D, Dv] or None.
        mask: an `attnops_linear.masks.Tokens` or None.
    """
    plan, given = prepared(metadata, query, key, value, decay, beta, scale, mask)
    given |= kept | {"d_out": d.attention_outputs.astype(plan.stored)}
    if d.state is not None:
        given["initial"] = d.state.astype(jnp.float32)
    results = _call(dataclasses.replace(plan, backward=True), given)

    def of_keys(x: jax.Array) -> jax.Array:
        return x if plan.G == 1 else x.reshape(*x.shape[:2], plan.K, plan.G, plan.D).sum(axis=3)

    found = {
        "query": (of_keys(results["d_query"]), query), "key": (of_keys(results["d_key"]), key),
        "value": (results["d_value"], value),
    }  # fmt: skip
    if decay is not None:
        of_tokens = results["d_decay"]
        found["decay"] = (of_tokens if decay.ndim == 3 else of_tokens.sum(axis=(0, 1)), decay)
    if beta is not None:
        found["beta"] = (results["d_beta"], beta)
    if initial_state is not None:
        found["initial_state"] = (results["state"], initial_state)
    return {name: x.astype(like.dtype) for name, (x, like) in found.items()}


@folds_batch
def _call(plan: LinearPlan, given: Named) -> Named:
    """The gradients by their names in `Arrays`; ``state`` is that of the first state."""
    plan, given = of_rows(plan, given)
    B, H, T, D, Dv = plan.B, plan.H, plan.length, plan.D, plan.Dv
    N, columns = cdiv(T, plan.tiles.C), cdiv(Dv, plan.reverse.columns)
    outputs = {
        "state": jax.ShapeDtypeStruct((B, H, D, Dv), jnp.float32),
        "d_value": jax.ShapeDtypeStruct((B, T, H, Dv), plan.stored),
        "d_states": jax.ShapeDtypeStruct((B, H, N, D, Dv), plan.stored),
    }
    chunks = some(given, ("query", "key", "flags", "initial", "d_out")) | scores(plan, given)
    found = launch(
        plan, plan.reverse, attnops_linear_chunks_backward, chunks, outputs, B * H * columns, Sizes(T, N, columns)
    )
    # Value heads each have a part of their key head's gradient.
    of_keys = jax.ShapeDtypeStruct((B, T, H, D), plan.stored if plan.G == 1 else jnp.float32)
    of_tokens = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    outputs = {"d_query": of_keys, "d_key": of_keys}
    outputs |= {f"d_{name}": of_tokens for name in ("decay", "beta") if name in given}
    chunks = some(given, ("query", "key", "beta", "flags", "d_out", "states", "solved")) | some(
        chunks | found, ("gates", "d_value", "d_states")
    )
    if plan.gated:
        chunks["earlier"] = jnp.tri(plan.tiles.C, k=-1, dtype=plan.stored)
    if "beta" not in given:
        chunks["solved"] = given["value"]
        del chunks["d_value"]
    sizes = Sizes(T, N, cdiv(Dv, plan.gradients.columns))
    found |= launch(plan, plan.gradients, attnops_linear_gradients, chunks, outputs, B * H * N, sizes)
    return found
