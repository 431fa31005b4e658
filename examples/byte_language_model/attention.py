"""Attention over packed rows by an operation, and a variant with other rounding errors, for comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import attnops
from attnops.masks import Causal, Segments
from attnops.sharding import create_mesh

# Hashable, as it is static under `jit`: q [B, T, H, D], k and v [B, T, K, D], segments [B, T] integers -> [B, T, H, D].
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def create_operation(name: str, block: int | None = None) -> attnops.OperationImpl:
    """The installed operation of this name, with tiles of ``block`` queries and keys where it has tiles.

    Raises:
        UnknownOperationError: no installed distribution has the operation.
        UnsupportedError: the operation is not attention of query, key and value.
    """
    # `ring` is for sharded sequences: it gets a mesh of all devices.
    mesh = create_mesh((-1,), ("sp",)) if name.rpartition(":")[2] == "ring" else None
    # An operation that can't serve this model must raise: otherwise the curve of the native forward would be shown
    # under its name.
    metadata = attnops.OperationMetadata(on_unsupported="error", block_q=block, block_k=block, mesh=mesh)
    operation = attnops.OperationRegistry.create(name, metadata)
    if not isinstance(operation, attnops.OperationImpl):
        raise attnops.UnsupportedError(f"{type(operation).__name__} needs more arguments than query, key and value")
    return operation


@functools.cache  # equal operations give the same function, which is then compiled once
def packed(operation: attnops.OperationImpl) -> Attention:
    """The attention that the model is trained with: each token sees itself and those before it in its document."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        return operation(query, key, value, mask=Causal() & Segments(segments)).attention_outputs

    return attend


@functools.cache
def packed_in_reverse(operation: attnops.OperationImpl) -> Attention:
    """`packed` with keys and values laid out from the last to the first, and so summed in another order.

    In exact arithmetic both are equal; only rounding differs, as it does between implementations.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        positions = jnp.arange(key.shape[1])[::-1]
        mask = Causal().at(kv_positions=positions) & Segments(segments, segments[:, ::-1])
        return operation(query, key[:, ::-1], value[:, ::-1], mask=mask).attention_outputs

    return attend
