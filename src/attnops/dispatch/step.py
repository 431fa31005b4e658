"""The first half of `OperationImpl.step`: a cache with the tokens of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from attnops.caches.base import Cache, CacheType
from attnops.caches.packed import Rows
from attnops.dispatch.binding import check_array, swap_heads

if TYPE_CHECKING:
    from jax.typing import ArrayLike


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
    if layout == "BHTD":
        key = swap_heads("key", check_array("key", key))
        value = None if value is None else swap_heads("value", check_array("value", value))
    grown = cache.append(key, value, query_lengths, rows)
    T = jnp.shape(key)[1]
    shape = jnp.shape(query)
    length = shape[2 if layout == "BHTD" else 1] if len(shape) == 4 else T
    if length != T:
        raise ValueError(
            f"query has length {length}, but key has length {T}: they must be equal, since a step is of the queries of "
            f"the tokens that it appends; else append them, and call op(query, cache)"
        )
    if rows is None:
        return grown, cache.lengths + cache.row_lengths("query_lengths", query_lengths, T)
    runs = rows.checked(T, cache.batch)
    slots = jnp.clip(runs.slots, 0, cache.batch - 1)
    return grown, jnp.asarray(cache.lengths).at[slots].add(runs.first_counts(T, cache.batch))
