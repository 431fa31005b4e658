"""The differentiable call: the kernels, and the gradients from what the forward saved."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.kernels.nograd import not_differentiable
from attnops.kernels.parts import Partial, Whole, differentiable_share, rounded
from attnops.kernels.rules import cotangents, is_differentiated
from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops_triton.flash.backward import Inputs, by_key, by_query
from attnops_triton.flash.bias_gradient import array_gradient, table_gradient
from attnops_triton.flash.forward import forward
from attnops_triton.flash.operands import Arrays
from attnops_triton.flash.plan import LN2, Plan
from attnops_triton.flash.visits import Scores, Visits

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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, T, H, Dv], logsumexp [B, H, T], and what that lost in rounding, which has no gradient.

    Args:
        plan: of the call.
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        arrays: what scores depend on beside these.
        maps: the tiles to visit.
    """
    out, level, rest = forward(plan, query, key, value, arrays, maps.forward)
    return out, *_logsumexp(plan, level, rest)


def _forward_rule(plan: Plan, query: Any, key: Any, value: Any, arrays: Any, maps: Any) -> tuple[Any, Any]:
    flag = (None,) * is_differentiated((arrays.bias, arrays.table, arrays.array))
    query, key, value, arrays, maps = custom_vjp_primal_tree_values((query, key, value, arrays, maps))
    run = not_differentiable(functools.partial(forward, plan), _SECOND)
    out, level, rest = run(query, key, value, arrays, maps.forward)
    # Tagged here, where they are saved: outside, a checkpoint policy would name a copy.
    out, level, rest = tag(out, OUTPUT_NAME), tag(level, LOGSUMEXP_NAME), tag(rest, LOGSUMEXP_NAME)
    return (out, *_logsumexp(plan, level, rest)), (query, key, value, arrays, maps, out, level, rest, flag)


def _backward_rule(plan: Plan, saved: Any, given: Any) -> tuple[Any, ...]:
    *call, out, level, rest, flag = saved
    d_out, d_lse = cotangents(given[:2], call[0])

    def gradients(call: Any, out: Any, level: Any, rest: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse  # [B, H, T]
        return _gradients(plan, bool(flag), call, level, rest, delta, d_out)

    *found, d_arrays = not_differentiable(gradients, _SECOND)(tuple(call), out, level, rest, d_out, d_lse)
    return *rounded(tuple(found), tuple(call[:3])), d_arrays, None  # type: ignore[arg-type]


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _part(plan: Plan, query: Any, key: Any, value: Any, arrays: Any, maps: Any) -> Partial:
    out, level, rest = forward(plan, query, key, value, arrays, maps.forward)
    return Partial(out, *_logsumexp(plan, level, rest))


def _part_gradients(
    plan: Plan, wants_bias: bool, call: Any, whole: Whole, d_out: jax.Array, d_weight: jax.Array
) -> tuple[Any, ...]:
    level = whole.lse * (1 / plan.unit)
    rest = jnp.where(level == -jnp.inf, 0.0, ((whole.lse - level * plan.unit) + whole.rest) * (1 / LN2))
    return _gradients(plan, wants_bias, call, level, rest, -d_weight, d_out)


attend_share = differentiable_share(
    _part, _part_gradients, lambda arrays: (arrays.bias, arrays.table, arrays.array), _SECOND
)  # fmt: skip


def _gradients(
    plan: Plan, wants_bias: bool, call: tuple[jax.Array, jax.Array, jax.Array, Arrays, Maps],
    level: jax.Array, rest: jax.Array, delta: jax.Array, d_out: jax.Array,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key, value and arrays.

    Args:
        plan: of the call.
        wants_bias: whether a bias is differentiated.
        call: query, key, value, arrays and maps, as `attend` has them.
        level: [B, H, T], of the logsumexp that weights are computed from, see `forward`.
        rest: [B, H, T], likewise.
        delta: [B, H, T], what each weight's gradient is measured against.
        d_out: [B, T, H, Dv].
    """
    if plan.dtype != "float16":
        return _kernels(plan, wants_bias, call, level, rest, delta, d_out)
    # Its numbers end at 6e-8, where gradients of scores may well lie: cotangents are brought to about 1 by a power of
    # two, in which gradients are linear, and gradients, in float32, back from it.
    top = jnp.abs(d_out.astype(jnp.float32)).max()
    scale = jnp.exp2(-jnp.floor(jnp.log2(jnp.where((top > 0) & jnp.isfinite(top), top, 1.0))))
    found = _kernels(plan, wants_bias, call, level, rest, delta * scale, d_out.astype(jnp.float32) * scale)

    *d_qkv, d_arrays = found

    def back(d: Any, x: Any) -> Any:
        return None if d is None else (d / scale).astype(x.dtype)

    d_arrays = jax.tree.map(back, d_arrays, call[3], is_leaf=lambda d: d is None)
    return *(d / scale for d in d_qkv), d_arrays


def _kernels(
    plan: Plan, wants_bias: bool, call: tuple[jax.Array, jax.Array, jax.Array, Arrays, Maps],
    level: jax.Array, rest: jax.Array, delta: jax.Array, d_out: jax.Array,
) -> tuple[Any, ...]:  # fmt: skip
    """`_gradients`, as kernels give them."""
    query, key, value, arrays, maps = call
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
        lse, _ = _logsumexp(plan, level, rest)
        share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(arrays.sinks[:, :, None] - lse))
        d_arrays = d_arrays._replace(sinks=-(share * delta).sum((0, 2))[None])
    return dq, dk, dv, d_arrays


def _logsumexp(plan: Plan, level: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp, and what it lost in rounding."""
    top, log = level * plan.unit, rest * LN2
    lse = top + log
    return lse, jnp.where(lse == -jnp.inf, 0.0, (top - lse) + log)


def _summed(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """[B, H, n] summed to the shape of a value, see `attnops_triton.flash.operands.value_layout`."""
    axes = tuple(axis for axis in range(3) if x.shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True)
