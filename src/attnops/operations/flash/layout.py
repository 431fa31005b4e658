"""Tiles of arrays that stay in the caller's layout, [B, length, heads, features].

A copy in tiles would cost more, in page faults, than strided slices do. A slice of a 16-bit float array in a loop makes
XLA's CPU backend widen (and, where it is written to, narrow) all of the array every time, so that such arrays go
through the loops as their bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.plan import Plan


def pack(x: jax.Array, rows: int) -> jax.Array:
    """``x`` [B, length, heads, d] with zeros up to ``rows`` of length; 16-bit floats as uint16."""
    x = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
    return x if x.shape[1] == rows else jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, 0)))


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Zeros that a loop may carry: in `jax.shard_map` they vary over the mesh axes that ``like`` varies over."""
    return jnp.zeros_like(like, shape=shape, dtype=dtype)


def empty(packed: jax.Array, heads: int, d: int, dtype: Any) -> jax.Array:
    """Zeros [B, rows, heads, d] to `put` tiles into, for the tokens of a packed array; 16-bit floats as uint16."""
    dtype = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype
    return zeros(packed, (*packed.shape[:2], heads, d), dtype)


def unpack(x: jax.Array, length: int, dtype: Any) -> jax.Array:
    """The inverse of `pack`."""
    return _floats(x, dtype)[:, :length]


def take(plan: Plan, x: jax.Array, group: Any, tile: Any, size: int, dtype: Any) -> jax.Array:
    """A tile of the lanes of a group, [L, rows, d], in the dtype that products take; the heads of a kv head are rows.

    Args:
        plan: of the call.
        x: packed, [B, tiles · size, heads, d].
        group: which lanes.
        tile: which tile.
        size: tokens a tile.
        dtype: of ``x`` before it was packed.
    """
    start, sizes = _place(plan, group, tile, size, x.shape[2] // plan.K)
    x = _floats(lax.dynamic_slice(x, start, (*sizes, x.shape[-1])), dtype).astype(plan.dtype)
    x = x.reshape(sizes[0], size, -1, x.shape[2] // min(plan.lanes, plan.K), x.shape[-1]).transpose(0, 2, 3, 1, 4)
    return x.reshape(plan.lanes, -1, x.shape[-1])


def put(plan: Plan, x: jax.Array, group: Any, tile: Any, size: int, value: jax.Array, dtype: Any) -> jax.Array:
    """``x`` with a tile replaced by ``value`` [L, rows, d]; in place inside a loop."""
    heads = x.shape[2] // plan.K
    start, sizes = _place(plan, group, tile, size, heads)
    value = value.reshape(sizes[0], -1, heads, size, value.shape[-1]).transpose(0, 3, 1, 2, 4)
    value = value.reshape(*sizes, value.shape[-1]).astype(dtype)
    value = lax.bitcast_convert_type(value, jnp.uint16) if x.dtype == jnp.uint16 else value
    return lax.dynamic_update_slice(x, value, start)


def add_transposed(plan: Plan, x: jax.Array, group: Any, tile: Any, value: jax.Array) -> jax.Array:
    """``x`` [groups, nq, L, d, R] with ``value`` [L, d, R] added to a tile of queries; in place inside a loop."""
    start = plan.indices(group, tile, 0, 0, 0)
    value = value[None, None]
    return lax.dynamic_update_slice(x, value + lax.dynamic_slice(x, start, value.shape), start)


def unpack_transposed(plan: Plan, x: jax.Array) -> jax.Array:
    """[groups, nq, L, d, R] to [B, T, H, d]."""
    d = x.shape[3]
    x = x.swapaxes(1, 2).reshape(plan.B, plan.K, plan.nq, d, plan.G, plan.bq)
    return x.transpose(0, 2, 5, 1, 4, 3).reshape(plan.B, plan.nq * plan.bq, plan.H, d)[:, : plan.T]


def pack_rows(plan: Plan, x: jax.Array, fill: float) -> jax.Array:
    """[B, H, T] to [B · K, nq, R], ``fill`` at the ragged end."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.nq * plan.bq - plan.T)), constant_values=fill)
    x = x.reshape(plan.B * plan.K, plan.G, plan.nq, plan.bq).swapaxes(1, 2)
    return x.reshape(plan.B * plan.K, plan.nq, plan.R)


def unpack_rows(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of `pack_rows`."""
    x = x.reshape(plan.B * plan.K, plan.nq, plan.G, plan.bq).swapaxes(1, 2)
    return x.reshape(plan.B, plan.H, plan.nq * plan.bq)[:, :, : plan.T]


def take_rows(plan: Plan, x: jax.Array, group: Any, tile: Any) -> jax.Array:
    """The rows of a tile of queries, [L, R]."""
    start = plan.indices(group * plan.lanes, tile, 0)
    return lax.dynamic_slice(x, start, (plan.lanes, 1, plan.R)).reshape(plan.lanes, plan.R)


def put_rows(plan: Plan, x: jax.Array, group: Any, tile: Any, value: jax.Array) -> jax.Array:
    """``x`` with the rows of a tile of queries replaced by ``value`` [L, R]."""
    return lax.dynamic_update_slice(x, value[:, None], plan.indices(group * plan.lanes, tile, 0))


def _floats(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _place(plan: Plan, group: Any, tile: Any, size: int, heads: int) -> tuple[list[jax.Array], tuple[int, int, int]]:
    """Start and sizes of the slice of [B, rows, heads, d] that holds a tile of a group's lanes."""
    per_batch = min(plan.lanes, plan.K)
    first = group * plan.lanes
    start = plan.indices(first // plan.K, tile * size, first % plan.K * heads, 0)
    return start, (plan.lanes // per_batch, size, per_batch * heads)
