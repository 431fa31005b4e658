"""The run of a call over a cache on one device: in place, or on the arrays of ``cache.read()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dispatch import border
from attnops.dispatch.binding import shapes_of
from attnops.dispatch.call import Call
from attnops.dispatch.result import check_output
from attnops.output import OperationOutput
from attnops.softmax import PartialSoftmax
from attnops_caches.calls.reader import attention_request, cache_of, in_place_reasons, reader_of
from attnops_caches.masks.packed import by_query
from attnops_caches.masks.slots import by_arrays
from attnops_caches.scores import SlotBias

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops_caches.base import Cache
    from attnops_caches.store import GivenTokens


def run_on_device(
    operation: OperationImpl, forward: str, call: Call, new: GivenTokens | None = None
) -> tuple[OperationOutput, Cache]:
    """Attention over a cache, and the cache with the new tokens of a step, which the same kernel writes, if any."""
    query, cache = call.args
    if new is None and in_place_reasons(operation, forward, attention_request(call)):
        return _over_arrays(operation, call), cache
    reader = reader_of(operation, forward)
    assert reader is not None
    if new is None:
        return reader.attend(operation, query, cache, **call.options), cache
    return reader.step(operation, query, cache, cache.new_tokens(new), **call.options)


def partial_on_device(operation: OperationImpl, forward: str, call: Call) -> PartialSoftmax:
    """The partial softmax over the keys that the cache has; the call is without sinks, ``return_lse`` and weights."""
    if in_place_reasons(operation, forward, attention_request(call)):
        args, options = arrays_of(call)
        return _in_bthd(operation).partial(*args, **options)
    call = call._replace(options=call.options | {"return_lse": True})
    output, _ = run_on_device(operation, forward, call)
    check_output(type(operation).__name__, shapes_of(call), call.options, output)
    assert output.logsumexp is not None
    out = output.attention_outputs.astype(jnp.float32)
    return PartialSoftmax(out, output.logsumexp, jnp.zeros_like(output.logsumexp), output.max_logits)


def arrays_of(call: Call) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """Query, key and value, and the options, of the same call on the arrays of ``cache.read()``; layout "BTHD"."""
    query, cache = call.args
    keys, values, _, _ = cache.read()
    request = attention_request(call)
    for name, x, d in (("keys", keys, request.head_dim), ("values", values, request.value_head_dim)):
        wanted = cache.batch, cache.length, request.kv_heads, d
        if tuple(x.shape) != wanted:
            raise ValueError(
                f"{type(cache).__name__}.read() returned {name} of shape {tuple(x.shape)}, but its batch, length, "
                f"kv_heads and head dims are {wanted}: they must be equal"
            )
    if cache_of(request).is_packed:
        keys, values = (x.reshape(1, -1, *x.shape[2:]) for x in (keys, values))
    options = dict(call.options) | {"mode": request.mode}
    shape = request.batch, request.heads, request.query_length, request.key_length
    if "mask" in options:
        options["mask"] = by_arrays(by_query(options["mask"], shape))
    bias = options.get("bias")
    if isinstance(bias, SlotBias):
        array = bias.array(*shape)
        options["bias"] = bias.score_fn() if array is None else array
    return (query, keys, values), options


def _over_arrays(operation: OperationImpl, call: Call) -> OperationOutput:
    (query, keys, values), options = arrays_of(call)
    finite = jnp.isfinite(values) if cache_of(attention_request(call)).is_packed else None
    values = values if finite is None else jnp.where(finite, values, 0)
    of_arrays = _in_bthd(operation)
    result: OperationOutput = of_arrays.run(of_arrays.prepare(query, keys, values, **options))
    if finite is None:
        return result
    return result.replace(attention_outputs=_not_finite(call, result.attention_outputs, finite))


def _not_finite(call: Call, out: jax.Array, finite: jax.Array) -> jax.Array:
    """The output of packed rows [1, N, H, Dv], NaN where a query sees a value that is not finite.

    The keys of all rows are in one softmax, in which 0 · NaN would reach the queries of other rows: ``out`` is computed
    with 0 in place of values that are not ``finite``, bool [1, B · S, K, Dv].
    """
    _, N, H, _ = out.shape
    _, S, K, _ = finite.shape

    def poisoned(out: jax.Array) -> jax.Array:
        sees = jnp.broadcast_to(call.options["mask"].dense(1, H, N, S), (1, H, N, S)).reshape(K, H // K, N, S)
        count = jnp.einsum("kgts,skd->tkgd", sees.astype(jnp.float32), (~finite[0]).astype(jnp.float32))
        return jnp.where(count.reshape(out.shape) > 0, jnp.array(jnp.nan, out.dtype), out)

    if not isinstance(finite, jax.core.Tracer):  # `lax.cond` would compile `poisoned` in each call
        return out if finite.all() else poisoned(out)
    return lax.cond(finite.all(), lambda out: out, poisoned, out)  # type: ignore[no-any-return]


def _in_bthd(operation: OperationImpl) -> OperationImpl:
    """The operation in the layout "BTHD", which a cache's arrays have in any case."""
    if operation.metadata.layout == "BTHD":
        return operation
    return border.make(type(operation), operation.metadata.replace(layout="BTHD"))  # type: ignore[return-value]
