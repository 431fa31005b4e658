"""Exchanges between devices that JAX differentiates: gathering all keys, or exchanging heads for tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.biases import Bias, ShiftedBias
from attnops.masks import Shifted
from attnops.softmax import PartialSoftmax
from attnops_ring.block import Extras, Inner, whole_block
from attnops_ring.orders import positions

if TYPE_CHECKING:
    from attnops.typing import Index, Leaf, PyTree

Axis = str | tuple[str, ...]


def all_gather(
    inner: Inner, axis: Axis, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Every device gathers all keys and values, in O(S) memory, and attends to them in one block.

    Args:
        inner: how devices compute.
        axis: the mesh axes that shard the sequence.
        query: [B, t, H, D], this device's shard.
        key: [B, s, K, D].
        value: [B, s, K, Dv].
        extras: mask, bias and dropout key.
    """
    k, v = (to_sequence_order(gathered(axis, 1, x), inner) for x in (key, value))
    return whole_block(dataclasses.replace(inner, has_all_keys=True), query, k, v, extras, lax.axis_index(axis), 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def gathered(axis: Axis, dimension: int, x: jax.Array) -> jax.Array:
    """The devices' arrays concatenated along a dimension; the devices' gradients are summed in float32."""
    return lax.all_gather(x, axis, axis=dimension, tiled=True)


@gathered.defjvp
def _(axis: Axis, dimension: int, primals: PyTree, tangents: PyTree) -> tuple[jax.Array, Leaf]:
    (x,), (d,) = primals, tangents
    out = gathered(axis, dimension, x)
    if d.dtype == jax.dtypes.float0:
        return out, np.zeros(out.shape, d.dtype)
    return out, lax.all_gather(d.astype(jnp.float32), axis, axis=dimension, tiled=True).astype(d.dtype)


def heads_for_tokens(x: jax.Array, axis: Axis) -> jax.Array:
    """From [B, t, H, d] per device to [B, n · t, H / n, d]: the tokens of all n devices, with some of the heads."""
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def tokens_for_heads(x: jax.Array, axis: Axis) -> jax.Array:
    """The inverse of `heads_for_tokens`."""
    return lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


def slice_heads(extras: Extras, first: Index, batches: int, heads: int) -> Extras:
    """Mask, bias and dropout key for the ``heads`` heads from ``first`` on."""
    mask = None if extras.mask is None else Shifted(extras.mask, jnp.int32(0), first, batches, heads)
    bias = extras.bias
    if isinstance(bias, Bias):
        bias = ShiftedBias(bias, jnp.int32(0), first)
    elif bias is not None and bias.shape[1] > 1:
        bias = lax.dynamic_slice_in_dim(bias, first, heads, axis=1)
    key = extras.dropout_key
    return Extras(mask, bias, None if key is None else dataclasses.replace(key, h=key.h + first))


def spread_kv_heads(x: jax.Array, heads: int, devices: int) -> jax.Array:
    """Keys or values [B, s, K, d], with heads repeated as few times as possible if the devices don't divide K.

    Args:
        x: keys or values.
        heads: query heads.
        devices: the number of devices; each gets the same number of heads.
    """
    K = x.shape[2]
    if K % devices == 0:
        return x
    return jnp.repeat(x, int(np.lcm(K, devices)) // K if heads % np.lcm(K, devices) == 0 else heads // K, axis=2)


def to_sequence_order(x: jax.Array, inner: Inner) -> jax.Array:
    """[B, length, …] from the devices' order to the sequence's order."""
    if inner.order == "contiguous":
        return x
    return jnp.take(x, np.argsort(positions(x.shape[1], inner.devices, inner.order)), axis=1)


def to_device_order(x: jax.Array, inner: Inner) -> jax.Array:
    """The inverse of `to_sequence_order`."""
    if inner.order == "contiguous":
        return x
    return jnp.take(x, positions(x.shape[1], inner.devices, inner.order), axis=1)
