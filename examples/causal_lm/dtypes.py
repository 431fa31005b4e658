"""A model in another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .params import with_values

if TYPE_CHECKING:
    from .model import Decoder

Model = TypeVar("Model", bound="Decoder")


def to_dtype(model: Model, dtype: Any, change_runtime_dtype: bool = True) -> Model:
    """A copy with floating-point parameters in another dtype; the scales of quantised weights are kept.

    Args:
        model: is left as it is.
        dtype: such as ``jnp.bfloat16``.
        change_runtime_dtype: whether it is computed in this dtype too. Else weights are converted where they are used.

    Raises:
        ValueError: a dtype that is not floating-point.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={dtype.name} must be floating-point; for integers use quantize")

    def cast(_: str, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        return x.astype(dtype)

    result = with_values(model, cast, nnx.Param)
    if change_runtime_dtype:
        result.runtime_dtype = dtype
    return result
