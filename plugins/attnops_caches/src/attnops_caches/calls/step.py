"""`attnops.OperationImpl.step` over a cache: the cache with the new tokens, and attention over it.

A reader with `CacheReader.step` writes the tokens in the kernel that attends; on a mesh, each device to its shard of
the cache. The tokens are appended before if the mesh shards the context, if it shards kv heads and the query's heads
differently, or if rows are packed and it shards the cache's rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

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
    from attnops.dispatch.call import Call
    from attnops.output import OperationOutput
    from attnops_caches.base import Cache
    from attnops_caches.rows import Rows

CacheType = TypeVar("CacheType", bound="Cache")


class Step(NamedTuple, Generic[CacheType]):
    """The arguments of `Cache.step`.

    Attributes:
        operation: what attends.
        query: [B, T, H, D] in the operation's layout; for packed rows [1, N, H, D].
        key: [B, T, K, D]; for packed rows [1, N, K, D]; as `step` is given it, in the operation's layout.
        value: [B, T, K, Dv], likewise; None for a cache that stores none.
        cache: the cache before these tokens.
        query_lengths: how many of each row's tokens are real, integers [B]; None for all.
        rows: which packed tokens belong to which row; None for a batch.
        options: the other options of the call.
    """

    operation: OperationImpl
    query: ArrayLike
    key: ArrayLike
    value: ArrayLike | None
    cache: CacheType
    query_lengths: ArrayLike | None
    rows: Rows | None
    options: Mapping[str, Any]

    def call(self, cache: CacheType) -> Call:
        """The call over the cache with the tokens; raises a `ValueError` unless there is one query for each."""
        query, T = jnp.shape(self.query), jnp.shape(self.key)[1]
        length = query[2 if self.operation.metadata.layout == "BHTD" else 1] if len(query) == 4 else T
        if length != T:
            raise ValueError(
                f"query has length {length}, but key has length {T}: they must be equal, since a step is of the "
                f"queries of the tokens that it appends; else append them, and call op(query, cache)"
            )
        given = self.query_lengths, self.rows
        lengths = _wanted_lengths(self.cache, T, *given)
        return self.operation.prepare(self.query, cache, query_lengths=given[0], rows=given[1], _lengths=lengths,
                                      **self.options)  # fmt: skip


def step(given: Step[CacheType]) -> tuple[OperationOutput, CacheType]:
    """The output and the cache of `Cache.step`.

    Raises:
        ValueError: a query of another length than the key; see also `Cache.append`.
    """
    if given.operation.metadata.layout == "BHTD":
        key, value = swap_heads("key", check_array("key", given.key)), given.value
        value = None if value is None else swap_heads("value", check_array("value", value))
        given = given._replace(key=key, value=value)
    shape = jnp.shape(given.key)
    if given.options.get("mask") is None and given.rows is None and len(shape) == 4 and shape[1] > 1:
        _warn_of_later_tokens()
    return fused(given) or appended(given)


@functools.cache  # once a process, and not at each call of a loop
def _warn_of_later_tokens() -> None:
    warnings.warn(
        "op.step of several tokens without a mask: each query also sees the tokens after it; pass mask=Causal() for a "
        "language model, or mask=Full() for attention in both directions",
        UserWarning,
        stacklevel=2,
    )


def appended(given: Step[CacheType]) -> tuple[OperationOutput, CacheType]:
    """A step that appends the tokens, and attends over them afterwards."""
    grown = given.cache.append(given.key, given.value, given.query_lengths, given.rows)
    result: OperationOutput = given.operation.run(given.call(grown))
    return result, grown


def _wanted_lengths(cache: Cache, T: int, query_lengths: ArrayLike | None, rows: Rows | None) -> jax.Array:
    """The rows' lengths with T new tokens, as if all of them fitted, int32 [B].

    The positions of queries are counted from these, so that they are not shifted in a row that overflows.
    """
    if rows is None:
        return cache.lengths + cache.row_lengths("query_lengths", query_lengths, T)
    runs = rows.checked(T, cache.batch)
    # Not a scatter, which explicit mesh axes do not allow.
    is_of_row = jnp.arange(cache.batch, dtype=jnp.int32)[:, None] == runs.slots
    return whole(cache.lengths) + jnp.where(is_of_row, runs.first_counts(T, cache.batch), 0).sum(1, dtype=jnp.int32)


def fused(given: Step[CacheType]) -> tuple[OperationOutput, CacheType] | None:
    """A step whose kernel writes the tokens; None where there is no such kernel."""
    operation, cache, placement = given.operation, given.cache, given.cache.placement
    is_sharded = placement is not None and (
        placement.slots is not None or (given.rows is not None and placement.batch is not None)
    )
    if not cache.is_stored or is_sharded or not may_write(operation):
        return None
    stored: Any = cache
    pending = stored.pending(given.key, given.value, given.query_lengths, given.rows)
    call = given.call(pending.cache)
    request = attention_request(call)
    operation = operation.chosen(call)
    forward = decide(operation, request)
    if step_reasons(operation, forward, request):
        return None
    boundary = call.boundary
    if (boundary is not None or placement is not None) and not (boundary and may_step(boundary, cache)):
        return None
    new = without_gradient((pending.new,), NO_GRADIENT)[0]
    output, written = step_over_cache(operation, forward, call, new)
    return operation.finish(call, output), written  # type: ignore[return-value]
