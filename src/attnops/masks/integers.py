"""Integers of masks as int32, which kernels compute with.

Limits (windows, lengths, offsets) are clipped, since all limits beyond the last token are equivalent. Ids are
renumbered, and a common number is subtracted from positions. Traced integers that may not fit are refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from attnops.typing import Index, Leaf

# A limit of this size is no limit.
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


def clip_offset(value: Leaf) -> Leaf:
    """An offset, an int or int32, clipped so that adding an index does not overflow int32.

    For a known offset, the `excess` that is clipped off is added to limits instead; for a traced one it is lost.
    """
    if isinstance(value, int):
        return max(-_FARTHEST_OFFSET, min(value, _FARTHEST_OFFSET))
    xp = numpy_of(value)
    return xp.clip(value, -_FARTHEST_OFFSET, _FARTHEST_OFFSET)


def excess(offset: Leaf) -> Leaf:
    """A known offset minus `clip_offset` of it: an int, or an array of Python's integers."""
    if isinstance(offset, int):
        return offset - clip_offset(offset)
    host = np.asarray(offset).astype(object)
    return host - np.clip(host, -_FARTHEST_OFFSET, _FARTHEST_OFFSET)


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


def positions_as_int32(q: Leaf, kv: Leaf, offset: Leaf, length: int, unit: int | None) -> tuple[Leaf, Leaf, int]:
    """Positions as int32; where they don't fit, a common number is subtracted from all.

    Args:
        q: queries' positions, integers [1 or B, T]; None for ``offset + i``.
        kv: keys' positions, integers [1 or B, S]; None for ``j``.
        offset: the offset of queries without positions, an int or an integer array.
        length: T.
        unit: positions may be moved by multiples of this number; None where the mask depends on their values.

    Returns:
        Queries' and keys' positions, and the number subtracted from all; where it is not 0, queries have positions.

    Raises:
        ValueError: int32 holds neither them nor their differences; or they may not fit and are traced.
    """
    given = {name: x for name, x in (("q_positions", q), ("kv_positions", kv)) if x is not None}
    for name, values in given.items():
        check_integers(name, values)
    is_far = isinstance(offset, int) and excess(offset) != 0
    if all(map(fits, given.values())) and not (is_far and q is None and kv is not None):
        q, kv = (None if x is None else x.astype(np.int32) for x in (q, kv))
        return q, kv, 0
    for name, values in given.items():
        if not is_known(values):
            raise ValueError(
                f"{name} has dtype {values.dtype} and is traced, so that its values may not fit int32, which kernels "
                f"compute with; {_ADVICE}"
            )
    if q is None:
        if not isinstance(offset, int):
            raise ValueError(f"kv_positions must fit int32 if the offset is an array; {_ADVICE}")
        q = (np.arange(length) + offset)[None] if -(2**62) < offset < 2**62 else np.full((1, length), offset, object)
    (q_least, q_most), (least, most) = extent(q), (0, 0) if kv is None else extent(kv)
    least, most = min(q_least, least), max(q_most, most)
    moved = 0 if unit is None or kv is None else least // unit * unit
    if most - moved > LARGEST or least - moved < _LEAST:
        raise ValueError(
            f"positions from {least} to {most} must fit int32, which kernels compute with, "
            + ("and this mask depends on their values" if unit is None else "after the first is subtracted")
            + f"; {_ADVICE}, in a coarser unit if need be"
        )
    return _moved(q, moved), None if kv is None else _moved(kv, moved), moved


_ADVICE: Final = "subtract the first token's position, and cast them to int32"


def _moved(values: Leaf, by: int) -> Leaf:
    """Known integers minus a number, as int32."""
    host = np.asarray(values)
    # The difference of 64-bit integers may need 65 bits.
    moved = np.asarray(host.astype(object) - by if host.dtype in (np.uint64, object) else host.astype(np.int64) - by)
    return _like(values, moved.astype(np.int32))


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
    # int64 and uint64 have no common dtype: negative ids are numbered separately, below 0.
    is_negative = np.concatenate([(values < 0).reshape(-1) for values in arrays])
    bits = np.concatenate([values.astype(np.uint64).reshape(-1) for values in arrays])
    numbers = np.empty(bits.shape, np.int32)
    numbers[~is_negative] = np.unique(bits[~is_negative], return_inverse=True)[1]
    below, inverse = np.unique(bits[is_negative], return_inverse=True)
    numbers[is_negative] = inverse - len(below)
    stops = np.cumsum([values.size for values in arrays])[:-1]
    parts = np.split(numbers, stops)
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


def less(limits: Leaf, by: Leaf) -> Leaf:
    """Known limits minus a number, or an array of Python's integers, clipped as by `as_limits`."""
    if isinstance(limits, int) and isinstance(by, int):
        return clip_limit(limits - by)
    host = np.asarray(np.asarray(limits).astype(object) - by)
    return _like(limits, np.clip(host, -LARGEST, LARGEST).astype(np.int32))


def window_less(limit: Leaf, by: Leaf) -> Leaf:
    """A window's limit minus a number or an array of Python's integers: at least 0, clipped as by `as_limits`."""
    if isinstance(limit, jax.Array):
        by = np.clip(np.asarray(by, object), -LARGEST, LARGEST).astype(np.int32)
        return jnp.maximum(minus(as_limits("a window's limit", limit), by), 0)
    left = less(limit if np.shape(limit) else int(limit), by)
    return max(left, 0) if isinstance(left, int) else np.maximum(left, np.int32(0))


def common_unit(sizes: Leaf) -> int | None:
    """The least common multiple of chunk sizes; None where they are traced."""
    if isinstance(sizes, int):
        return sizes
    if not is_known(sizes):
        return None
    return math.lcm(*(int(size) for size in np.asarray(sizes).reshape(-1)))


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
