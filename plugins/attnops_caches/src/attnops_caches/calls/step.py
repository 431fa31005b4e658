"""`attnops.OperationImpl.step` over a cache: the cache with the new tokens, and attention over it.

A reader with `CacheReader.step` writes the tokens in the kernel that attends; on a mesh, each device to its shard of
the cache. The tokens are appended before if the mesh shards the context, if it shards kv heads and the query's heads
differently, or if rows are packed and it shards the cache's rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp

from attnops.dispatch.binding import check_array, swap_heads
from attnops.dispatch.decision import decide
from attnops.kernels.nograd import without_gradient
from attnops_caches.calls.bind import NO_GRADIENT
from attnops_caches.calls.on_mesh import may_step, run_over_cache
from attnops_caches.calls.reader import attention_request, step_reasons

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.output import OperationOutput
    from attnops_caches.base import CacheType
    from attnops_caches.pending import Pending

PendingType = TypeVar("PendingType", bound="Pending[Any]")


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
    cache.check_layer()
    given, T = dict(options), length_of(operation, key) or 1  # a key without tokens is refused below
    lengths, rows = (given.pop(name, None) for name in ("query_lengths", "rows"))
    output, pending = cache.pending(T, lengths, rows).step(operation, query, key, value, given)
    return output, pending.cache


def step_pending(
    pending: PendingType,
    operation: OperationImpl,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    options: Mapping[str, Any],
) -> tuple[OperationOutput, PendingType]:
    """See `attnops.OperationImpl.step`: writes the tokens of one layer, see `Pending.layer`, and attends to it.

    Raises:
        ValueError: of several layers none was chosen; a key or query of another length than the append; see also
            `Cache.append`.
    """
    if operation.metadata.layout == "BHTD":
        key = swap_heads("key", check_array("key", key))
        value = None if value is None else swap_heads("value", check_array("value", value))
    given = pending.given(key, value)
    if options.get("mask") is None and pending.rows is None and pending.T > 1:
        _warn_of_later_tokens()
    call = operation.prepare(query, pending, **options)
    one, placement = pending.one, pending.cache.placement
    is_sharded = placement is not None and (placement.slots or (pending.rows is not None and placement.batch))
    if one.is_stored and not is_sharded:
        chosen = operation.chosen(call)
        forward = decide(chosen, request := attention_request(call))
        if not step_reasons(chosen, forward, request) and may_step(call.boundary, one):
            output, one = run_over_cache(chosen, forward, call, without_gradient((given,), NO_GRADIENT)[0])
            return chosen.finish(call, output), pending.written(one)
    one = one.with_tokens(given)
    call = call._replace(args=(call.args[0], without_gradient((one,), NO_GRADIENT)[0]))
    return operation.run(call), pending.written(one)


def length_of(operation: OperationImpl, x: ArrayLike) -> int | None:
    """The length of queries or keys as a caller gives them; None if they have another rank than 4."""
    shape = jnp.shape(x)
    return shape[2 if operation.metadata.layout == "BHTD" else 1] if len(shape) == 4 else None


@functools.cache  # once a process, and not at each call of a loop
def _warn_of_later_tokens() -> None:
    warnings.warn(
        "op.step of several tokens without a mask: each query also sees the tokens after it; pass mask=Causal() for a "
        "language model, or mask=Full() for attention in both directions",
        UserWarning,
        stacklevel=2,
    )
