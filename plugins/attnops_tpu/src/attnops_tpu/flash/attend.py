"""The differentiable call: layouts, the kernels, and the gradients from what the forward saved."""

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
from attnops_tpu.flash.backward import Inputs, backward
from attnops_tpu.flash.bias_gradient import bias_gradients
from attnops_tpu.flash.forward import forward
from attnops_tpu.flash.operands import Arrays, pad_last
from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.tile import held
from attnops_tpu.flash.visits import Visits

_ONCE: Final = "this kernel's gradients have none of their own, but a second derivative was asked for; vanilla has one"


LN2: Final = 0.6931471805599453


class Maps(NamedTuple):
    """The tiles to visit, for each kernel.

    Attributes:
        forward: by tiles of queries, for as many rows as fit scalar memory together.
        spans: by tiles of keys, for each span of queries.
        by_score: every tile once, of all batches and heads together: what the gradient of an array bias goes by.
    """

    forward: tuple[Visits, ...]
    spans: tuple[Visits, ...]
    by_score: Visits | None


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
    return _forward(plan, query, key, value, arrays, maps)


def _forward(
    plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, maps: Maps
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output and logsumexp, and what the latter lost in rounding."""
    q, k, v = _heads_first(_scaled(plan, query), plan.Tp), _heads_first(key, plan.Sp), _heads_first(value, plan.Sp)
    out, *rows = forward(plan, q, k, v, arrays, maps.forward)
    lse, loss = (x[:, :, 0, : plan.T] for x in rows)
    return out[:, :, : plan.T].swapaxes(1, 2), lse, loss * LN2


def _forward_rule(plan: Plan, query: Any, key: Any, value: Any, arrays: Any, maps: Any) -> tuple[Any, Any]:
    flag = (None,) * is_differentiated((arrays.bias, arrays.table, arrays.array))
    query, key, value, arrays, maps = custom_vjp_primal_tree_values((query, key, value, arrays, maps))
    run = not_differentiable(functools.partial(_forward, plan), _ONCE)
    out, lse, loss = run(query, key, value, arrays, maps)
    # Tagged here, where they are saved: outside, a checkpoint policy would name a copy.
    out, lse, loss = tag(out, OUTPUT_NAME), tag(lse, LOGSUMEXP_NAME), tag(loss, LOGSUMEXP_NAME)
    return (out, lse, loss), (query, key, value, arrays, maps, out, lse, loss, flag)


def _backward_rule(plan: Plan, saved: Any, given: Any) -> tuple[Any, ...]:
    *call, out, lse, loss, flag = saved
    d_out, d_lse = cotangents(given[:2], call[0])

    def gradients(call: Any, out: Any, lse: Any, loss: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        # The weights that kernels compute from the rounded logsumexp are too large by 1 / share, [B, H, T]. They are
        # linear in what they are multiplied by, which is where that is made good.
        share = jnp.exp(-loss)
        d_out = d_out.astype(jnp.float32) * share.swapaxes(1, 2)[..., None]
        delta = (d_out * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse * share
        return _gradients(plan, bool(flag), call, lse, delta, d_out)

    *found, d_arrays = not_differentiable(gradients, _ONCE)(tuple(call), out, lse, loss, d_out, d_lse)
    return *rounded(tuple(found), tuple(call[:3])), d_arrays, None  # type: ignore[arg-type]


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _part(plan: Plan, query: Any, key: Any, value: Any, arrays: Any, maps: Any) -> Partial:
    return Partial(*_forward(plan, query, key, value, arrays, maps))


def _part_gradients(
    plan: Plan, wants_bias: bool, call: Any, whole: Whole, d_out: jax.Array, d_weight: jax.Array
) -> tuple[Any, ...]:
    factor = jnp.exp(-whole.rest)
    d_out = d_out.astype(jnp.float32) * factor.swapaxes(1, 2)[..., None]
    return _gradients(plan, wants_bias, call, whole.lse, -d_weight * factor, d_out)


attend_share = differentiable_share(
    _part, _part_gradients, lambda arrays: (arrays.bias, arrays.table, arrays.array), _ONCE
)  # fmt: skip


def _gradients(
    plan: Plan, wants_bias: bool, call: tuple[jax.Array, jax.Array, jax.Array, Arrays, Maps],
    lse: jax.Array, delta: jax.Array, d_out: jax.Array,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key, value and arrays.

    Args:
        plan: of the call.
        wants_bias: whether a bias is differentiated.
        call: query, key, value, arrays and maps, as `attend` has them.
        lse: [B, H, T], what weights are computed from.
        delta: [B, H, T], what each weight's gradient is measured against.
        d_out: [B, T, H, Dv].
    """
    query, key, value, arrays, maps = call
    inputs = Inputs(
        q=_features_first(_scaled(plan, query), plan.Tp),
        k=_heads_first(key, plan.Sp),
        k_turned=_features_first(key, plan.Sp),
        v=_heads_first(value, plan.Sp),
        d_out=_features_first(d_out.astype(plan.dtype), plan.Tp),
        # A row that saw nothing, and the ragged end, have weights exp(score − inf) = 0.
        lse=_rows(jnp.where(lse == -jnp.inf, jnp.inf, lse * (1 / held(plan))), plan.Tp, jnp.inf),
        delta=_rows(delta, plan.Tp, 0.0),
    )
    dq, dk, dv = backward(plan, inputs, arrays, maps.spans)
    dq = jnp.moveaxis(dq[..., : plan.T], 3, 1) * plan.scale
    dk, dv = (jnp.moveaxis(d[..., : plan.S], 3, 1) for d in (dk, dv))
    d_arrays = Arrays(mask=None, dense=None, bias=None)  # type: ignore[arg-type]
    if wants_bias:
        d_arrays = bias_gradients(plan, inputs, arrays, maps.forward, maps.by_score)
    if arrays.sinks is not None:
        # The sink is one more logit, whose value is 0; a row that saw nothing takes no part.
        weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(arrays.sinks[:, :, None] - lse))
        d_arrays = d_arrays._replace(sinks=-(weight * delta).sum((0, 2))[None])
    return dq, dk, dv, d_arrays


def _scaled(plan: Plan, query: jax.Array) -> jax.Array:
    """The query with the folded part of the scale, which is exact."""
    return query * jnp.asarray(plan.folded, query.dtype)


def _features_first(x: jax.Array, size: int) -> jax.Array:
    """[B, length, heads, d] to [B, heads, d, size]."""
    return pad_last(jnp.moveaxis(x, 1, 3), size)


def _heads_first(x: jax.Array, size: int) -> jax.Array:
    """[B, length, heads, d] to [B, heads, size, d]."""
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, size - x.shape[1]), (0, 0)))


def _rows(x: jax.Array, size: int, fill: float) -> jax.Array:
    """[B, H, T] to [B, H, 1, size]."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2])), constant_values=fill)[:, :, None]
