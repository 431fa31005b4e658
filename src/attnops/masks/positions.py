"""Masks of positions: causal, windows, chunks, prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

import jax.numpy as jnp
import numpy as np

from attnops.masks.at import at
from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid, below_bounds, equal_bounds
from attnops.masks.integers import FAR, as_limits, as_offset, clip_limit, edge_of, farthest, near
from attnops.masks.picture import text
from attnops.typing import Array, BoolArray, Index, Leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every query sees every key."""

    axes: ClassVar = {}

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return (q == q) & (kv == kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        every = np.ones(np.broadcast_shapes(np.shape(grid.q_first), np.shape(grid.kv_first)), bool)
        return CoverageBounds(every, every)

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        return False

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Full()"


class _Positional(Mask):
    """A mask of positions: query i is at ``i + offset``, key j at ``j``."""

    axes: ClassVar = dict.fromkeys(("left", "right", "size", "length", "offset"), "bh")

    offset: Leaf

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        placed = self if self.offset is not None else self.with_offset(S - T)
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        numbers = {x: _number(f"{type(self).__name__}'s {x}", getattr(placed, x), B, H) for x in names}
        offset = as_offset(f"{type(self).__name__}'s offset", placed.offset, numbers["offset"])
        return type(self)(**numbers | {"offset": offset})

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        return at(self, q_positions, kv_positions)

    def with_offset(self, offset: Leaf) -> Self:
        return dataclasses.replace(self, offset=offset)  # type: ignore[type-var]

    def _bound_offset(self) -> Leaf:
        if self.offset is None:
            raise ValueError(
                f"{self!r} has the default offset S - T, but neither length is known; call mask.bind(B, H, T, S)"
            )
        return self.offset

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        given = [text(value) for name, value in fields if name != "offset"]
        if self.offset is not None:
            given.append(f"offset={text(self.offset)}")
        return f"{type(self).__name__}({', '.join(given)})"


def _number(name: str, value: Leaf, B: int, H: int) -> Leaf:
    """An int, or an integer array [B or 1, H or 1]."""
    if value is None:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return clip_limit(value)
    if getattr(value, "dimension_as_value", None) is not None:  # tracers have one too, which is None
        return jnp.asarray(value, np.int32)  # computed from symbolic lengths
    if not hasattr(value, "shape") or np.dtype(value.dtype).kind not in "iu":
        raise ValueError(f"{name}={value!r} must be an int, or an integer array of shape [B or 1, H or 1]")
    value = as_limits(name, value)
    if value.shape == ():
        return int(value) if isinstance(value, (np.ndarray, np.generic)) else value
    if len(value.shape) != 2 or any(size not in (1, full) for size, full in zip(value.shape, (B, H), strict=True)):
        raise ValueError(
            f"{name} has shape {value.shape}, but must be a number or have shape [B or 1, H or 1]=[{B}, {H}]; give "
            f"one per batch as x[:, None], one per head as x[None]"
        )
    return value


def _pick(value: Leaf, b: Index, h: Index) -> Leaf:
    """``value[b, h]`` of a number or an array [B or 1, H or 1]."""
    if getattr(value, "ndim", 0) == 0:
        return value
    value = jnp.asarray(value)
    return value[b if value.shape[0] > 1 else 0, h if value.shape[1] > 1 else 0]


def _spread(value: Leaf) -> Leaf:
    """A number, or an array [B or 1, H or 1] reshaped to broadcast with [B, H, tiles of q, tiles of kv]."""
    return value if getattr(value, "ndim", 0) == 0 else value[:, :, None, None]


def _check_given(name: str, value: Leaf) -> None:
    """Raise a `ValueError` unless a value is an int or an array."""
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "shape")):
        raise ValueError(f"{name}={value!r} must be an int, or an integer array of shape [B or 1, H or 1]")


def _check_least(name: str, value: Leaf, least: int, hint: str = "") -> None:
    """Raise a `ValueError` where a number, or an element of an array known when tracing, is less than ``least``."""
    known = isinstance(value, (int, np.ndarray, np.generic))
    if known and np.size(value) and np.min(value) < least:
        raise ValueError(f"{name}={np.min(value)} must be at least {least}{hint}")


class _Band(_Positional):
    """A mask of ``q - kv`` alone: between two numbers, both included."""

    def _limits(self) -> tuple[Index | None, Index | None]:
        """The lowest and the highest ``q + offset - kv`` at which a query sees a key; None for no limit."""
        raise NotImplementedError

    def _band(self, value: Callable[[Leaf], Leaf]) -> tuple[Index | None, Index | None]:
        """The lowest and the highest ``q - kv`` at which a query sees a key; no limit is None, ±`LARGEST` in arrays."""
        offset = value(self._bound_offset())
        low, high = (edge_of(None if limit is None else value(limit), offset) for limit in self._limits())
        return low, high

    def bands(self) -> Iterator[tuple[Index, Index]]:
        low, high = self._band(_spread)
        yield -FAR if low is None else near(low), FAR if high is None else near(high)

    def sees_itself(self) -> bool:
        if not isinstance(self._bound_offset(), int):
            return False
        low, high = self._band(_spread)
        return (low is None or (isinstance(low, int) and low <= 0)) and (
            high is None or (isinstance(high, int) and high >= 0)
        )

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        low, high = self._band(lambda value: _pick(value, b, h))
        seen: BoolArray = np.True_
        if low is not None:
            seen = q - kv >= low
        if high is not None:
            seen = seen & (q - kv <= high)
        return seen | (kv != kv) if seen is np.True_ else seen

    def allowed_at(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """`allowed` for positions whose differences may overflow int32: compares with a query's first and last key."""
        low, high = self._band(lambda value: _pick(value, b, h))
        seen: BoolArray = np.True_
        if low is not None:
            seen = kv <= farthest(q, low)
        if high is not None:
            seen = seen & (kv >= farthest(q, high))
        return seen | (kv != kv) if seen is np.True_ else seen

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        low, high = self._band(_spread)
        lowest, highest = grid.difference()
        some = every = (lowest == lowest) & (highest == highest)
        if low is not None:
            some, every = highest >= low, lowest >= low
        if high is not None:
            some, every = some & (lowest <= high), every & (highest <= high)
        return CoverageBounds(some, every)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(_Band):
    """No query sees a later key: query i sees key j where ``j <= i + offset``.

    ::

        Causal(), T = S = 4     Causal(), T = 2, S = 4    Causal(offset=0), T = 2, S = 4
        █ · · ·                 █ █ █ ·                   █ · · ·
        █ █ · ·                 █ █ █ █                   █ █ · ·
        █ █ █ ·
        █ █ █ █

    Attributes:
        offset: the position of query 0 among the keys; an int, or an integer array [B or 1, H or 1].
            None aligns at the end for any T and S: the last query sees the last key.
    """

    offset: Leaf = None

    def _limits(self) -> tuple[Index | None, Index | None]:
        return 0, None

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        # Nothing is fully masked if the first query sees key 0, and the last query the last key.
        return not (isinstance(self.offset, int) and self.offset >= max(S - T, 0))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(_Band):
    """Each query sees the keys around it: key j where ``i − left <= j <= i + right``, i being the query's position.

    The query itself is one of them: a config's ``sliding_window=4096`` is ``SlidingWindow(4095, 0)``.

    ::

        SlidingWindow(1, 0)     SlidingWindow(1, 1)
        █ · · ·                 █ █ · ·
        █ █ · ·                 █ █ █ ·
        · █ █ ·                 · █ █ █
        · · █ █                 · · █ █

    Attributes:
        left: keys before, an int >= 0 or an integer array [B or 1, H or 1]; None for all.
        right: keys after, an int >= 0 or an integer array [B or 1, H or 1]; None for all.
        offset: the position of query 0 among the keys, an int or an integer array [B or 1, H or 1]; None for S − T.
    """

    left: Leaf
    right: Leaf
    offset: Leaf = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            _check_least(f"SlidingWindow's {name}", getattr(self, name), 0, ", or None for all")

    def _limits(self) -> tuple[Index | None, Index | None]:
        return None if self.right is None else -self.right, self.left


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunked(_Positional):
    """Positions are divided into chunks, and each query sees the keys of its own chunk: ``i // size == j // size``.

    ::

        Chunked(2)
        █ █ · ·
        █ █ · ·
        · · █ █
        · · █ █

    Attributes:
        size: positions per chunk, an int >= 1 or an integer array [B or 1, H or 1].
        offset: the position of query 0 among the keys, an int or an integer array [B or 1, H or 1]; None for S − T.
    """

    size: Leaf
    offset: Leaf = None

    # Integer division by a number that is not a constant is slow in a kernel.
    fixed: ClassVar = frozenset({"size"})

    def __post_init__(self) -> None:
        _check_given("Chunked's size", self.size)
        _check_least("Chunked's size", self.size, 1)

    def sees_itself(self) -> bool:
        return isinstance(self.offset, int) and self.offset == 0

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        size, offset = _pick(self.size, b, h), _pick(self._bound_offset(), b, h)
        return (q + offset) // size == kv // size

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        size, offset = _spread(self.size), _spread(self._bound_offset())
        q_first, q_last = (grid.q_first + offset) // size, (grid.q_last + offset) // size
        return equal_bounds(q_first, q_last, grid.kv_first // size, grid.kv_last // size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(_Positional):
    """A prefix that every query sees, and causal after it: ``j < length`` or ``j <= i + offset``.

    ::

        PrefixLM(2)
        █ █ · ·
        █ █ · ·
        █ █ █ ·
        █ █ █ █

    Attributes:
        length: keys of the prefix, an int or an integer array [B or 1, H or 1].
        offset: the position of query 0 among the keys, an int or an integer array [B or 1, H or 1]; None for S − T.
    """

    length: Leaf
    offset: Leaf = None

    def __post_init__(self) -> None:
        _check_given("PrefixLM's length", self.length)

    def bands(self) -> Iterator[tuple[Index, Index]]:
        return self._causal().bands()

    def _causal(self) -> Causal:
        return Causal(self._bound_offset())

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        return self.offset is None or self._causal().has_fully_masked_tokens(T, S)

    def sees_itself(self) -> bool:
        return self.offset is not None and self._causal().sees_itself()

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return (kv < _pick(self.length, b, h)) | self._causal().allowed(b, h, q, kv)

    def allowed_at(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """See `_Band.allowed_at`."""
        return (kv < _pick(self.length, b, h)) | self._causal().allowed_at(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return below_bounds(grid.kv_first, grid.kv_last, _spread(self.length)) | self._causal().coverage_bounds(grid)
