"""What a cache holds, and tokens that are not written yet."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax

from attnops.exported import serialised_tuple
from attnops_caches.store import Pieces

CacheOf = TypeVar("CacheOf")


@serialised_tuple
class Contents(NamedTuple):
    """What a cache holds, by slot.

    Attributes:
        keys: [B, S, K, D], dequantised, of the cache's dtype.
        values: [B, S, K, Dv], dequantised, of the cache's dtype.
        positions: the tokens' positions in their sequences, int32 [B, S].
        held: whether the slot holds a token, bool [B, S]; the others may hold anything, NaN too.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    held: jax.Array


@serialised_tuple
class NewTokens(NamedTuple):
    """New tokens that are not written yet.

    Attributes:
        tokens: what is written to each array of the `Store`, by its name: tokens as they are stored, [B, K, T, d], and
            scales by token, [B, K, T]; for packed rows [1, K, N, d] and [1, K, N].
        first: the slot of each row's first new token, int32 [B]; in a ring, slot 0 follows the last slot.
        size: how many tokens of each row fit, int32 [B].
        blocks: the blocks that each row's tokens go to, in order, int32 [B, blocks].
        starts: for packed rows, the index of each row's first token among the N, int32 [B]; None for a batch.
    """

    tokens: dict[str, jax.Array]
    first: jax.Array
    size: jax.Array
    blocks: jax.Array
    starts: jax.Array | None = None


@serialised_tuple
class Pending(NamedTuple, Generic[CacheOf]):
    """An append whose tokens are not written yet.

    Attributes:
        cache: its lengths are those after the append, but its arrays lack the tokens: a kernel that writes them, or
            `StoredCache.write_new`, makes it a cache to read.
        new: the tokens.
    """

    cache: CacheOf
    new: NewTokens


class Planned(NamedTuple):
    """Where new tokens go, and what the rows are after they are written.

    Attributes:
        pieces: where they go; ``row`` is a row of the cache, and ``first`` is 0 for the row's first new token.
        fit: how many of each row's tokens fit, int32 [B].
        dropped: whether some token of the row did not fit, bool [B].
        starts: for packed rows, the index of each row's first token among the N, int32 [B]; None for a batch.
    """

    pieces: Pieces
    fit: jax.Array
    dropped: jax.Array
    starts: jax.Array | None
