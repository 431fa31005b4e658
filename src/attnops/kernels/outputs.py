"""Outputs of kernels inside `jax.shard_map`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from attnops.typing import Aval, DType


def output_like(like: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.ShapeDtypeStruct:
    """A ``pallas_call``'s ``out_shape`` for an output that varies over the same mesh axes as an input.

    Args:
        like: an input; `equally_varying` makes all inputs vary over the same axes.
        shape: of the output.
        dtype: of the output.
    """
    aval: Aval = jax.typeof(like)
    varying = {"manual_axis_type": aval.mat} if hasattr(aval, "mat") else {"vma": aval.vma}  # the former since JAX 0.10
    return jax.ShapeDtypeStruct(shape, dtype, **varying)
