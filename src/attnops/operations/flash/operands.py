"""The arrays of a call, and the tiles that are loaded from and stored to them.

They stay in the caller's layout, [B, length, heads, features]: copying them into tiles would cost more, in page
faults, than strided slices do. When a loop slices a 16-bit float array, XLA's CPU backend widens all of the array in
every iteration (and narrows it again after a store), so such arrays go through the loops as uint16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.masks.base import Mask
from attnops.operations.flash.plan import Index, NativePlan, quotient_and_remainder
from attnops.operations.flash.scoring import NativeScoring, Numbers
from attnops.operations.flash.tile_bias import Leaves
from attnops.sharding.placing import reshaped
from attnops.typing import DType


class NativeArrays(NamedTuple):
    """The inputs of a call other than query, key and value; None for an input that the call does not have.

    Attributes:
        mask: the bound mask.
        bias: the leaves of the tile bias.
        sinks: [1, H] float32.
        seed: the seed of dropout, uint32 [7], from `attnops.dropout.dropout_seed`.
        numbers: scale and soft cap as arrays; None if the plan has them.
    """

    mask: Mask | None = None
    bias: Leaves = ()
    sinks: jax.Array | None = None
    seed: jax.Array | None = None
    numbers: Numbers | None = None


def numbers_of(scoring: NativeScoring, arrays: NativeArrays) -> Numbers:
    """The numbers of a call, static or as data."""
    numbers = arrays.numbers if scoring.numbers is None else scoring.numbers
    assert numbers is not None
    return numbers


def pack(x: jax.Array, rows: int) -> jax.Array:
    """``x`` [B, length, heads, d] with zeros up to ``rows`` of length; 16-bit floats as uint16."""
    x = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
    return x if x.shape[1] == rows else jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, 0)))


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: DType = jnp.float32) -> jax.Array:
    """Zeros for a loop's carry: inside `jax.shard_map` they vary over the same mesh axes as ``like``."""
    return jnp.zeros_like(like, shape=shape, dtype=dtype)


def empty(packed: jax.Array, heads: int, d: int, dtype: DType) -> jax.Array:
    """Zeros [B, rows, heads, d] to `store` tiles into, with the rows of ``packed``; 16-bit floats as uint16."""
    dtype = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype
    return zeros(packed, (*packed.shape[:2], heads, d), dtype)


def unpack(x: jax.Array, length: int, dtype: DType) -> jax.Array:
    """The inverse of `pack`."""
    return _floats(x, dtype)[:, :length]


def load(plan: NativePlan, x: jax.Array, group: Index, tile: Index, size: int, dtype: DType) -> jax.Array:
    """A tile of a group of problems, [P, rows, d], in the dtype of products' operands.

    The query heads of a kv head are rows of one tile.

    Args:
        plan: the plan of the call.
        x: packed, [B, tiles · size, heads, d].
        group: index of the group of problems.
        tile: index of the tile.
        size: tokens per tile.
        dtype: the dtype of ``x`` before it was packed.
    """
    start, sizes = _slice(plan, group, tile, size, x.shape[2] // plan.K)
    x = _floats(lax.dynamic_slice(x, start, (*sizes, x.shape[-1])), dtype).astype(plan.dtype)
    x = reshaped(x, sizes[0], size, -1, x.shape[2] // min(plan.problems_per_tile, plan.K), x.shape[-1])
    return reshaped(x.transpose(0, 2, 3, 1, 4), plan.problems_per_tile, -1, x.shape[-1])


def store(
    plan: NativePlan, x: jax.Array, group: Index, tile: Index, size: int, value: jax.Array, dtype: DType
) -> jax.Array:
    """``x`` with a tile replaced by ``value`` [P, rows, d]; in place inside a loop."""
    heads = x.shape[2] // plan.K
    start, sizes = _slice(plan, group, tile, size, heads)
    value = reshaped(value, sizes[0], -1, heads, size, value.shape[-1]).transpose(0, 3, 1, 2, 4)
    value = reshaped(value, *sizes, value.shape[-1]).astype(dtype)
    value = lax.bitcast_convert_type(value, jnp.uint16) if x.dtype == jnp.uint16 else value
    return lax.dynamic_update_slice(x, value, start)


def add_transposed(plan: NativePlan, x: jax.Array, group: Index, tile: Index, value: jax.Array) -> jax.Array:
    """``x`` [groups, nq, P, d, R] with ``value`` [P, d, R] added to a tile of queries; in place inside a loop."""
    start = plan.indices(group, tile, 0, 0, 0)
    value = value[None, None]
    return lax.dynamic_update_slice(x, value + lax.dynamic_slice(x, start, value.shape), start)


def unpack_transposed(plan: NativePlan, x: jax.Array) -> jax.Array:
    """[groups, nq, P, d, R] to [B, T, H, d]."""
    d = x.shape[3]
    x = reshaped(x.swapaxes(1, 2), plan.B, plan.K, plan.nq, d, plan.G, plan.bq)
    return reshaped(x.transpose(0, 2, 5, 1, 4, 3), plan.B, plan.nq * plan.bq, plan.H, d)[:, : plan.T]


def pack_rows(plan: NativePlan, x: jax.Array, fill: float) -> jax.Array:
    """[B, H, T] to [B · K, nq, R], ``fill`` at the ragged end."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.nq * plan.bq - plan.T)), constant_values=fill)
    x = reshaped(x, plan.B * plan.K, plan.G, plan.nq, plan.bq).swapaxes(1, 2)
    return reshaped(x, plan.B * plan.K, plan.nq, plan.R)


def unpack_rows(plan: NativePlan, x: jax.Array) -> jax.Array:
    """The inverse of `pack_rows`."""
    x = reshaped(x, plan.B * plan.K, plan.nq, plan.G, plan.bq).swapaxes(1, 2)
    return reshaped(x, plan.B, plan.H, plan.nq * plan.bq)[:, :, : plan.T]


def load_rows(plan: NativePlan, x: jax.Array, group: Index, tile: Index) -> jax.Array:
    """The rows of a tile of queries, [P, R]."""
    start = plan.indices(group * plan.problems_per_tile, tile, 0)
    return lax.dynamic_slice(x, start, (plan.problems_per_tile, 1, plan.R)).squeeze(1)


def store_rows(plan: NativePlan, x: jax.Array, group: Index, tile: Index, value: jax.Array) -> jax.Array:
    """``x`` with the rows of a tile of queries replaced by ``value`` [P, R]."""
    return lax.dynamic_update_slice(x, value[:, None], plan.indices(group * plan.problems_per_tile, tile, 0))


def _floats(x: jax.Array, dtype: DType) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _slice(
    plan: NativePlan, group: Index, tile: Index, size: int, heads: int
) -> tuple[list[jax.Array], tuple[int, int, int]]:
    """Start and sizes of the slice of [B, rows, heads, d] that holds a tile of a group of problems."""
    per_batch = min(plan.problems_per_tile, plan.K)
    first = group * plan.problems_per_tile
    b, k = quotient_and_remainder(first, plan.K)
    start = plan.indices(b, tile * size, k * heads, 0)
    return start, (plan.problems_per_tile // per_batch, size, per_batch * heads)
