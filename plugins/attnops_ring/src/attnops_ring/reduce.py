"""Few queries over keys sharded over devices, as in decoding: one reduction merges the devices' partial softmaxes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import equally_varying
from attnops.softmax import PartialSoftmax, exp_sum, log_sum
from attnops_ring.block import Extras, Inner, whole_block


def reduced(
    inner: Inner, axis: tuple[str, ...], query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Attention of replicated queries over sharded keys, inside `jax.shard_map`; flash-decoding across devices.

    Args:
        inner: how devices compute.
        axis: the mesh axes that shard the keys.
        query: [B, T, H, D], the same on all devices.
        key: [B, s, K, D], this device's shard.
        value: [B, s, K, Dv], this device's shard.
        extras: mask, bias and dropout key.
    """
    query, key, value, extras = equally_varying((query, key, value, extras))
    local = whole_block(inner, query, key, value, extras, 0, lax.axis_index(axis))
    m = lax.pmax(lax.stop_gradient(local.lse), axis)
    weight = exp_sum(local.lse, local.lse_residual, m)
    out, l = lax.psum((local.out * weight.swapaxes(1, 2)[..., None], weight), axis)
    divisor = jnp.where(l == 0, 1.0, l)  # NaN stays NaN
    highest = jax.tree.map(lambda x: lax.pmax(lax.stop_gradient(x), axis), local.max_logits)
    return PartialSoftmax(out / divisor.swapaxes(1, 2)[..., None], *log_sum(m, l), highest)
