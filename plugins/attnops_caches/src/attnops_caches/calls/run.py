"""The run of a call over a cache: on one device, or on each device's shard of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

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
from attnops_caches.calls.on_mesh import run_cached
from attnops_caches.calls.reader import cache_of, in_place_reasons, reader_of

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops_caches.base import Cache
    from attnops_caches.store import NewTokens


def run_over_cache(
    operation: OperationImpl, forward: str, call: Call, new: NewTokens | None = None
) -> tuple[OperationOutput, Cache]:
    """Run a call over a cache, and write the new tokens of a step in the same kernel; under a mesh each device does so
    on its shard, see `attnops_caches.calls.on_mesh`.
    """
    if call.boundary is None:
        return _on_device(operation, forward, call, new)
    of_shard = CallOfShard(operation, forward, attention_request(call))
    query, cache = call.args
    output, cache = run_cached(call.boundary, of_shard, query, cache, call.options, new)
    return call.boundary.typed(output), cache


def _on_device(
    operation: OperationImpl, forward: str, call: Call, new: NewTokens | None
) -> tuple[OperationOutput, Cache]:
    """In place, or on the arrays that the cache is read into."""
    query, cache = call.args
    if new is None and in_place_reasons(operation, forward, attention_request(call)):
        return _over_arrays(operation, call), cache
    reader = reader_of(operation, forward)
    assert reader is not None
    if new is None:
        return reader.attend(operation, query, cache, **call.options), cache
    result: tuple[OperationOutput, Cache] = reader.step(operation, query, cache, new, **call.options)
    return result


def _over_arrays(operation: OperationImpl, call: Call) -> OperationOutput:
    args, options = arrays_of(call)
    of_arrays = _in_bthd(operation)
    if not cache_of(attention_request(call)).is_packed:
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


class CallOfShard(NamedTuple):
    """A call over a cache as each device computes it from its query, its shard of the cache, and options.

    ``request`` is that of the whole call.
    """

    operation: OperationImpl
    forward: str
    request: AttentionRequest

    @property
    def key(self) -> Hashable | None:
        """All that it depends on besides its arguments, the key of cached programs; None: they are not cached."""
        key = self.operation.program_key(self.forward)
        return None if key is None else (key, self.forward, self.request)

    def run(
        self, query: jax.Array, cache: Cache, options: dict[str, Any], new: NewTokens | None = None
    ) -> tuple[OperationOutput, Cache]:
        """Attention over all keys of its rows, and the shard with new tokens written."""
        call = self._call(query, cache, options)
        output, cache = _on_device(self.operation, self.forward, call, new)
        return check_output(type(self.operation).__name__, shapes_of(call), options, output), cache

    def partial(self, query: jax.Array, cache: Cache, options: dict[str, Any]) -> PartialSoftmax:
        """The partial softmax over the keys that it has; options without sinks and flags."""
        call = self._call(query, cache, options)
        if in_place_reasons(self.operation, self.forward, attention_request(call)):
            args, given = arrays_of(call)
            return _in_bthd(self.operation).partial(*args, **given)
        output, _ = self.run(query, cache, options | {"return_lse": True})
        assert output.logsumexp is not None
        out = output.attention_outputs.astype(jnp.float32)
        return PartialSoftmax(out, output.logsumexp, jnp.zeros_like(output.logsumexp))

    def _call(self, query: jax.Array, cache: Cache, options: dict[str, Any]) -> Call:
        source = cache_of(self.request)
        local = self.request.replace(
            source=dataclasses.replace(source, rows=cache.batch),
            batch=query.shape[0], heads=query.shape[2], kv_heads=cache.kv_heads,
            key_length=cache.length * (cache.batch if source.is_packed else 1),
            mask_structure=self.request.mask_structure, options=self.request.options & frozenset(options),
        )  # fmt: skip
        return Call(local, (query, cache), options)


def _in_bthd(operation: OperationImpl) -> OperationImpl:
    """The operation in the layout "BTHD", which a cache's arrays have in any case."""
    metadata = operation.metadata
    if metadata.layout == "BTHD":
        return operation
    made: Any = border.make(type(operation), metadata.replace(layout="BTHD"))
    return made  # type: ignore[no-any-return]
