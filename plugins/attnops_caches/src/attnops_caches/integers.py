"""Counts, lengths and ids that callers give: checked where they are known when tracing, and brought to int32."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from attnops.typing import Array, Leaf

LARGEST = 2**31 - 1


def check_size(name: str, size: object) -> int:
    """``size``; raises a `TypeError` unless it is an int, and a `ValueError` if it is below 1."""
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"{name}={size!r} of type {type(size).__name__} must be an int of at least 1")
    if size < 1:
        raise ValueError(f"{name}={size} must be an int of at least 1")
    return int(size)


def array(values: Leaf) -> Any:
    """A JAX array as it is; other values as a numpy array, known when tracing, or, if one is traced, as a JAX array."""
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))
    return jnp.asarray(values) if is_traced or isinstance(values, jax.Array) else np.asarray(values)


def at_rows(x: jax.Array, rows: Leaf) -> jax.Array:
    """``x[rows]``; ``x`` itself for all rows in order as a numpy array, which XLA would gather one by one."""
    is_every = isinstance(rows, np.ndarray) and np.array_equal(rows, np.arange(x.shape[0]))
    return x if is_every else x[rows]


def integers(name: str, values: Leaf) -> Any:
    """`array` of integers; an empty list counts as integers."""
    values = array(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) and values.size:
        raise TypeError(f"{name} has dtype {values.dtype}, but must be integers")
    return values


def int32(values: Array) -> jax.Array:
    """Integers as int32; those out of range become the largest int32, or, if negative, -2 (invalid)."""
    if not np.can_cast(values.dtype, np.int32):
        where = np if isinstance(values, np.ndarray) else jnp
        low = -2 if np.issubdtype(values.dtype, np.signedinteger) else 0
        values = where.clip(values, low, LARGEST)
    return jnp.asarray(values).astype(jnp.int32)


def pairs(source: Any, target: Any, prefix: str = "", what: str = "") -> tuple[Any, Any]:
    """`integers` [N] that belong together; ``prefix`` is in front of their names in messages, ``what`` at the end."""
    source, target = integers(f"{prefix}source", source), integers(f"{prefix}target", target)
    if source.ndim != 1 or source.shape != target.shape:
        raise ValueError(
            f"{prefix}source has shape {source.shape} and {prefix}target {target.shape}, but both must have shape "
            f"[N]{what}"
        )
    return source, target


def integers_of_shape(name: str, values: Any, shapes: Container[tuple[int, ...]], what: str) -> Any:
    """`array` of integers; raises a `ValueError` that says ``what`` they must be, unless ``shapes`` has their shape."""
    values = array(values)
    if np.dtype(values.dtype).kind not in "iu" or values.shape not in shapes:
        raise ValueError(f"{name} is {values.dtype} {tuple(values.shape)}, but must be {what}")
    return values


def integers_by_row(name: str, values: Any, batch: int) -> jax.Array:
    """Integers [B] as int32."""
    values = integers_of_shape(name, values, [(batch,)], f"integers [B]=({batch},)")
    known = isinstance(values, np.ndarray) and values.size
    if known and not -(2**31) <= int(values.min()) <= int(values.max()) < 2**31:
        raise ValueError(f"{name} is from {values.min()} to {values.max()}, but must fit int32")
    return int32(values)


def check_layer(layer: Any, layers: int | None) -> None:
    """Raises a `ValueError` unless ``layer`` is an integer, from 0 to ``layers - 1`` as far as it is known."""
    if layers is None:
        raise ValueError(f"layer={layer} is given, but the cache has no layer axis: use it as it is")
    layer = integers_of_shape("layer", layer, [()], "an integer")
    if isinstance(layer, np.ndarray) and not 0 <= int(layer) < layers:
        raise ValueError(f"layer={int(layer)} must be from 0 to {layers - 1}: the cache has {layers} layers")
