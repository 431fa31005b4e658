"""PyTorch's tensors as JAX's arrays and back, and a function of arrays in PyTorch's graph of derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


class Differentiable(torch.autograd.Function):
    """A function of arrays as one of tensors, whose derivative is `jax.vjp`'s."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., jax.Array], *tensors: torch.Tensor | None) -> torch.Tensor:
        """The function's result, of tensors or None."""
        out, ctx.vjp = jax.vjp(function, *(None if x is None else to_jax(x) for x in tensors))
        return to_torch(out)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # a second derivative raises
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(None if x is None else to_torch(x) for x in ctx.vjp(to_jax(d_out)))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy: PyTorch may write to its own in place, and JAX keeps this one for the backward pass.

    Raises:
        ValueError: the tensor is float64, which JAX would round to float32 without ``jax_enable_x64``.
    """
    if tensor.dtype == torch.float64:
        raise ValueError(
            "a tensor of dtype float64: attnops computes in float32, bfloat16 or float16; convert the model"
        )
    if tensor.dtype == torch.bfloat16:  # numpy has no such dtype
        return jnp.from_dlpack(tensor.detach().contiguous(), copy=True)
    return jnp.array(tensor.detach().contiguous(), copy=True)


def to_torch(array: jax.Array) -> torch.Tensor:
    """A copy, see `to_jax`."""
    return torch.from_dlpack(array).clone()
