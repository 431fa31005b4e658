"""`OperationImpl.step`: a cache with the tokens of a step, and attention over it.

A class writes the tokens itself, in the kernel that attends, by a method ``stepped_<forward>`` next to
``cached_<forward>``, for requests for which ``step_reasons(forward, request)`` is empty, see `Explanation`::

    def stepped_tpu(self, query, cache, new, *, mask, bias=None, ...) -> tuple[OperationOutput, Cache]

The cache has the lengths that it has afterwards, but not the tokens, which are ``new``, an `attnops.caches.NewTokens`.
Of a cache that `sharded` placed on a mesh each device writes to its part; one whose context is cut, or whose kv heads
have other mesh axes than the query's, is appended to and then attended over. So are packed rows of a cache whose rows
are on several devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops.caches.base import Cache, CacheType
from attnops.caches.packed import Rows
from attnops.dispatch.binding import check_array, swap_heads
from attnops.dispatch.cached import NO_GRADIENT
from attnops.dispatch.operation import decide
from attnops.dispatch.over_cache import step_over_cache
from attnops.dispatch.request import AttentionRequest
from attnops.kernels.nograd import without_gradient
from attnops.partition.cached import may_step
from attnops.sharding.placing import whole

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.output import OperationOutput


def grow(
    layout: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cache: CacheType,
    query_lengths: ArrayLike | None,
    rows: Rows | None,
) -> tuple[CacheType, jax.Array]:
    """The cache with new tokens, and its rows' lengths as if all of them fitted, int32 [B].

    The positions of queries go by the latter, so that those of a row that overflows are not shifted.

    Args:
        layout: of query, key and value.
        query: see `OperationImpl.step`.
        key: see `OperationImpl.step`.
        value: see `OperationImpl.step`.
        cache: before these tokens.
        query_lengths: see `OperationImpl.step`.
        rows: see `OperationImpl.step`.

    Raises:
        ValueError: no cache, or a query of another length than the key; see also `Cache.append`.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"cache is a {type(cache).__name__}, but must be an attnops.caches.Cache: op.step(query, key, value, cache)"
        )
    key, value = _in_bthd(layout, key, value)
    grown = cache.append(key, value, query_lengths, rows)
    T = jnp.shape(key)[1]
    _check_length(layout, query, T)
    return grown, _wanted_lengths(cache, T, query_lengths, rows)


def _wanted_lengths(cache: Cache, T: int, query_lengths: ArrayLike | None, rows: Rows | None) -> jax.Array:
    """The rows' lengths with T new tokens, as if all of them fitted."""
    if rows is None:
        return cache.lengths + cache.row_lengths("query_lengths", query_lengths, T)
    runs = rows.checked(T, cache.batch)
    # Not a scatter, which explicit mesh axes do not allow.
    own = jnp.arange(cache.batch, dtype=jnp.int32)[:, None] == runs.slots
    return whole(cache.lengths) + jnp.where(own, runs.first_counts(T, cache.batch), 0).sum(1, dtype=jnp.int32)


def _in_bthd(layout: str, key: ArrayLike, value: ArrayLike | None) -> tuple[ArrayLike, ArrayLike | None]:
    if layout != "BHTD":
        return key, value
    key = swap_heads("key", check_array("key", key))
    return key, None if value is None else swap_heads("value", check_array("value", value))


def _check_length(layout: str, query: ArrayLike, T: int) -> None:
    shape = jnp.shape(query)
    length = shape[2 if layout == "BHTD" else 1] if len(shape) == 4 else T
    if length != T:
        raise ValueError(
            f"query has length {length}, but key has length {T}: they must be equal, since a step is of the queries of "
            f"the tokens that it appends; else append them, and call op(query, cache)"
        )


def fused(
    operation: OperationImpl,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cache: CacheType,
    query_lengths: ArrayLike | None,
    rows: Rows | None,
    options: dict[str, Any],
) -> tuple[OperationOutput, CacheType] | None:
    """A step whose kernel writes the tokens; None where there is no such kernel.

    Args:
        operation: the operation.
        query: see `OperationImpl.step`.
        key: see `OperationImpl.step`.
        value: see `OperationImpl.step`.
        cache: before these tokens.
        query_lengths: see `OperationImpl.step`.
        rows: see `OperationImpl.step`.
        options: of the call.
    """
    layout = operation.metadata.layout
    placement = cache.placement if isinstance(cache, Cache) else None
    is_cut = placement is not None and (
        placement.slots is not None or (rows is not None and placement.batch is not None)
    )
    if not isinstance(cache, Cache) or is_cut or not operation.may_write():
        return None
    key, value = _in_bthd(layout, key, value)
    after, new = cache.pending(key, value, query_lengths, rows)
    T = jnp.shape(key)[1]
    _check_length(layout, query, T)
    lengths = _wanted_lengths(cache, T, query_lengths, rows)
    call = operation.prepare(query, after, query_lengths=query_lengths, rows=rows, lengths=lengths, **options)
    request = call.request
    assert isinstance(request, AttentionRequest)
    operation = operation.chosen(call)
    forward = decide(operation, request)
    if operation.step_reasons(forward, request):
        return None
    if (call.boundary is not None or placement is not None) and not (call.boundary and may_step(call.boundary, cache)):
        return None
    new = without_gradient((new,), NO_GRADIENT)[0]
    output, written = step_over_cache(operation, forward, call, new)
    return operation.finish(call, output), written  # type: ignore[return-value]
