"""The operands of kernels other than query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from attnops.typing import Array


class Arrays(NamedTuple):
    """Inputs other than query, key and value, [B or 1, H or 1, …]; None or empty if absent."""

    mask: tuple[jax.Array, ...] = ()  # values of the mask, each [B or 1, H or 1, n], where n is T, S or 1
    dense: tuple[jax.Array, ...] = ()  # the mask's arrays of T × S elements, int8 [B or 1, H or 1, T, S]
    chosen: tuple[jax.Array, ...] = ()  # the choices of its `attnops.masks.Blocks`, int8 [B or 1, H or 1, nq, nk]
    bias: tuple[jax.Array, ...] = ()  # values of an elementwise bias, each as those of the mask
    table: jax.Array | None = None  # a bias by distance, float32 [1, H, T + S − 1]; ``kv − q`` is at ``kv − q + T − 1``
    array: jax.Array | None = None  # a bias of T × S elements, [B or 1, H or 1, T, S]
    sinks: jax.Array | None = None  # float32 [1, H]
    dropout: jax.Array | None = None  # the hash of each query, uint32 [B, H, T]


class Operand(NamedTuple):
    """An array argument of a kernel; the kernel's parameter is ``<name>_ptr``."""

    name: str
    array: Array


def value_layout(x: jax.Array) -> jax.Array:
    """A value [B or 1, H or 1, T or 1, S or 1] in kernels' layout, [B or 1, H or 1, n], with 32-bit elements."""
    if x.dtype != jnp.uint32:
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return x.reshape(*x.shape[:2], -1)


def score_operands(arrays: Arrays) -> list[Operand]:
    """The inputs of a tile's scores other than query and key, and of dropout."""
    groups = {name: x for name, x in arrays._asdict().items() if isinstance(x, tuple)}
    single = {name: x for name, x in arrays._asdict().items() if x is not None and name not in (*groups, "sinks")}
    return [
        *(Operand(f"{name}{i}", x) for name, each in groups.items() for i, x in enumerate(each)),
        *(Operand(name, x) for name, x in single.items()),
    ]
