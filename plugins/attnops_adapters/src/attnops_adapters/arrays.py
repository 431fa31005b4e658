"""Arrays of other frameworks in the shapes and dtypes of attnops' operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike


def promoted(arrays: tuple[ArrayLike, ...], dtype: DTypeLike | None) -> tuple[jax.Array, ...]:
    """The arrays in one floating-point dtype: the given one, or JAX's promotion of their dtypes."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.promote_types(dtype, jnp.float32)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def boolean(mask: ArrayLike) -> jax.Array:
    """A mask as a boolean array, True where it is not 0, such as for Flax's float32 masks of 0 and 1."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == bool else mask != 0


def flattened(x: jax.Array, kept: int) -> jax.Array:
    """All axes except the last ``kept`` joined to one axis, of size 1 if there is none."""
    return x.reshape(math.prod(x.shape[: x.ndim - kept]), *x.shape[x.ndim - kept :])


def flattened_scores(name: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """An array that broadcasts to [*batch, H, T, S], as [1 or prod(batch), 1 or H, 1 or T, 1 or S].

    Raises:
        ValueError: the array has more dimensions, or its batch does not broadcast.
    """
    rank = len(batch) + 3
    if x.ndim > rank:
        raise ValueError(
            f"{name} has shape {x.shape}, of {x.ndim} dimensions, but must broadcast to the scores' [batch..., heads,"
            f" queries, keys], of {rank}, with the query's batch {batch}"
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    lead = x.shape[: len(batch)]
    if all(size == 1 for size in lead):
        return x.reshape(1, *x.shape[-3:])
    if any(size not in (1, whole) for size, whole in zip(lead, batch, strict=True)):
        raise ValueError(f"{name} has shape {x.shape}, whose first dimensions must be 1 or the query's batch {batch}")
    return flattened(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), 3)


def mapped_over_heads(
    attend: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array, scores: dict[str, jax.Array]
) -> jax.Array:
    """Attention with a separate call, under `jax.vmap`, for each row of the batch and each query head.

    Args:
        attend: a function of query [1, T, 1, D], key [1, S, 1, D], value [1, S, 1, Dv], and by name the slices
            [1, 1, T, S] of ``scores``; returns [1, T, 1, Dv].
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        scores: a dict of arrays that broadcast to [B, H, T, S].

    Returns:
        [B, T, H, Dv].
    """
    (B, T, H, D), K = query.shape, key.shape[2]
    for name, x in scores.items():
        if x.shape[1] not in (1, H):
            raise ValueError(f"{name} has shape {x.shape}, with {x.shape[1]} heads, but must have 1 or H={H}")
    if K == 0 or H % K:
        raise ValueError(f"query has {H} heads and key {K}; the key's must divide the query's")

    def split(x: jax.Array) -> jax.Array:
        b, h, *lengths = x.shape
        return x.reshape(b, *((1, 1) if h == 1 else (K, H // K)), *lengths)

    grouped = {name: split(x) for name, x in scores.items()}
    # An axis of size 1 is the same for all slices: it is removed, and not mapped over.
    axes = {name: [None if size == 1 else 0 for size in x.shape[:3]] for name, x in grouped.items()}
    kept = {name: x.squeeze(tuple(i for i in range(3) if x.shape[i] == 1)) for name, x in grouped.items()}

    def head(q: jax.Array, k: jax.Array, v: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
        sliced = {name: x[None, None] for name, x in given.items()}
        return attend(q[None, :, None], k[None, :, None], v[None, :, None], **sliced)[0, :, 0]

    mapped: Callable[..., jax.Array] = head
    for level, kv_axis in ((2, None), (1, 0), (0, 0)):
        mapped = jax.vmap(mapped, in_axes=(0, kv_axis, kv_axis, {name: x[level] for name, x in axes.items()}))
    heads_first = query.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4)
    out = mapped(heads_first, key.swapaxes(1, 2), value.swapaxes(1, 2), kept)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)
