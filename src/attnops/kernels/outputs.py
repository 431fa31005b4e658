"""Outputs of kernels inside `jax.shard_map`."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.typing import Aval, DType


def output_like(like: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an output that varies over the same mesh axes as an input, for ``pallas_call`` and
    `jax.ffi.ffi_call`.

    Args:
        like: an input; `equally_varying` makes all inputs vary over the same axes.
        shape: the shape of the output.
        dtype: the dtype of the output.
    """
    aval: Aval = jax.typeof(like)
    # Without a mesh `ffi_call` asserts that nothing varies.
    sharding = NamedSharding(aval.sharding.mesh, P()) if aval.mat.varying else None
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=aval.mat, sharding=sharding)
