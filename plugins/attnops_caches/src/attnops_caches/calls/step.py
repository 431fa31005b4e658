"""`attnops.OperationImpl.step` over a cache: the cache with the new tokens, and attention over it.

A reader with `CacheReader.step` writes the tokens in the kernel that attends. Of a cache that `sharded` placed on a
mesh each device writes to its part. The tokens are appended first where the context is sharded, where the kv heads have
other mesh axes than the query's, and, of packed rows, where the cache's rows are on several devices.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops.dispatch.binding import check_array, swap_heads
from attnops.dispatch.decision import decide
from attnops.kernels.nograd import without_gradient
from attnops.sharding.placing import whole
from attnops_caches.calls.bind import NO_GRADIENT, attention_request
from attnops_caches.calls.on_mesh import may_step
from attnops_caches.calls.reader import may_write, step_reasons
from attnops_caches.calls.run import step_over_cache

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.output import OperationOutput
    from attnops_caches.base import Cache, CacheType
    from attnops_caches.rows import Rows


def step(
    operation: OperationImpl,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    cache: CacheType,
    query_lengths: ArrayLike | None,
    rows: Rows | None,
    options: Mapping[str, Any],
) -> tuple[OperationOutput, CacheType]:
    """See `Cache.step`, whose arguments these are; ``options`` are the other options of the call."""
    if options.get("mask") is None and rows is None and _tokens(operation.metadata.layout, key) > 1:
        _warn_of_later_tokens()
    if (written := fused(operation, query, key, value, cache, query_lengths, rows, options)) is not None:
        return written
    grown, lengths = grow(operation.metadata.layout, query, key, value, cache, query_lengths, rows)
    call = operation.prepare(query, grown, query_lengths=query_lengths, rows=rows, _lengths=lengths, **options)
    result: OperationOutput = operation.run(call)
    return result, grown


def _tokens(layout: str, key: ArrayLike) -> int:
    shape = jnp.shape(key)
    return shape[2 if layout == "BHTD" else 1] if len(shape) == 4 else 1


@functools.cache  # once a process, and not at each call of a loop
def _warn_of_later_tokens() -> None:
    warnings.warn(
        "op.step of several tokens without a mask: each query also sees the tokens after it; pass mask=Causal() for a "
        "language model, or mask=Full() for attention in both directions",
        UserWarning,
        stacklevel=2,
    )


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
        query: see `Cache.step`.
        key: see `Cache.step`.
        value: see `Cache.step`.
        cache: before these tokens.
        query_lengths: see `Cache.step`.
        rows: see `Cache.step`.

    Raises:
        ValueError: a query of another length than the key; see also `Cache.append`.
    """
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
    options: Mapping[str, Any],
) -> tuple[OperationOutput, CacheType] | None:
    """A step whose kernel writes the tokens; None where there is no such kernel.

    Args:
        operation: the operation.
        query: see `Cache.step`.
        key: see `Cache.step`.
        value: see `Cache.step`.
        cache: before these tokens.
        query_lengths: see `Cache.step`.
        rows: see `Cache.step`.
        options: of the call.
    """
    layout = operation.metadata.layout
    placement = cache.placement
    is_cut = placement is not None and (
        placement.slots is not None or (rows is not None and placement.batch is not None)
    )
    if not cache.is_stored or is_cut or not may_write(operation):
        return None
    key, value = _in_bthd(layout, key, value)
    stored: Any = cache
    after, new = stored.pending(key, value, query_lengths, rows)
    T = jnp.shape(key)[1]
    _check_length(layout, query, T)
    lengths = _wanted_lengths(cache, T, query_lengths, rows)
    call = operation.prepare(query, after, query_lengths=query_lengths, rows=rows, _lengths=lengths, **options)
    request = attention_request(call)
    operation = operation.chosen(call)
    forward = decide(operation, request)
    if step_reasons(operation, forward, request):
        return None
    boundary = call.boundary
    if (boundary is not None or placement is not None) and not (boundary and may_step(boundary, cache)):
        return None
    new = without_gradient((new,), NO_GRADIENT)[0]
    output, written = step_over_cache(operation, forward, call, new)
    return operation.finish(call, output), written  # type: ignore[return-value]
