"""Calls an operation with PyTorch's tensors: a program for each bucket of lengths, and one for its derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import torch

from attnops.masks import Mask
from attnops_adapters.buckets import bucket_lengths
from attnops_adapters.torch_arrays import to_jax, to_torch

# From query, key, value, and the keywords mask, bias, softmax_scale, logits_soft_cap, sinks, dropout_prob and
# dropout_key, to [B, H, T, Dv]. `jax.jit` traces it.
Attend: TypeAlias = Callable[..., jax.Array]
Arrays: TypeAlias = tuple[jax.Array | None, ...]


class Call(NamedTuple):
    """What a program is compiled for, besides shapes and the structure of the mask.

    Attributes:
        attend: the operation.
        options: the keywords of ``attend`` that are numbers.
    """

    attend: Attend
    options: tuple[tuple[str, float], ...]

    def run(self, arrays: Arrays, mask: Mask, seed: int | None) -> jax.Array:
        """Attention [B, H, T, Dv]; the arrays are query, key, value, bias or None, and sinks or None."""
        query, key, value, bias, sinks = arrays
        given: dict[str, Any] = {"mask": mask, "bias": bias, "sinks": sinks, **dict(self.options)}
        given["dropout_key"] = None if seed is None else jax.random.key(seed)
        return self.attend(query, key, value, **{name: x for name, x in given.items() if x is not None})


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: Call, arrays: Arrays, mask: Mask, seed: int | None) -> jax.Array:
    return call.run(arrays, mask, seed)


@functools.partial(jax.jit, static_argnums=0)
def _forward_for_backward(call: Call, arrays: Arrays, mask: Mask, seed: int | None) -> Any:
    return jax.vjp(lambda arrays: call.run(arrays, mask, seed), arrays)


@jax.jit
def _backward(vjp: Any, d_out: jax.Array) -> Arrays:
    (d_arrays,) = vjp(d_out)
    return d_arrays  # type: ignore[no-any-return]


def run(call: Call, tensors: tuple[torch.Tensor | None, ...], mask: Mask, seed: int | None = None) -> torch.Tensor:
    """`Call.run` on tensors, padded: [B, H, T, Dv], differentiable once.

    Args:
        call: the operation and its numbers.
        tensors: query [B, H, T, D], key [B, K, S, D], value [B, K, S, Dv]; bias, broadcasts to [B, H, T, S], and sinks,
            [H], or None.
        mask: a mask for padded lengths, from `attnops_adapters.buckets.pad_mask`.
        seed: the seed of dropout; None for no dropout.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        out: torch.Tensor = _Differentiable.apply(call, mask, seed, *tensors)
        return out
    return to_torch(_forward(call, _padded(tensors), mask, seed), _shape(tensors))


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]  # where torch is not installed
    @staticmethod
    def forward(ctx: Any, call: Call, mask: Mask, seed: int | None, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.shapes = [None if x is None else x.shape for x in tensors]
        out, ctx.vjp = _forward_for_backward(call, _padded(tensors), mask, seed)
        ctx.padded_shape = out.shape
        return to_torch(out, _shape(tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # a second derivative raises
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_arrays = _backward(ctx.vjp, to_jax(d_out, ctx.padded_shape))
        given = zip(d_arrays, ctx.shapes, strict=True)
        return None, None, None, *(None if d is None else _without_padding(d, shape) for d, shape in given)


def _without_padding(d: jax.Array, shape: torch.Size) -> torch.Tensor:
    """A gradient without padding, and without the axes of size 1 that `_padded` added to a bias."""
    return to_torch(d, (1,) * (d.ndim - len(shape)) + tuple(shape)).reshape(shape)


def _shape(tensors: tuple[torch.Tensor | None, ...]) -> tuple[int, ...]:
    """The shape of the result."""
    query, _, value, *_ = tensors
    assert query is not None
    assert value is not None
    return (*query.shape[:3], value.shape[3])


def _padded(tensors: tuple[torch.Tensor | None, ...]) -> Arrays:
    """The tensors as arrays, with lengths padded."""
    query, key, value, bias, sinks = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    T, S = query.shape[2], key.shape[2]
    T_, S_ = bucket_lengths(T, S)
    longer = [to_jax(x, (*x.shape[:2], n, x.shape[3])) for x, n in ((query, T_), (key, S_), (value, S_))]
    if bias is not None:
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        rows, columns = T_ if shape[2] == T > 1 else shape[2], S_ if shape[3] == S > 1 else shape[3]
        longer.append(to_jax(bias.reshape(shape), (*shape[:2], rows, columns)))
    return *longer[:3], None if bias is None else longer[3], None if sinks is None else to_jax(sinks)
