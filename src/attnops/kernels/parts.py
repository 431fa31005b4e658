"""Attention over some of a softmax's keys, for what joins the parts: devices round a ring, shards of a cache, pages.

An operation serves it by two options of its forwards, which `flash` and its plugins have:
    as_part: the output is float32 whatever the query is, and ``logsumexp`` [B, H, T, 2] has beside itself what it lost
        in rounding: of scores of 1e9, as a bias that hides keys makes them, the logarithm of a sum is nothing, yet it
        says how many keys a part has.
    whole: a `Whole`, what is known of the softmax over all keys, of which the call's are some. The output is then
        ``Σ exp(s − lse) · v`` over the call's keys, float32, and ``logsumexp`` [B, H, T] holds their weight,
        ``Σ exp(s − lse)``. Gradients come from the whole's logsumexp alone, so that a backward pass over parts computes
        no forward again; it has no gradient itself.
With others, which lack them, the functions here compute the same by what they have, to the precision of a logsumexp,
whose rounding is an error of the weights: 1e-4 where scores are 1e3. Arrays are in the layout "BTHD".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.operation import decide, named_options
from attnops.errors import NotDifferentiableError
from attnops.kernels.nograd import not_differentiable
from attnops.kernels.rules import cotangents, is_differentiated


class Partial(NamedTuple):
    """A softmax of which some keys have been seen.

    Attributes:
        out: the output so far, float32 [B, T, H, Dv].
        lse: its logsumexp, float32 [B, H, T]; −inf where nothing was seen.
        rest: what that lost in rounding, to be added to it, float32 [B, H, T]; it has no gradient.
    """

    out: jax.Array
    lse: jax.Array
    rest: jax.Array


class Share(NamedTuple):
    """What some keys give to a softmax over more.

    Attributes:
        out: what they add to the output, float32 [B, T, H, Dv].
        weight: of the whole's 1, float32 [B, H, T].
    """

    out: jax.Array
    weight: jax.Array


class Whole(NamedTuple):
    """What is known of a softmax over more keys than a call's.

    Attributes:
        lse: see `Partial`.
        rest: likewise.
        query: float32 zeros of the query's shape, or None. Where they are given, they get the query's gradient,
            unrounded, and the query gets none.
        key: likewise.
        value: likewise.
    """

    lse: jax.Array
    rest: jax.Array
    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None


def partial(operation: OperationImpl, query: Any, key: Any, value: Any, **options: Any) -> Partial:
    """Attention over these keys alone.

    Args:
        operation: any, of the layout "BTHD".
        query: see `OperationImpl.__call__`.
        key: likewise.
        value: likewise.
        **options: of the call; no sinks, which belong to the whole.
    """
    serves = _serves_parts(operation, query, key, value, options)
    found = operation(query, key, value, return_lse=True, **(options | {"as_part": True} if serves else options))
    lse = found.logsumexp
    assert lse is not None
    if serves:
        return Partial(found.attention_outputs, lse[..., 0], lax.stop_gradient(lse[..., 1]))
    return Partial(found.attention_outputs.astype(jnp.float32), lse, jnp.zeros_like(lse))


def share(operation: OperationImpl, query: Any, key: Any, value: Any, whole: Whole, **options: Any) -> Share:
    """What these keys give to a softmax whose logsumexp over all keys is known.

    Args:
        operation: see `partial`.
        query: likewise.
        key: likewise.
        value: likewise.
        whole: that softmax.
        **options: see `partial`.
    """
    if not _serves_parts(operation, query, key, value, options):
        return share_of(partial(operation, query, key, value, **options), whole)
    found = operation(query, key, value, return_lse=True, whole=whole, **options)
    assert found.logsumexp is not None
    return Share(found.attention_outputs, found.logsumexp)


def share_gradients(
    operation: OperationImpl, query: Any, key: Any, value: Any, whole: Whole, cotangents: Share, learnt: Any,
    options: Callable[[Any], dict[str, Any]],
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:  # fmt: skip
    """The gradients of `share`: those of query, key and value in float32, and that of ``learnt``.

    Args:
        operation: see `share`.
        query: likewise.
        key: likewise.
        value: likewise.
        whole: likewise.
        cotangents: of what `share` gives.
        learnt: a pytree of arrays.
        options: what `share` is called with, from ``learnt``.
    """
    if _serves_parts(operation, query, key, value, options(learnt)):
        zeros = [jnp.zeros_like(x, dtype=jnp.float32) for x in (query, key, value)]

        def given(q: Any, k: Any, v: Any, learnt: Any) -> Share:
            return share(operation, query, key, value, Whole(whole.lse, whole.rest, q, k, v), **options(learnt))

        return jax.vjp(given, *zeros, learnt)[1](cotangents)  # type: ignore[return-value]
    *d_qkv, d_learnt = jax.vjp(
        lambda q, k, v, learnt: share(operation, q, k, v, whole, **options(learnt)), query, key, value, learnt
    )[1](cotangents)
    return *(x.astype(jnp.float32) for x in d_qkv), d_learnt  # type: ignore[return-value]


def none_seen(query: jax.Array, value: jax.Array) -> Partial:
    """Of a softmax before it has seen a key."""
    B, t, H, _ = query.shape
    out = jnp.zeros_like(query, shape=(B, t, H, value.shape[3]), dtype=jnp.float32)
    rest = jnp.zeros_like(query, shape=(B, H, t), dtype=jnp.float32)
    return Partial(out, rest - jnp.inf, rest)


def joined(*parts: Partial) -> Partial:
    """Softmaxes over different keys as one over all of them."""
    top = functools.reduce(jnp.maximum, (x.lse for x in parts))
    weights = [relative(x.lse, x.rest, top) for x in parts]
    total = functools.reduce(jnp.add, weights)
    seen = total != 0  # NaN too
    scale = jnp.where(seen, 1 / jnp.where(seen, total, 1.0), 0.0)
    shares = [x.out * (w * scale).swapaxes(1, 2)[..., None] for x, w in zip(parts, weights, strict=True)]
    return Partial(functools.reduce(jnp.add, shares), *logarithm(top, total))


def relative(lse: jax.Array, rest: jax.Array, top: jax.Array) -> jax.Array:
    """The sum of exponentials that a logsumexp stands for, over ``exp(top)``; 0 where nothing was seen."""
    # Numbers near one another are subtracted without rounding; what they lost before is added to what is left.
    base = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    return jnp.exp((lse - base) + rest)


def logarithm(top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``top + log(total)`` rounded, and what that lost; −inf and 0 where the total is 0."""
    seen = total != 0  # NaN too
    base, log = lax.stop_gradient(jnp.where(seen, top, 0.0)), jnp.log(jnp.where(seen, total, 1.0))
    lse = base + log
    rest = jnp.where(seen, lax.stop_gradient((base - lse) + log), 0.0)
    return jnp.where(seen, lse, -jnp.inf), rest


def share_of(part: Partial, whole: Whole) -> Share:
    """A softmax of some keys as a share of one over more."""
    # A row that saw nothing has −inf, and where nobody did the whole has too.
    base = jnp.where(whole.lse == -jnp.inf, 0.0, whole.lse)
    weight = jnp.exp((part.lse - base) + (part.rest - whole.rest))
    return Share(part.out * weight.swapaxes(1, 2)[..., None], weight)


def two_parts(lse: jax.Array, rest: jax.Array) -> jax.Array:
    """What ``logsumexp`` is with ``as_part``, [B, H, T, 2]."""
    return jnp.stack([lse, lax.stop_gradient(rest)], axis=-1)


def check_parts(as_part: bool, whole: Any, shape: tuple[int, int, int], *, sinks: Any, weights: bool = False) -> None:
    """Refuse what does not go with the options of parts.

    Args:
        as_part: as given.
        whole: likewise.
        shape: [B, H, T].
        sinks: of the call.
        weights: whether the call asks for them.

    Raises:
        ValueError: what is asked for beside them, or a shape or dtype.
    """
    if not as_part and whole is None:
        return
    option = "as_part" if whole is None else "whole"
    for name, given in (("sinks", sinks is not None), ("return_weights", weights)):
        if given:
            raise ValueError(f"{name} can't be given with {option}, as it belongs to all keys together; leave it out")
    if whole is None:
        return
    if not isinstance(whole, Whole):
        raise ValueError(f"whole is a {type(whole).__name__}, but must be an attnops.kernels.parts.Whole")
    for name, x in (("lse", whole.lse), ("rest", whole.rest)):
        if getattr(x, "shape", None) != shape or x.dtype != jnp.float32:
            found = f"{x.dtype} {x.shape}" if hasattr(x, "shape") else repr(x)
            raise ValueError(f"whole.{name} is {found}, but must be float32 [B, H, T]={shape}")


def differentiable_share(
    forward: Callable[..., Partial], gradients: Callable[..., tuple[Any, Any, Any, Any]], learnt: Callable[[Any], Any],
    second: str,
) -> Callable[..., Share]:  # fmt: skip
    """The differentiable ``share(plan, query, key, value, arrays, maps, whole)`` of a kernel; ``plan`` is static.

    Args:
        forward: ``forward(plan, query, key, value, arrays, maps)``.
        gradients: ``gradients(plan, wants_bias, (query, key, value, arrays, maps), whole, d_out, d_weight)`` gives
            those of query, key and value in float32, and of the arrays.
        learnt: of the arrays, what may have a gradient that costs something.
        second: what is raised where a second derivative is asked for.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def differentiable(plan: Any, query: Any, key: Any, value: Any, arrays: Any, maps: Any, whole: Whole) -> Share:
        return share_of(forward(plan, query, key, value, arrays, maps), whole)

    def forward_rule(plan: Any, *primals: Any) -> tuple[Share, Any]:
        *_, arrays, _, whole = primals
        if any(x.perturbed for x in whole[:2]):
            raise NotDifferentiableError(
                "the logsumexp of the whole has no gradient, but one was asked for (a second derivative, if whoever "
                "joins the parts gives it): vanilla has one"
            )
        # What is saved must be arrays; a flag is said by the structure.
        flag = (None,) * is_differentiated(learnt(arrays))
        given = custom_vjp_primal_tree_values(primals)
        # Nothing of the output is saved, so that the compiler leaves it out where gradients alone are wanted.
        return not_differentiable(functools.partial(differentiable, plan), second)(*given), (*given, flag)

    def backward_rule(plan: Any, saved: Any, given: Any) -> tuple[Any, ...]:
        *call, whole, flag = saved
        d_out, d_weight = cotangents(given, call[0])
        run = not_differentiable(functools.partial(gradients, plan, bool(flag)), second)
        *found, d_arrays = run(tuple(call), whole, d_out, d_weight)
        if whole.query is None:
            return *rounded(tuple(found), tuple(call[:3])), d_arrays, None, None  # type: ignore[arg-type]
        return None, None, None, d_arrays, None, Whole(None, None, *found)  # type: ignore[arg-type]

    differentiable.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return differentiable


def rounded(gradients: tuple[Any, Any, Any], given: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Gradients, of a part in float32, in the dtypes of what they are of."""
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, given, strict=True))  # type: ignore[return-value]


def _serves_parts(operation: OperationImpl, query: Any, key: Any, value: Any, options: dict[str, Any]) -> bool:
    request = operation.prepare(query, key, value, **options).request
    return {"as_part", "whole"} <= named_options(type(operation), decide(operation, request))
