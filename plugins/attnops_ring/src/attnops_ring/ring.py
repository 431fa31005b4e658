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

from attnops_ring.block import Extras, Inner, Partial, block, joined, none_seen

Axis = str | tuple[str, ...]


def passed_on(x: Any, axis: Axis, shift: int, devices: int) -> Any:
    """Everything one has, for the device ``shift`` further along a mesh axis."""
    pairs = [(i, (i + shift) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ring(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> Partial:
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
) -> Partial:
    n, here = inner.devices, lax.axis_index(axis)

    def hop(r: Any, state: tuple[Any, Any, Partial]) -> tuple[Any, Any, Partial]:
        k, v, seen = state
        # Sent before the computation that hides it.
        sent = passed_on((k, v), axis, 1, n)
        return (*sent, joined(seen, block(inner, query, k, v, extras, here, (here - r) % n)))

    k, v, seen = lax.fori_loop(0, hops - 1, hop, (key, value, none_seen(query, value)))
    return joined(seen, block(inner, query, k, v, extras, here, (here - (hops - 1)) % n))


def _forward_rule(
    inner: Inner, axis: Axis, hops: int, query: Any, key: Any, value: Any, extras: Any
) -> tuple[Partial, tuple[Any, ...]]:
    found = _forward(inner, axis, hops, query, key, value, extras)
    return found, (query, key, value, extras, found)


def _backward_rule(inner: Inner, axis: Axis, hops: int, saved: Any, d: Partial) -> tuple[Any, ...]:
    query, key, value, extras, found = saved
    d_out, d_lse = d
    n, here = inner.devices, lax.axis_index(axis)
    level = jnp.where(found.lse == -jnp.inf, 0.0, found.lse)
    # What each weight's gradient is measured against, [B, H, t].
    delta = (d_out * found.out).sum(-1).swapaxes(1, 2) - d_lse

    def gradients(k: Any, v: Any, r: Any) -> tuple[Any, Any, Any, Any]:
        part, pull_back = jax.vjp(
            lambda q, k, v, bias: block(inner, q, k, v, extras._replace(bias=bias), here, (here - r) % n),
            query, k, v, extras.bias,
        )  # fmt: skip
        share = jnp.exp(part.lse - level)  # of the softmax
        of_rows = share.swapaxes(1, 2)[..., None] * d_out
        of_lse = (part.out * of_rows).sum(-1).swapaxes(1, 2) - share * delta
        return pull_back(Partial(of_rows, of_lse))  # type: ignore[return-value]

    def wide(x: Any) -> Any:
        """Sums are float32; what has no gradient has none."""
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32) if _learns(leaf) else None, x)

    def added(total: Any, more: Any) -> Any:
        return jax.tree.map(
            lambda a, b: None if a is None else a + b.astype(jnp.float32), total, more, is_leaf=lambda x: x is None
        )

    def hop(r: Any, state: Any) -> Any:
        k, v, dk, dv, dq, d_bias = state
        sent = passed_on((k, v), axis, 1, n)
        more = gradients(k, v, r)
        dk, dv = passed_on((added(dk, more[1]), added(dv, more[2])), axis, 1, n)
        return (*sent, dk, dv, added(dq, more[0]), added(d_bias, more[3]))

    start = (key, value, wide(key), wide(value), wide(query), wide(extras.bias))
    k, v, dk, dv, dq, d_bias = lax.fori_loop(0, hops - 1, hop, start)
    more = gradients(k, v, hops - 1)
    # Home again, from the last device that they were on.
    dk, dv = passed_on((added(dk, more[1]), added(dv, more[2])), axis, -(hops - 1), n)
    dq, d_bias = added(dq, more[0]), added(d_bias, more[3])
    d_bias = jax.tree.map(
        lambda g, leaf: None if g is None else g.astype(leaf.dtype), d_bias, extras.bias, is_leaf=lambda x: x is None
    )
    d_extras = Extras(None, d_bias, None)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), d_extras


def _learns(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


ring.defvjp(_forward_rule, _backward_rule)
