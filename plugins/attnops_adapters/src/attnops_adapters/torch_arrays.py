"""Converts PyTorch's tensors to JAX's arrays, with padding, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch


def to_jax(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> jax.Array:
    """A copy as an array: PyTorch may write to the tensor in place, while JAX keeps the array for the backward pass.

    Args:
        tensor: a tensor of any strides.
        shape: the shape to pad it to with zeros, at the end of each axis; None for no padding.

    Raises:
        ValueError: the tensor is float64, which JAX would round to float32 without ``jax_enable_x64``.
    """
    if tensor.dtype == torch.float64:
        raise ValueError(
            "a tensor of dtype float64: attnops computes in float32, bfloat16 or float16; convert the model"
        )
    tensor = tensor.detach()
    if shape is not None and tuple(shape) != tuple(tensor.shape):
        more = [n for new, old in zip(reversed(shape), reversed(tensor.shape), strict=True) for n in (0, new - old)]
        copy = torch.nn.functional.pad(tensor, more).contiguous()
    else:
        copy = tensor.clone(memory_format=torch.contiguous_format)
    # Nothing else refers to the copy, so that JAX may use its memory; numpy has no bfloat16.
    return jnp.from_dlpack(copy) if copy.is_floating_point() else jnp.array(copy)


def to_torch(array: jax.Array, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A copy as a tensor of this shape, without the padding at the end of each axis; None for the array's shape."""
    tensor = torch.from_dlpack(array)
    if shape is not None:
        tensor = tensor[tuple(slice(n) for n in shape)]
    return tensor.clone(memory_format=torch.contiguous_format)
