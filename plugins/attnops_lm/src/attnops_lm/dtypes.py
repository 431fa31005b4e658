"""Changes the dtype of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from attnops_lm.params import with_values

if TYPE_CHECKING:
    from attnops_lm.model import Decoder

Model = TypeVar("Model", bound="Decoder")


def floating(name: str, dtype: Any) -> jnp.dtype[Any]:
    """The dtype as a `numpy.dtype`, if weights can have it.

    Args:
        name: the argument's name, for errors.
        dtype: such as ``jnp.bfloat16``.

    Raises:
        ValueError: the dtype is not floating-point, or has fewer than 16 bits.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{name} is {dtype.name}, but must be floating-point of at least 16 bits; for 8 use quantize()"
        )
    return dtype


def to_dtype(model: Model, dtype: Any, change_runtime_dtype: bool = True) -> Model:
    """A copy with floating-point parameters in another dtype; the scales of quantised weights are kept.

    Args:
        model: the model, which is not changed.
        dtype: such as ``jnp.bfloat16``.
        change_runtime_dtype: whether the model also computes in this dtype. Otherwise weights are converted where they
            are used.

    Raises:
        ValueError: the dtype is not floating-point of at least 16 bits.
    """
    dtype = floating("dtype", dtype)

    def cast(_: str, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        return x.astype(dtype)

    result = with_values(model, cast, nnx.Param)
    if change_runtime_dtype:
        result.runtime_dtype = dtype
        for _, module in nnx.iter_modules(result):
            if isinstance(module, nnx.LoRA):  # its dtype does not follow its parameters' dtype
                module.dtype = dtype
    return result
