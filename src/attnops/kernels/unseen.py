"""Fully masked tokens: keys that no query sees and queries that see no key. They may hold NaN, and results must not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops.masks.base import Mask
from attnops.output import OperationOutput


def zero_unseen(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with 0 for queries that see no key and for keys that no query sees.

    Such tokens may hold NaN, and a kernel that multiplies them by a weight of 0 would return NaN.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        mask: bound; None for none. If it certainly has no fully masked tokens, the arrays are returned unchanged;
            otherwise this needs O(T · S) memory, one byte per element.
    """
    (B, T, H, _), S = query.shape, key.shape[1]
    if mask is None or not mask.has_fully_masked_tokens(T, S):
        return query, key, value
    return zero_masked_tokens(query, key, value, mask.dense(B, H, T, S))


def zero_masked_tokens(
    query: jax.Array, key: jax.Array, value: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`zero_unseen` for booleans ``allowed`` that broadcast to [B, H, T, S]."""
    K = key.shape[2]
    sees = allowed.any(axis=3).swapaxes(1, 2)  # [B, T, H], each 1 or all
    seen = allowed.any(axis=2)  # [B, H, S], each 1 or all
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], K, -1, seen.shape[2]).any(axis=2)
    seen = seen.swapaxes(1, 2)
    return _where(sees, query), _where(seen, key), _where(seen, value)


def repair_empty_rows(output: OperationOutput, mask: Mask | None, key_length: int) -> OperationOutput:
    """A kernel's result with the contract's values for queries that see no key: output and weights 0, others −inf.

    Kernels that mask scores with a large negative number return the mean of the values for such queries. The cotangents
    of these rows are 0; call the kernel with the arrays of `zero_unseen`, so that 0 times its residuals is 0. If it
    returns NaN for these rows, all its gradients are NaN, which can't be repaired outside the kernel.

    Args:
        output: the kernel's output, attention_outputs [B, T, H, Dv].
        mask: bound; None for none. If it may have fully masked tokens, this needs T · S bytes.
        key_length: S.
    """
    B, T, H, _ = output.attention_outputs.shape
    if mask is None or not mask.has_fully_masked_tokens(T, key_length):
        return output
    sees = mask.dense(B, H, T, key_length).any(axis=3)  # [B, H, T], each 1 or all
    weights, by_query = output.attention_weights, (output.logsumexp, output.max_logits)
    return OperationOutput(
        _where(sees.swapaxes(1, 2), output.attention_outputs),
        None if weights is None else _where(sees, weights),
        *jax.tree.map(lambda x: jnp.where(sees, x, -jnp.inf), by_query),
    )


def _where(keep: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(keep[..., None], x, jnp.zeros((), x.dtype))
