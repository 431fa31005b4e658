"""Few queries over many keys that devices share, as in decoding: one reduction (flash-decoding, across devices)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import equally_varying
from attnops.softmax import PartialSoftmax, exp_sum, log_sum
from attnops_ring.block import Extras, Inner, at_once


def reduced(
    inner: Inner, axis: tuple[str, ...], query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Attention of queries that every device has over keys of which each has a part, in `jax.shard_map`.

    Args:
        inner: how devices compute.
        axis: the mesh axes that cut the keys.
        query: [B, T, H, D], the same on all of them.
        key: [B, s, K, D], this device's.
        value: [B, s, K, Dv].
        extras: what scores depend on beside these.
    """
    query, key, value, extras = equally_varying((query, key, value, extras))
    own = at_once(inner, query, key, value, extras, 0, lax.axis_index(axis))
    top = lax.pmax(lax.stop_gradient(own.lse), axis)
    weight = exp_sum(own.lse, own.lse_residual, top)
    out, total = lax.psum((own.out * weight.swapaxes(1, 2)[..., None], weight), axis)
    seen = jnp.where(total == 0, 1.0, total)  # NaN stays NaN
    return PartialSoftmax(out / seen.swapaxes(1, 2)[..., None], *log_sum(top, total))
