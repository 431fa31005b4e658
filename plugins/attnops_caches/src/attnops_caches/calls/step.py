"""`attnops.OperationImpl.step` over a cache: the cache with the new tokens, and attention over it.

A reader with `CacheReader.step` writes the tokens in the kernel that attends; on a mesh, each device to its shard of
the cache. The tokens are appended before if the mesh shards the context, if it shards kv heads and the query's heads
differently, or if rows are packed and it shards the cache's rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.binding import check_array, swap_heads
from attnops.dispatch.decision import decide
from attnops.dispatch.platforms import FORWARD_CHAIN
from attnops.kernels.nograd import without_gradient
from attnops.sharding.placing import whole
from attnops_caches.calls.bind import NO_GRADIENT
from attnops_caches.calls.on_mesh import may_step, run_over_cache
from attnops_caches.calls.reader import attention_request, reader_of, step_reasons
from attnops_caches.rows import Rows, check_rows

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.call import Call
    from attnops.output import OperationOutput
    from attnops_caches.base import Cache, CacheType


def step(
    cache: CacheType,
    operation: OperationImpl,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    options: Mapping[str, Any],
) -> tuple[OperationOutput, CacheType]:
    """See `attnops.OperationImpl.step`: with ``rows`` query, key and value are [1, N, …], one batch of N tokens.

    Queries of tokens that did not fit see the tokens that did; ``overflowed`` says so.

    Raises:
        ValueError: a query of another length than the key; see also `Cache.append`.
    """
    if is_bhtd := operation.metadata.layout == "BHTD":
        key = swap_heads("key", check_array("key", key))
        value = None if value is None else swap_heads("value", check_array("value", value))
    query_lengths, rows = options.get("query_lengths"), options.get("rows")
    shape = jnp.shape(key)
    if options.get("mask") is None and rows is None and len(shape) == 4 and shape[1] > 1:
        _warn_of_later_tokens()

    def call(grown: Cache) -> Call:
        T, of_query = shape[1], jnp.shape(query)
        if len(of_query) == 4 and (length := of_query[2 if is_bhtd else 1]) != T:
            raise ValueError(
                f"query has length {length}, but key has length {T}: they must be equal, since a step is of the "
                f"queries of the tokens that it appends; else append them, and call op(query, cache)"
            )
        lengths = _wanted_lengths(cache, T, query_lengths, rows)
        return operation.prepare(query, grown, **options, _lengths=lengths)

    tokens = key, value, query_lengths, rows
    if _may_fuse(operation, cache, rows):
        stored: Any = cache
        grown, new = stored.pending(*tokens)
        fused = call(grown)
        chosen = operation.chosen(fused)
        forward = decide(chosen, request := attention_request(fused))
        if not step_reasons(chosen, forward, request) and may_step(fused.boundary, cache):
            output, written = run_over_cache(chosen, forward, fused, without_gradient((new,), NO_GRADIENT)[0])
            # What is not written is as it was, also for `StoredCache.with_layer`.
            return chosen.finish(fused, output), dataclasses.replace(grown, store=written.store)  # type: ignore
    after = cache.append(*tokens)
    return operation.run(call(after)), after


@functools.cache  # once a process, and not at each call of a loop
def _warn_of_later_tokens() -> None:
    warnings.warn(
        "op.step of several tokens without a mask: each query also sees the tokens after it; pass mask=Causal() for a "
        "language model, or mask=Full() for attention in both directions",
        UserWarning,
        stacklevel=2,
    )


def _wanted_lengths(cache: Cache, T: int, query_lengths: ArrayLike | None, rows: Rows | None) -> jax.Array:
    """The rows' lengths with T new tokens, as if all of them fitted, int32 [B].

    The positions of queries are counted from these, so that they are not shifted in a row that overflows.
    """
    if rows is None:
        return cache.lengths + cache.row_lengths("query_lengths", query_lengths, T)
    runs = check_rows(rows, T, cache.batch)
    # Not a scatter, which explicit mesh axes do not allow.
    is_of_row = jnp.arange(cache.batch, dtype=jnp.int32)[:, None] == runs.slots
    return whole(cache.lengths) + jnp.where(is_of_row, runs.first_counts(T, cache.batch), 0).sum(1, dtype=jnp.int32)


def _may_fuse(operation: OperationImpl, cache: Cache, rows: Rows | None) -> bool:
    """Whether a kernel may write the tokens; False is certain."""
    placement = cache.placement
    is_sharded = placement is not None and (placement.slots or (rows is not None and placement.batch))
    if is_sharded or not cache.is_stored:
        return False
    if type(operation).chosen is not OperationImpl.chosen:  # `auto`: it picks by the request
        return (operation.metadata.platform or jax.default_backend()) != "cpu"
    readers = (reader_of(operation, forward) for forward in {*itertools.chain(*FORWARD_CHAIN.values())})
    return any(reader is not None and reader.writes for reader in readers)
