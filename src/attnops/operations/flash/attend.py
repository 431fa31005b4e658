"""The differentiable call: forward, and backward from what it saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.kernels.nograd import not_differentiable
from attnops.kernels.parts import Partial, Whole, differentiable_share, rounded
from attnops.kernels.rules import cotangents, is_differentiated
from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops.operations.flash.backward import Gradients, backward
from attnops.operations.flash.forward import forward
from attnops.operations.flash.plan import Plan
from attnops.operations.flash.scores import Arrays, Options
from attnops.operations.flash.visits import Visits

_SECOND: Final = (
    "flash computes its gradients in a loop that has none of its own, but a second derivative was asked for; "
    "vanilla has one"
)
# By tiles of queries, and by tiles of keys for the backward pass.
BothVisits = tuple[Visits, Visits]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    plan: Plan, options: Options, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, visits: BothVisits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, T, H, Dv], logsumexp [B, H, T], and what that lost in rounding, which has no gradient."""
    return forward(plan, options, query, key, value, arrays, visits[0])


def _forward_rule(
    plan: Plan, options: Options, query: Any, key: Any, value: Any, arrays: Any, visits: Any
) -> tuple[Any, Any]:
    # What is saved must be arrays; a flag is said by the structure.
    flag = (None,) * is_differentiated(arrays.bias)
    primals = query, key, value, arrays, visits
    query, key, value, arrays, visits = custom_vjp_primal_tree_values(primals)
    out, logsumexp, loss = forward(plan, options, query, key, value, arrays, visits[0])
    # Tagged here, where they are saved: outside, a checkpoint policy would name a copy.
    out, logsumexp, loss = tag(out, OUTPUT_NAME), tag(logsumexp, LOGSUMEXP_NAME), tag(loss, LOGSUMEXP_NAME)
    return (out, logsumexp, loss), (query, key, value, arrays, visits[1], out, logsumexp, loss, flag)


def _backward_rule(plan: Plan, options: Options, saved: Any, given: Any) -> tuple[Any, ...]:
    *arguments, flag = saved
    run = not_differentiable(functools.partial(_gradients, plan, options, bool(flag)), _SECOND)
    found, d_sinks = run(*arguments, *cotangents(given[:2], arguments[0]))
    d_qkv = rounded((found.query, found.key, found.value), tuple(arguments[:3]))  # type: ignore[arg-type]
    return *d_qkv, *_of_call(found, flag, d_sinks)


def _of_call(found: Gradients, flag: Any, d_sinks: jax.Array | None) -> tuple[Any, ...]:
    """Those of arrays and visits; None stands for none: the mask's arrays and the seed have none."""
    d_bias: Any = found.bias if flag else None
    d_arrays = Arrays(mask=None, bias=d_bias, sinks=d_sinks, seed=None, numbers=None)
    return d_arrays, None


def _gradients(
    plan: Plan,
    options: Options,
    wants_bias: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: Arrays,
    visits: Visits,
    out: jax.Array,
    logsumexp: jax.Array,
    loss: jax.Array,
    d_out: jax.Array,
    d_logsumexp: jax.Array,
) -> tuple[Gradients, jax.Array | None]:
    """The gradients, the sinks' last."""
    # Weights come back as exp(score − logsumexp), too large by exp(loss): a factor of the row that cotangents can take.
    factor = jnp.exp(-loss)  # [B, H, T]
    # A product with ones: XLA's CPU backend sums so many short rows forty times as slowly.
    products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    ones = jnp.ones((products.shape[3],), jnp.float32)
    mean = jnp.matmul(products, ones, precision=lax.Precision.HIGHEST).swapaxes(1, 2)
    delta = (mean - d_logsumexp) * factor
    found = backward(plan, options, wants_bias, query, key, value, arrays, visits, logsumexp, delta, factor, d_out)
    d_sinks = None
    if arrays.sinks is not None:
        # The sink is one more logit, whose value is 0; a row that saw nothing takes no part.
        share = jnp.where(logsumexp == -jnp.inf, 0.0, jnp.exp(arrays.sinks[None, :, None] - logsumexp))
        d_sinks = -(share * delta).sum((0, 2))
    return found, d_sinks


_attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _part(static: tuple[Plan, Options], query: Any, key: Any, value: Any, arrays: Any, visits: Any) -> Partial:
    return Partial(*forward(*static, query, key, value, arrays, visits[0]))


def _part_gradients(
    static: tuple[Plan, Options], wants_bias: bool, call: Any, whole: Whole, d_out: jax.Array, d_weight: jax.Array
) -> tuple[Any, ...]:
    (plan, options), (query, key, value, arrays, visits) = static, call
    factor = jnp.exp(-whole.rest)
    delta = -d_weight * factor
    found = backward(
        plan, options, wants_bias, query, key, value, arrays, visits[1], whole.lse, delta, factor, d_out
    )  # fmt: skip
    d_arrays, _ = _of_call(found, (None,) * wants_bias, None)
    return found.query, found.key, found.value, d_arrays


_share = differentiable_share(_part, _part_gradients, lambda arrays: arrays.bias, _SECOND)
# Compiled once for equal shapes and options, also where the caller does not compile.
_attend_kept = jax.jit(_attend, static_argnums=(0, 1))
_share_kept = jax.jit(_share, static_argnums=(0,))


def attend(plan: Plan, options: Options, holds_function: bool, *arguments: Any) -> tuple[jax.Array, ...]:
    """See `_attend`.

    Args:
        plan: of the call.
        options: of the call.
        holds_function: whether a mask or bias holds a caller's function, which nothing that is compiled may outlive.
        *arguments: query, key, value, arrays and visits.
    """
    if holds_function:
        return _once(functools.partial(_attend, plan, options), arguments)
    return _attend_kept(plan, options, *arguments)


def attend_share(plan: Plan, options: Options, holds_function: bool, *arguments: Any) -> tuple[jax.Array, ...]:
    """The same of a call's share of a softmax over more keys; the arguments end with what is known of that."""
    if holds_function:
        return _once(functools.partial(_share, (plan, options)), arguments)
    return _share_kept((plan, options), *arguments)


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """The result of a function that is compiled for one call, and forgotten: JAX keeps structures of arguments."""
    leaves, tree = jax.tree.flatten(arguments)
    found: tuple[jax.Array, ...] = jax.jit(lambda *given: function(*jax.tree.unflatten(tree, given)))(*leaves)
    return found
