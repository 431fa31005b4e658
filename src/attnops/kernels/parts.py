"""Attention over some of a softmax's keys, for what joins the parts: devices round a ring, shards of a cache, pages.

An operation serves it by two options of its forwards, which `flash` and its plugins have:
    output_dtype: the output's dtype, the query's or float32, whatever the query's; so that parts join unrounded.
    total_lse: [B, H, T] float32, the logsumexp over all keys, of which the call's are some; −inf for a row that sees
        none of them. The output is then ``Σ exp(s − total_lse) · v`` over the call's keys, and ``logsumexp`` holds
        their weight, ``Σ exp(s − total_lse)``. Gradients come from ``total_lse`` alone, so that a backward pass over
        parts computes no forward again; it has no gradient itself.
With others, which lack them, the functions here compute the same by what they have.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from attnops.errors import NotDifferentiableError
from attnops.operation import OperationImpl, decide, named_options


class Partial(NamedTuple):
    """A softmax of which some keys have been seen.

    Attributes:
        out: the output so far, float32, in the operation's layout.
        lse: its logsumexp, float32 [B, H, T]; −inf where nothing was seen.
    """

    out: jax.Array
    lse: jax.Array


class Share(NamedTuple):
    """What some keys give to a softmax over more.

    Attributes:
        out: what they add to the output, float32, in the operation's layout.
        weight: of the whole's 1, float32 [B, H, T].
    """

    out: jax.Array
    weight: jax.Array


def partial(operation: OperationImpl, query: Any, key: Any, value: Any, **options: Any) -> Partial:
    """Attention over these keys alone.

    Args:
        operation: any.
        query: see `OperationImpl.__call__`.
        key: likewise.
        value: likewise.
        **options: of the call; no sinks, which belong to the whole.
    """
    if _serves_parts(operation, query, key, value, options):
        options = options | {"output_dtype": jnp.float32}
    found = operation(query, key, value, return_lse=True, **options)
    assert found.logsumexp is not None
    return Partial(found.attention_outputs.astype(jnp.float32), found.logsumexp)


def share(operation: OperationImpl, query: Any, key: Any, value: Any, total_lse: jax.Array, **options: Any) -> Share:
    """What these keys give to a softmax whose logsumexp over all keys is known.

    Args:
        operation: any.
        query: see `OperationImpl.__call__`.
        key: likewise.
        value: likewise.
        total_lse: [B, H, T] float32, see `attnops.kernels.parts`.
        **options: of the call; no sinks, which belong to the whole.
    """
    if _serves_parts(operation, query, key, value, options):
        options = options | {"output_dtype": jnp.float32, "total_lse": total_lse}
        found = operation(query, key, value, return_lse=True, **options)
        assert found.logsumexp is not None
        return Share(found.attention_outputs, found.logsumexp)
    return share_of(partial(operation, query, key, value, **options), total_lse, operation.metadata.layout)


def none_seen(query: jax.Array, value: jax.Array) -> Partial:
    """Of a softmax before it has seen a key."""
    B, t, H, _ = query.shape
    out = jnp.zeros_like(query, shape=(B, t, H, value.shape[3]), dtype=jnp.float32)
    return Partial(out, jnp.full_like(query, -jnp.inf, shape=(B, H, t), dtype=jnp.float32))


def joined(*parts: Partial) -> Partial:
    """Softmaxes over different keys as one over all of them; in the layout "BTHD"."""
    top = lax.stop_gradient(functools.reduce(jnp.maximum, (x.lse for x in parts)))
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(x.lse - base) for x in parts]
    total = functools.reduce(jnp.add, weights)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    shares = [x.out * (w / safe).swapaxes(1, 2)[..., None] for x, w in zip(parts, weights, strict=True)]
    return Partial(functools.reduce(jnp.add, shares), jnp.where(seen, base + jnp.log(safe), -jnp.inf))


def share_of(part: Partial, total_lse: jax.Array, layout: str = "BTHD") -> Share:
    """A softmax of some keys as a share of one over more."""
    # A row that saw nothing has −inf, and where nobody did the whole has too.
    weight = jnp.exp(part.lse - jnp.where(total_lse == -jnp.inf, 0.0, total_lse))
    return Share(part.out * (weight if layout == "BHTD" else weight.swapaxes(1, 2))[..., None], weight)


def dtype_of_output(query: jax.Array, asked: Any) -> Any:
    """What forwards do with ``output_dtype``.

    Raises:
        ValueError: it is neither the query's nor float32.
    """
    dtype = query.dtype if asked is None else jnp.dtype(asked)
    if dtype not in (query.dtype, jnp.float32):
        raise ValueError(f"output_dtype={dtype}, but must be float32 or the query's {query.dtype}; cast the output")
    return dtype


def check_total(total_lse: Any, shape: tuple[int, int, int], *, sinks: Any, return_weights: bool = False) -> None:
    """Refuse a ``total_lse`` that does not fit the call.

    Args:
        total_lse: as given, or None.
        shape: [B, H, T].
        sinks: of the call.
        return_weights: of the call.

    Raises:
        ValueError: its shape or dtype, or what is asked for beside it.
    """
    if total_lse is None:
        return
    if total_lse.shape != shape or total_lse.dtype != jnp.float32:
        raise ValueError(
            f"total_lse is {total_lse.dtype} {total_lse.shape}, but must be float32 [B, H, T]={shape}"
        )  # fmt: skip
    for name, given in (("sinks", sinks is not None), ("return_weights", return_weights)):
        if given:
            raise ValueError(
                f"{name} can't be given with total_lse, for which they belong to the whole; leave them out"
            )


def refuse_gradient_of_total(total_lse: CustomVJPPrimal) -> jax.Array:
    """The value of a ``total_lse`` in a rule with symbolic zeros.

    Raises:
        NotDifferentiableError: its gradient is asked for.
    """
    if total_lse.perturbed:
        raise NotDifferentiableError(
            "total_lse has no gradient, but one was asked for; it is known when gradients are computed: give "
            "jax.lax.stop_gradient(total_lse), and the gradient of logsumexp to what gave it"
        )
    return total_lse.value  # type: ignore[no-any-return]


def _serves_parts(operation: OperationImpl, query: Any, key: Any, value: Any, options: dict[str, Any]) -> bool:
    request = operation.prepare(query, key, value, **options).request
    return {"output_dtype", "total_lse"} <= named_options(type(operation), decide(operation, request))
