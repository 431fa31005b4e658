"""The run of a call over a cache: on one device, or on each device's shard of the cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dispatch import border
from attnops.dispatch.binding import shapes_of
from attnops.dispatch.call import Call
from attnops.dispatch.request import AttentionRequest
from attnops.dispatch.result import check_output
from attnops.output import OperationOutput
from attnops.softmax import PartialSoftmax
from attnops_caches.calls.bind import arrays_of, attention_request
from attnops_caches.calls.on_mesh import CachedForward, run_cached
from attnops_caches.calls.reader import cache_of, in_place_reasons, reader_of

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops_caches.base import Cache
    from attnops_caches.tokens import NewTokens


def run_over_cache(operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
    """Run a call over a cache; under a mesh each device runs it on its shard, see `attnops_caches.calls.on_mesh`."""
    if call.boundary is None:
        return _on_device(operation, forward, call)
    return _sharded(operation, forward, call, None)[0]


def step_over_cache(
    operation: OperationImpl, forward: str, call: Call, new: NewTokens
) -> tuple[OperationOutput, Cache]:  # fmt: skip
    """Run a step whose kernel writes the new tokens; under a mesh each device writes those of its shard."""
    if call.boundary is not None:
        return _sharded(operation, forward, call, new)
    reader = reader_of(operation, forward)
    assert reader is not None
    query, cache = call.args
    result: tuple[OperationOutput, Cache] = reader.step(operation, query, cache, new, **call.options)
    return result


def _sharded(
    operation: OperationImpl, forward: str, call: Call, new: NewTokens | None
) -> tuple[OperationOutput, Cache]:  # fmt: skip
    assert call.boundary is not None
    request = attention_request(call)
    key = operation.program_key(forward)
    shard = CachedForward(
        functools.partial(_whole, operation, forward, request),
        functools.partial(_partial, operation, forward, request),
        functools.partial(_stepped, operation, forward, request),
        operation.option_axes,
        None if key is None else (key, forward, request),
    )
    query, cache = call.args
    output, cache = run_cached(call.boundary, shard, query, cache, call.options, cache_of(request).is_packed, new)
    return call.boundary.typed(output), cache


def _on_device(operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
    """In place, or on the arrays that the cache is read into."""
    request = attention_request(call)
    if not in_place_reasons(operation, forward, request):
        reader = reader_of(operation, forward)
        assert reader is not None
        query, cache = call.args
        return reader.attend(operation, query, cache, **call.options)
    args, options = arrays_of(call)
    of_arrays = _in_bthd(operation)
    if not cache_of(request).is_packed:
        result: OperationOutput = of_arrays.run(of_arrays.prepare(*args, **options))
        return result
    query, keys, values = args
    finite = jnp.isfinite(values)
    result = of_arrays.run(of_arrays.prepare(query, keys, jnp.where(finite, values, 0), **options))
    return result.replace(attention_outputs=_not_finite(call, result.attention_outputs, finite))


def _not_finite(call: Call, out: jax.Array, finite: jax.Array) -> jax.Array:
    """The output of packed rows, NaN where a query sees a value that is not finite.

    The keys of all rows are in one softmax, in which 0 · NaN would reach the queries of other rows.

    Args:
        call: a call of packed rows.
        out: [1, N, H, Dv], computed with 0 in place of values that are not finite.
        finite: whether values are finite, bool [1, B · S, K, Dv].
    """
    _, N, H, _ = out.shape
    _, S, K, _ = finite.shape

    def poisoned(out: jax.Array) -> jax.Array:
        sees = jnp.broadcast_to(call.options["mask"].dense(1, H, N, S), (1, H, N, S)).reshape(K, H // K, N, S)
        count = jnp.einsum("kgts,skd->tkgd", sees.astype(jnp.float32), (~finite[0]).astype(jnp.float32))
        return jnp.where(count.reshape(out.shape) > 0, jnp.array(jnp.nan, out.dtype), out)

    if not isinstance(finite, jax.core.Tracer):  # `lax.cond` would compile `poisoned` in each call
        return out if finite.all() else poisoned(out)
    poisoned_out: jax.Array = lax.cond(finite.all(), lambda out: out, poisoned, out)
    return poisoned_out


def _whole(
    operation: OperationImpl, forward: str, request: AttentionRequest, query: jax.Array, cache: Cache,
    options: dict[str, Any],
) -> OperationOutput:  # fmt: skip
    """A device's shard of a call, from its query, cache and options."""
    call = _of_device(request, query, cache, options)
    return _checked(operation, call, _on_device(operation, forward, call))


def _stepped(
    operation: OperationImpl, forward: str, request: AttentionRequest, query: jax.Array, cache: Cache,
    options: dict[str, Any], new: NewTokens,
) -> tuple[OperationOutput, Cache]:  # fmt: skip
    """A device's shard of a step, from its query, cache, options and new tokens."""
    call = _of_device(request, query, cache, options)
    output, cache = step_over_cache(operation, forward, call, new)
    return _checked(operation, call, output), cache


def _partial(
    operation: OperationImpl, forward: str, request: AttentionRequest, query: jax.Array, cache: Cache,
    options: dict[str, Any],
) -> PartialSoftmax:  # fmt: skip
    """The partial softmax over the keys that a device has."""
    call = _of_device(request, query, cache, options)
    if in_place_reasons(operation, forward, attention_request(call)):
        args, given = arrays_of(call)
        return _in_bthd(operation).partial(*args, **given)
    call = call._replace(options=options | {"return_lse": True})
    output = _checked(operation, call, _on_device(operation, forward, call))
    assert output.logsumexp is not None
    out = output.attention_outputs.astype(jnp.float32)
    return PartialSoftmax(out, output.logsumexp, jnp.zeros_like(output.logsumexp))


def _of_device(request: AttentionRequest, query: jax.Array, cache: Cache, options: dict[str, Any]) -> Call:
    source = cache_of(request)
    slots = cache.length * (cache.batch if source.is_packed else 1)
    local = request.replace(
        source=dataclasses.replace(source, rows=cache.batch),
        batch=query.shape[0], heads=query.shape[2], kv_heads=cache.kv_heads, key_length=slots,
        mask_structure=request.mask_structure, options=request.options & frozenset(options),
    )  # fmt: skip
    return Call(local, (query, cache), options)


def _checked(operation: OperationImpl, call: Call, output: OperationOutput) -> OperationOutput:
    return check_output(type(operation).__name__, shapes_of(call), call.options, output)


def _in_bthd(operation: OperationImpl) -> OperationImpl:
    """The operation in the layout "BTHD", which a cache's arrays have in any case."""
    metadata = operation.metadata
    if metadata.layout == "BTHD":
        return operation
    made: Any = border.make(type(operation), metadata.replace(layout="BTHD"))
    return made  # type: ignore[no-any-return]
