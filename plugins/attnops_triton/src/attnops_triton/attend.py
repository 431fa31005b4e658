"""The differentiable call: the kernels, and the gradients from what the forward saved."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values

from attnops.kernels.nograd import not_differentiable
from attnops.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops_triton.backward import Inputs, by_key, by_query
from attnops_triton.bias_gradient import array_gradient, table_gradient
from attnops_triton.forward import forward
from attnops_triton.operands import Arrays
from attnops_triton.plan import LN2, Plan
from attnops_triton.visits import Scores, Visits

_SECOND: Final = (
    "this kernel's gradients have none of their own, but a second derivative was asked for; vanilla has one"
)


class Maps(NamedTuple):
    """The tiles to visit, for each kernel.

    Attributes:
        forward: by tiles of queries.
        by_query: by tiles of queries, for the gradient of query; None where they are the forward's.
        by_key: by tiles of keys.
        by_score: every tile, for the gradients of arrays and tables; None without one.
    """

    forward: Visits
    by_query: Visits | None
    by_key: Visits
    by_score: Scores | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, maps: Maps
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, H, Dv] and logsumexp [B, H, T] of query [B, T, H, D], key [B, S, K, D] and value [B, S, K, Dv]."""
    out, level, rest = forward(plan, query, key, value, arrays, maps.forward)
    return out, _logsumexp(plan, level, rest)


def _forward_rule(plan: Plan, query: Any, key: Any, value: Any, arrays: Any, maps: Any) -> tuple[Any, Any]:
    biases = arrays.bias, arrays.table, arrays.array
    leaves = jax.tree.leaves(biases, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    wants_bias = any(leaf.perturbed for leaf in leaves)
    query, key, value, arrays, maps = custom_vjp_primal_tree_values((query, key, value, arrays, maps))
    run = not_differentiable(functools.partial(forward, plan), _SECOND)
    out, level, rest = run(query, key, value, arrays, maps.forward)
    # Tagged here, where they are saved: outside, a checkpoint policy would name a copy.
    out, level, rest = tag(out, OUTPUT_NAME), tag(level, LOGSUMEXP_NAME), tag(rest, LOGSUMEXP_NAME)
    saved = (query, key, value, arrays, maps, out, level, rest, (None,) * wants_bias)
    return (out, _logsumexp(plan, level, rest)), saved


def _backward_rule(plan: Plan, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    *arguments, flag = saved
    d_out, d_lse = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    gradients = not_differentiable(functools.partial(_gradients, plan, bool(flag)), _SECOND)
    d_query, d_key, d_value, d_arrays = gradients(*arguments, d_out, d_lse)
    return d_query, d_key, d_value, d_arrays, None


def _gradients(
    plan: Plan, wants_bias: bool, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, maps: Maps,
    out: jax.Array, level: jax.Array, rest: jax.Array, d_out: jax.Array, d_lse: jax.Array,
) -> tuple[Any, ...]:  # fmt: skip
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse  # [B, H, T]
    # A row that saw nothing has weights exp(score − inf) = 0.
    above = jnp.where(level == -jnp.inf, jnp.inf, level)
    inputs = Inputs(query, key, value, d_out.astype(query.dtype), above, rest, delta)
    axes = () if plan.scoring.bias is None or not wants_bias else plan.scoring.bias.values
    wanted = [i for i in range(len(axes)) if jnp.issubdtype(arrays.bias[i].dtype, jnp.floating)]
    of_key = tuple(i for i in wanted if "kv" in axes[i])
    others = tuple(i for i in wanted if "kv" not in axes[i])
    dq, d_others = by_query(plan, inputs, arrays, maps.by_query or maps.forward, others)
    dk, dv, d_of_key = by_key(plan, inputs, arrays, maps.by_key, of_key)
    d_arrays = Arrays(mask=None, dense=None, bias=None)  # type: ignore[arg-type]
    if wants_bias:
        d_values = d_others | d_of_key
        of_values: Any = (_summed(d_values[i], x) if i in d_values else None for i, x in enumerate(arrays.bias))
        d_arrays = d_arrays._replace(bias=tuple(of_values))
        if arrays.table is not None:
            d_arrays = d_arrays._replace(table=table_gradient(plan, inputs, arrays, maps.by_score))
        if arrays.array is not None:
            d_array = array_gradient(plan, inputs, arrays, maps.by_score)
            d_arrays = d_arrays._replace(array=d_array.astype(arrays.array.dtype))
    if arrays.sinks is not None:
        # The sink is one more logit, whose value is 0; a row that saw nothing takes no part.
        lse = _logsumexp(plan, level, rest)
        share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(arrays.sinks[:, :, None] - lse))
        d_arrays = d_arrays._replace(sinks=-(share * delta).sum((0, 2))[None])
    return dq, dk, dv, d_arrays


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _logsumexp(plan: Plan, level: jax.Array, rest: jax.Array) -> jax.Array:
    return level * plan.unit + rest * LN2


def _summed(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """[B, H, n] summed to the shape of a value, see `attnops_triton.operands.value_layout`."""
    axes = tuple(axis for axis in range(3) if x.shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True)
