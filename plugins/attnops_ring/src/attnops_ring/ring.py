"""Ring attention: keys and values rotate through all devices (Liu et al. 2023, arXiv:2310.01889).

The exchange has a custom derivative: the forward pass saves only the output and its logsumexp; the backward pass
rotates keys and values again, together with their gradients.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.kernels import cotangents, is_differentiated
from attnops.softmax import Contribution, PartialSoftmax, identity
from attnops_ring.block import Chunks, Extras, Inner, LogSumExp, add, block, block_gradients, concatenate

if TYPE_CHECKING:
    from attnops.typing import Index, Leaf, PyTree

Axis = str | tuple[str, ...]


def rotate(x: Leaf, axis: Axis, shift: int, devices: int) -> PyTree:
    """Sends every array of ``x`` to the device ``shift`` further along the mesh axes, cyclically."""
    pairs = [(i, (i + shift) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ring(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Attention over all keys, inside `jax.shard_map`, without sinks.

    Args:
        inner: how devices compute.
        axis: the mesh axes that shard the sequence.
        hops: the number of devices whose keys a device needs, itself included; all other keys are fully masked.
        query: [B, t, H, D], this device's shard.
        key: [B, s, K, D], this device's shard.
        value: [B, s, K, Dv], this device's shard.
        extras: mask, bias and dropout key, varying over the same mesh axes.
    """
    return _forward(inner, axis, hops, query, key, value, extras)


def _forward(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    n, here = inner.devices, lax.axis_index(axis)
    # Split once here, rather than in every hop.
    queries, keys, values = inner.split(query, key, value)

    def hop(r: Index, state: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        k, v, seen = state
        # Send before computing, so that the computation hides the transfer.
        sent = rotate((k, v), axis, 1, n)
        return (*sent, block(inner, Chunks(queries, k, v), extras, here, (here - r) % n, seen))

    seen = [identity(x, value) for x in queries]
    k, v, seen = lax.fori_loop(0, hops - 1, hop, (keys, values, seen))
    return concatenate(block(inner, Chunks(queries, k, v), extras, here, (here - (hops - 1)) % n, seen))


def _forward_rule(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: PyTree
) -> tuple[PartialSoftmax, tuple[PyTree, ...]]:
    # Residuals must be arrays; a boolean is encoded in the pytree's structure.
    flag = (None,) * is_differentiated(extras.bias)
    query, key, value, extras = custom_vjp_primal_tree_values((query, key, value, extras))
    partial = _forward(inner, axis, hops, query, key, value, extras)
    return partial, (query, key, value, extras, partial, flag)


def _backward_rule(inner: Inner, axis: Axis, hops: int, residuals: PyTree, d_partial: PyTree) -> tuple[PyTree, ...]:
    query, key, value, extras, partial, flag = residuals
    d_out, d_lse = cotangents(d_partial[:2], query)
    n, here = inner.devices, lax.axis_index(axis)
    # Split once here, rather than in every hop.
    queries, d_outs = inner.split_queries(query), inner.split_queries(d_out)
    d_weight = d_lse - (d_out * partial.out).sum(-1).swapaxes(1, 2)
    lses, lse_residuals, d_weights = (
        jnp.split(x, len(d_outs), axis=2) for x in (partial.lse, partial.lse_residual, d_weight)
    )
    lse = [LogSumExp(*x) for x in zip(lses, lse_residuals, strict=True)]
    d = [Contribution(*x) for x in zip(d_outs, d_weights, strict=True)]

    def gradients(k: jax.Array, v: jax.Array, r: Index) -> tuple[PyTree, jax.Array, jax.Array]:
        """This hop's gradients of the chunks of queries and of the bias, of the keys, and of the values."""
        chunks = Chunks(queries, inner.split_keys(k), inner.split_keys(v))
        more = block_gradients(inner, chunks, extras, here, (here - r) % n, lse, d, bool(flag))
        return (more.queries, more.bias), jnp.concatenate(more.keys, axis=1), jnp.concatenate(more.values, axis=1)

    def hop(r: Index, state: PyTree) -> PyTree:
        k, v, (query_gradients, dk, dv) = state
        # Send before computing, so that the computation hides the transfer. Keys and values go to the device that
        # computes with them next; the gradients that this device computed in the previous hop follow their keys. The
        # last hop sends keys and values to a device that does not need them. There are only four arrays, since XLA
        # overlaps at most five transfers.
        k_sent, v_sent, dk, dv = rotate((k, v, dk, dv), axis, 1, n)
        more = gradients(k, v, r)
        return k_sent, v_sent, (add(query_gradients, more[0]), dk + more[1], dv + more[2])

    k, v = rotate((key, value), axis, 1, n) if hops > 1 else (key, value)
    _, _, ((dq, d_bias), dk, dv) = lax.fori_loop(1, hops, hop, (k, v, gradients(key, value, 0)))
    # Gradients go from the last device back to the one that has their keys.
    dk, dv = rotate((dk, dv), axis, -(hops - 1), n)
    d_bias = jax.tree.map(_cast, d_bias, extras.bias, is_leaf=_is_none) if flag else None
    d_query = jnp.concatenate(dq, axis=1).astype(query.dtype)
    return d_query, dk.astype(key.dtype), dv.astype(value.dtype), Extras(None, d_bias, None)


def _is_none(x: Leaf) -> bool:
    return x is None


def _cast(gradient: jax.Array | None, x: jax.Array) -> jax.Array | None:
    return None if gradient is None else gradient.astype(x.dtype)


ring.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
