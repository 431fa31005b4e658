"""The operands of kernels other than query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from attnops_triton.flash.plan import FlashPlan

if TYPE_CHECKING:
    from attnops.typing import Array


class Arrays(NamedTuple):
    """Inputs other than query, key and value, in kernels' layouts; None or empty if absent.

    Attributes:
        mask: values of the mask, each [B or 1, H or 1, n], where n is T, S or 1.
        dense: the mask's arrays of T × S elements, int8 [B or 1, H or 1, T, S].
        chosen: the choices of the mask's `attnops.masks.Blocks`, int8 [B or 1, H or 1, nq, nk].
        bias: values of an elementwise bias, each [B or 1, H or 1, n], where n is T, S or 1.
        table: a bias by distance, float32 [1, H, T + S − 1]; distance ``kv − q`` is element ``kv − q + T − 1``.
        array: a bias of T × S elements, [B or 1, H or 1, T, S].
        sinks: [1, H] float32.
        dropout: the hash of each query, uint32 [B, H, T].
    """

    mask: tuple[jax.Array, ...] = ()
    dense: tuple[jax.Array, ...] = ()
    chosen: tuple[jax.Array, ...] = ()
    bias: tuple[jax.Array, ...] = ()
    table: jax.Array | None = None
    array: jax.Array | None = None
    sinks: jax.Array | None = None
    dropout: jax.Array | None = None


class Operand(NamedTuple):
    """An array argument of a kernel; the kernel's parameter is ``<name>_ptr``."""

    name: str
    array: Array


def value_layout(x: jax.Array) -> jax.Array:
    """A value [B or 1, H or 1, T or 1, S or 1] in kernels' layout, [B or 1, H or 1, n], with 32-bit elements."""
    if x.dtype != jnp.uint32:
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return x.reshape(*x.shape[:2], -1)


def score_operands(plan: FlashPlan, arrays: Arrays) -> list[Operand]:
    """The inputs of a tile's scores other than query and key, and of dropout."""
    operands = [Operand(f"mask{i}", x) for i, x in enumerate(arrays.mask)]
    operands += [Operand(f"dense{i}", x) for i, x in enumerate(arrays.dense)]
    operands += [Operand(f"chosen{i}", x) for i, x in enumerate(arrays.chosen)]
    operands += [Operand(f"bias{i}", x) for i, x in enumerate(arrays.bias)]
    operands += [Operand(name, getattr(arrays, name)) for name in ("table", "array", "dropout")
                 if getattr(arrays, name) is not None]  # fmt: skip
    return operands
