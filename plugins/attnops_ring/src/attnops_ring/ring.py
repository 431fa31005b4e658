"""The ring: keys and values go round, and every device sees each once (Liu et al. 2023, arXiv:2310.01889).

One derivative around the whole exchange: forward saves the output and its logsumexp alone; backward sends keys and
values round again, their gradients with them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.kernels import cotangents, is_differentiated
from attnops.softmax import Contribution, PartialSoftmax, identity
from attnops_ring.block import Extras, Inner, LogSumExp, added, block, block_gradients, together

Axis = str | tuple[str, ...]


def passed_on(x: Any, axis: Axis, shift: int, devices: int) -> Any:
    """Everything one has, for the device ``shift`` further along a mesh axis."""
    pairs = [(i, (i + shift) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ring(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Attention over all keys, in `jax.shard_map`, without sinks.

    Args:
        inner: how devices compute.
        axis: the mesh axes that cut the sequence.
        hops: how many devices' keys a device sees, its own among them; what further ones have no query may see.
        query: [B, t, H, D], this device's.
        key: [B, s, K, D].
        value: [B, s, K, Dv].
        extras: what scores depend on beside these, varying as they do.
    """
    return _forward(inner, axis, hops, query, key, value, extras)


def _forward(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    n, here = inner.devices, lax.axis_index(axis)
    # By stretch from here on, so that no hop takes them apart again.
    queries, keys, values = inner.queries(query), inner.keys(key), inner.keys(value)

    def hop(r: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        k, v, seen = state
        # Sent before the computation that hides it.
        sent = passed_on((k, v), axis, 1, n)
        return (*sent, block(inner, queries, k, v, extras, here, (here - r) % n, seen))

    seen = [identity(x, value) for x in queries]
    k, v, seen = lax.fori_loop(0, hops - 1, hop, (keys, values, seen))
    return together(block(inner, queries, k, v, extras, here, (here - (hops - 1)) % n, seen))


def _forward_rule(
    inner: Inner, axis: Axis, hops: int, query: Any, key: Any, value: Any, extras: Any
) -> tuple[PartialSoftmax, tuple[Any, ...]]:
    # What is saved must be arrays; a flag is said by the structure.
    flag = (None,) * is_differentiated(extras.bias)
    query, key, value, extras = custom_vjp_primal_tree_values((query, key, value, extras))
    found = _forward(inner, axis, hops, query, key, value, extras)
    return found, (query, key, value, extras, found, flag)


def _backward_rule(inner: Inner, axis: Axis, hops: int, saved: Any, given: Any) -> tuple[Any, ...]:
    query, key, value, extras, found, flag = saved
    d_out, d_lse = cotangents(given[:2], query)
    n, here = inner.devices, lax.axis_index(axis)
    queries, of_rows = inner.queries(query), inner.queries(d_out)
    d_weight = d_lse - (d_out * found.out).sum(-1).swapaxes(1, 2)
    lse, rest, of_weights = (jnp.split(x, len(queries), axis=2) for x in (found.lse, found.lse_residual, d_weight))
    wholes = [LogSumExp(*x) for x in zip(lse, rest, strict=True)]
    d = [Contribution(*x) for x in zip(of_rows, of_weights, strict=True)]

    def gradients(k: jax.Array, v: jax.Array, r: Any) -> tuple[Any, jax.Array, jax.Array]:
        """Of queries and bias; of keys, which are a device's all together; and of values."""
        more = block_gradients(
            inner, queries, inner.keys(k), inner.keys(v), extras, here, (here - r) % n, wholes, d, bool(flag)
        )  # fmt: skip
        return (more.queries, more.bias), jnp.concatenate(more.keys, axis=1), jnp.concatenate(more.values, axis=1)

    def hop(r: Any, state: Any) -> Any:
        k, v, (of_queries, dk, dv) = state
        # Sent before the computation that hides it: keys to whoever computes them next, and to whoever does now what
        # this device has found for those that it had before. The last hop's keys go home, for nothing. Four arrays,
        # as XLA has no more than five transfers under way.
        k_sent, v_sent, dk, dv = passed_on((k, v, dk, dv), axis, 1, n)
        more = gradients(k, v, r)
        return k_sent, v_sent, (added(of_queries, more[0]), dk + more[1], dv + more[2])

    k, v = passed_on((key, value), axis, 1, n) if hops > 1 else (key, value)
    _, _, ((dq, d_bias), dk, dv) = lax.fori_loop(1, hops, hop, (k, v, gradients(key, value, 0)))
    # Home again, from the last device that they were on.
    dk, dv = passed_on((dk, dv), axis, -(hops - 1), n)
    d_bias = jax.tree.map(_as, d_bias, extras.bias, is_leaf=_is_none) if flag else None
    d_query = jnp.concatenate(dq, axis=1).astype(query.dtype)
    return d_query, dk.astype(key.dtype), dv.astype(value.dtype), Extras(None, d_bias, None)


def _is_none(x: Any) -> bool:
    return x is None


def _as(gradient: jax.Array | None, x: jax.Array) -> jax.Array | None:
    return None if gradient is None else gradient.astype(x.dtype)


ring.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
