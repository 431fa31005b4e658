"""Outputs of kernels inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax


def output_like(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """What a kernel gives, for ``pallas_call``'s ``out_shape``: it varies over the same mesh axes as an input.

    Args:
        like: an input; `equally_varying` makes all inputs vary alike.
        shape: the output's.
        dtype: the output's.
    """
    aval: Any = jax.typeof(like)
    varying = {"manual_axis_type": aval.mat} if hasattr(aval, "mat") else {"vma": aval.vma}  # the former since JAX 0.10
    return jax.ShapeDtypeStruct(shape, dtype, **varying)
