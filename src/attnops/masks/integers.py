"""Integers of masks as int32, which kernels compute with.

Limits (windows, lengths) are clipped, since all limits beyond the last token are equivalent, and ids are renumbered.
Positions and offsets that int32 does not hold are refused, and so are traced integers that may not fit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.typing import Index, Leaf

# A limit of this size or more is no limit.
LARGEST: Final = 2**31 - 1
_LEAST: Final = -LARGEST - 1
# More than the difference of any two indices.
FAR: Final = 1 << 29
# Leaves room to add an index without overflow.
_FARTHEST_OFFSET: Final = LARGEST - 2**27


def numpy_of(*values: Leaf) -> ModuleType:
    """`jax.numpy` where a value is a JAX array, else numpy, so that what is known when tracing stays known."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def check_integers(name: str, values: Leaf, kinds: str = "iu") -> None:
    """Raise a `ValueError` unless an array has a dtype of these kinds."""
    if np.dtype(values.dtype).kind not in kinds:
        raise ValueError(f"{name} has dtype {values.dtype}, but must be integers; cast them")


def as_limits(name: str, values: Leaf) -> Leaf:
    """Integers that positions are compared with, as int32: clipped to ±`LARGEST`.

    Raises:
        ValueError: they are not integers.
    """
    check_integers(name, values)
    bounds = np.iinfo(values.dtype)
    xp = numpy_of(values)
    return xp.clip(values, max(-LARGEST, int(bounds.min)), min(LARGEST, int(bounds.max))).astype(np.int32)


def clip_limit(value: int) -> int:
    """`as_limits` of one int."""
    return max(-LARGEST, min(value, LARGEST))


def as_offset(name: str, given: Leaf, offset: Leaf) -> Leaf:
    """A limit ``offset``, made of ``given``, to which an index can be added in int32; a traced one is clipped.

    Raises:
        ValueError: it is known when tracing, and too far from 0.
    """
    if not isinstance(given, (int, np.ndarray, np.generic)):
        return jnp.clip(offset, -_FARTHEST_OFFSET, _FARTHEST_OFFSET)
    farthest = max(extent(given), key=abs)
    if abs(farthest) > _FARTHEST_OFFSET:
        raise ValueError(
            f"{name}={farthest} must be from -{_FARTHEST_OFFSET} to {_FARTHEST_OFFSET}, so that int32, which kernels "
            f"compute with, holds positions; count them from the first token"
        )
    return offset


def minus(a: Leaf, b: Index) -> Leaf:
    """``a − b`` for int32 or ints, saturating."""
    if isinstance(b, int):
        if isinstance(a, int):
            return max(_LEAST, min(a - b, LARGEST))
        xp = numpy_of(a)
        a = xp.asarray(a, np.int32)
        if b == 0:
            return a
        return (xp.maximum(a, np.int32(_LEAST + b)) if b > 0 else xp.minimum(a, np.int32(LARGEST + b))) - np.int32(b)
    if not isinstance(a, jax.Array) and not isinstance(b, jax.Array):
        return np.clip(np.asarray(a, np.int64) - b, _LEAST, LARGEST).astype(np.int32)
    zero = np.int32(0)
    return jnp.clip(a, np.int32(_LEAST) + jnp.maximum(b, zero), np.int32(LARGEST) + jnp.minimum(b, zero)) - b


def as_positions(name: str, values: Leaf) -> Leaf:
    """Positions as int32.

    Raises:
        ValueError: they are not integers, or int32 may not hold them.
    """
    check_integers(name, values)
    if not fits(values):
        what = "from {} to {}".format(*extent(values)) if is_known(values) else f"traced, of dtype {values.dtype},"
        raise ValueError(
            f"{name} {what} must fit int32, which kernels compute with; subtract the first token's position, and cast "
            f"them to int32"
        )
    return values.astype(np.int32)


def ids_as_int32(names: tuple[str, ...], ids: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    """Ids as int32 that are equal where the ids are equal by value.

    Ids that int32 does not hold are renumbered in their order. Traced ones of 64 bits are sorted for it, O(n log n).

    Args:
        names: for error messages.
        ids: integers or booleans of any shapes.

    Raises:
        ValueError: they are not integers; or they are traced, and no JAX dtype holds the values of all their dtypes.
    """
    for name, values in zip(names, ids, strict=True):
        if np.dtype(values.dtype).kind not in "iub":
            raise ValueError(f"{name} has dtype {values.dtype}, but must be integers")
    if all(map(fits, ids)):
        return tuple(values.astype(np.int32) for values in ids)
    if all(map(is_known, ids)):
        return _renumbered(ids)
    dtypes = [np.dtype(values.dtype) for values in ids]
    if all(dtype.kind in "bu" and dtype.itemsize <= 4 for dtype in dtypes):
        return tuple(values.astype(np.int32) for values in ids)  # wraps around, which keeps distinct ids distinct
    common = np.result_type(*dtypes)
    if common.kind not in "iu" or jax.dtypes.canonicalize_dtype(common) != common:
        listed = " and ".join(f"{name} of dtype {dtype}" for name, dtype in zip(names, dtypes, strict=True))
        raise ValueError(
            f"{listed} can't be compared in int32, and are traced, so that they can't be renumbered; cast them to one "
            f"dtype of at most 32 bits"
        )
    wide = [jnp.asarray(values, common) for values in ids]
    every = jnp.sort(jnp.concatenate([values.reshape(-1) for values in wide]))
    return tuple(jnp.searchsorted(every, values).astype(np.int32) for values in wide)


def _renumbered(ids: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    arrays = [np.asarray(values) for values in ids]
    common = np.result_type(*arrays)
    dtype = common if common.kind in "iu" else object  # int64 and uint64 have no common dtype
    every = np.concatenate([values.reshape(-1).astype(dtype) for values in arrays])
    numbers = np.unique(every, return_inverse=True)[1].astype(np.int32)
    parts = np.split(numbers, np.cumsum([values.size for values in arrays])[:-1])
    return tuple(_like(x, part.reshape(x.shape)) for x, part in zip(ids, parts, strict=True))


def is_known(values: Leaf) -> bool:
    """Whether the values of an array can be read here, even while tracing."""
    if isinstance(values, jax.Array):
        return not isinstance(values, jax.core.Tracer) and values.is_fully_addressable
    return isinstance(values, (np.ndarray, np.generic))


def fits(values: Leaf) -> bool:
    """Whether it is certain that int32 holds integers or booleans."""
    dtype = np.dtype(values.dtype)
    if dtype.kind == "b" or (dtype.itemsize < 4) or dtype == np.int32:
        return True
    if not is_known(values):
        return False
    low, high = extent(values)
    return low >= _LEAST and high <= LARGEST


def extent(values: Leaf) -> tuple[int, int]:
    """The least and the greatest of known integers."""
    host = np.asarray(values)
    return (int(host.min()), int(host.max())) if host.size else (0, 0)


def _like(values: Leaf, host: Leaf) -> Leaf:
    """A numpy array as a JAX array if ``values`` is one, else unchanged."""
    return jnp.asarray(host) if isinstance(values, jax.Array) else host


def edge_of(limit: Index | None, offset: Leaf) -> Leaf:
    """A limit minus an offset; None, or ±`LARGEST` in an array, where there is no limit."""
    if limit is None or (isinstance(limit, int) and abs(limit) >= LARGEST):
        return None
    if isinstance(limit, int):
        return -offset if limit == 0 else minus(limit, offset)
    xp = numpy_of(limit, offset)
    return xp.where(abs(limit) == LARGEST, limit, minus(limit, offset))


def farthest(q: Leaf, edge: Leaf) -> Leaf:
    """The first or last position that a query sees, from the highest or lowest ``q - kv``."""
    position = minus(q, edge)
    if isinstance(edge, int):
        return position
    return jnp.where(edge == LARGEST, -LARGEST - 1, jnp.where(edge == -LARGEST, LARGEST, position))


def near(edge: Leaf) -> Leaf:
    """An edge clipped to ±`FAR`, which changes no comparison with differences of indices."""
    if isinstance(edge, int):
        return max(-FAR, min(edge, FAR))
    return numpy_of(edge).clip(edge, -FAR, FAR)
