"""Exchanges that need no derivative of their own: all keys to everybody, or heads for tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.biases import Bias, ShiftedBias
from attnops.masks import Shifted
from attnops.softmax import PartialSoftmax
from attnops_ring.block import Extras, Inner, at_once
from attnops_ring.orders import Order, positions

Axis = str | tuple[str, ...]


def all_gather(
    inner: Inner, axis: Axis, order: Order, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Every device gathers all keys and values, O(S) memory, and computes its queries at once.

    Args:
        inner: how devices compute.
        axis: the mesh axes that cut the sequence.
        order: how tokens lie.
        query: [B, t, H, D], this device's.
        key: [B, s, K, D].
        value: [B, s, K, Dv].
        extras: what scores depend on beside these.
    """
    k, v = (in_sequence(_gathered(axis, x), inner.devices, order) for x in (key, value))
    return at_once(dataclasses.replace(inner, keys_are_whole=True), query, k, v, extras, lax.axis_index(axis), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axis: Axis, x: jax.Array) -> jax.Array:
    """[B, s, K, d] of every device, one after the other; the devices' gradients are added up in float32."""
    return lax.all_gather(x, axis, axis=1, tiled=True)


def _gathered_backward(axis: Axis, saved: None, d: jax.Array) -> tuple[jax.Array]:
    total = lax.psum_scatter(d.astype(jnp.float32), axis, scatter_dimension=1, tiled=True)
    return (total.astype(d.dtype),)


_gathered.defvjp(lambda axis, x: (_gathered(axis, x), None), _gathered_backward)


def heads_for_tokens(x: jax.Array, axis: Axis) -> jax.Array:
    """[B, t, H, d] of every device to [B, n · t, H / n, d]: all its group's tokens, some of the heads."""
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def tokens_for_heads(x: jax.Array, axis: Axis) -> jax.Array:
    """The inverse of `heads_for_tokens`."""
    return lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


def some_heads(extras: Extras, first: Any, batches: int, heads: int) -> Extras:
    """What scores depend on, for ``heads`` heads of them, ``first`` first."""
    mask = None if extras.mask is None else Shifted(extras.mask, jnp.int32(0), first, batches, heads)
    bias = extras.bias
    if isinstance(bias, Bias):
        bias = ShiftedBias(bias, jnp.int32(0), first)
    elif bias is not None and bias.shape[1] > 1:
        bias = lax.dynamic_slice_in_dim(bias, first, heads, axis=1)
    key = extras.dropout_key
    return Extras(mask, bias, None if key is None else dataclasses.replace(key, h=key.h + first))


def spread_kv_heads(x: jax.Array, heads: int, devices: int) -> jax.Array:
    """Keys or values [B, s, K, d] with as many heads as devices can share: repeated only where K does not divide.

    Args:
        x: keys or values.
        heads: query heads.
        devices: that are to share them.
    """
    K = x.shape[2]
    if K % devices == 0:
        return x
    return jnp.repeat(x, int(np.lcm(K, devices)) // K if heads % np.lcm(K, devices) == 0 else heads // K, axis=2)


def in_sequence(x: jax.Array, devices: int, order: Order) -> jax.Array:
    """Tokens [B, length, …] that lie in an order, as the sequence has them."""
    if order == "contiguous":
        return x
    return jnp.take(x, np.argsort(positions(x.shape[1], devices, order)), axis=1)


def in_order(x: jax.Array, devices: int, order: Order) -> jax.Array:
    """The inverse of `in_sequence`."""
    return x if order == "contiguous" else jnp.take(x, positions(x.shape[1], devices, order), axis=1)
