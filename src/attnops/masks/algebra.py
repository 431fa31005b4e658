"""Masks combined: and, or, not, and at other positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.base import Mask
from attnops.masks.integers import positions_as_int32
from attnops.masks.tiles import Grid, TileCoverage, check_by_token


def as_mask(value: Any) -> Mask:
    """A mask as it is; a boolean array, 4-D, as `Dense`.

    Raises:
        TypeError: ``value`` is neither.
    """
    if isinstance(value, Mask):
        return value
    if getattr(value, "ndim", None) == 4 and value.dtype == np.bool_:
        from attnops.masks.tokens import Dense

        return Dense(value)
    raise TypeError(f"a mask combines with masks and with boolean arrays of rank 4, not with {type(value).__name__}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    """Two masks combined.

    Attributes:
        left: the one before the operator.
        right: the one after it.
    """

    left: Mask
    right: Mask

    axes: ClassVar = {}
    symbol = ""

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return type(self)(self.left.bind(B, H, T, S), self.right.bind(B, H, T, S))

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return type(self)(self.left.at(q_positions, kv_positions), self.right.at(q_positions, kv_positions))

    def kinds(self) -> frozenset[str]:
        return self.left.kinds() | self.right.kinds() | {self.symbol}

    def bands(self) -> Iterator[tuple[Any, Any]]:
        yield from self.left.bands()
        yield from self.right.bands()

    def __repr__(self) -> str:
        sides = (f"({x!r})" if isinstance(x, _Pair) and x.symbol != self.symbol else repr(x)
                 for x in (self.left, self.right))  # fmt: skip
        return f" {self.symbol} ".join(sides)


class And(_Pair):
    """Seen by both masks."""

    symbol = "&"

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.left.allowed(b, h, q, kv) & self.right.allowed(b, h, q, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return self.left.tiles(grid) & self.right.tiles(grid)

    def sees_itself(self) -> bool:
        return self.left.sees_itself() and self.right.sees_itself()


class Or(_Pair):
    """Seen by either mask."""

    symbol = "|"

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.left.allowed(b, h, q, kv) | self.right.allowed(b, h, q, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return self.left.tiles(grid) | self.right.tiles(grid)

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        return (
            self.left.has_fully_masked_tokens(T, S)
            and self.right.has_fully_masked_tokens(T, S)
            and super().has_fully_masked_tokens(T, S)
        )

    def sees_itself(self) -> bool:
        return self.left.sees_itself() or self.right.sees_itself()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Not seen by a mask."""

    mask: Mask

    axes: ClassVar = {}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return type(self)(self.mask.bind(B, H, T, S))

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return Not(self.mask.at(q_positions, kv_positions))

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds() | {"~"}

    def bands(self) -> Iterator[tuple[Any, Any]]:
        return self.mask.bands()

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return np.True_ ^ self.mask.allowed(b, h, q, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return ~self.mask.tiles(grid)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Pair) else f"~{self.mask!r}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class At(Mask):
    """A mask of positions, for tokens whose positions are given. Made by `Mask.at`.

    Attributes:
        mask: the mask.
        q_positions: integers [T], [1, T] or [B, T]; None for where the mask's own offset puts queries.
        kv_positions: integers [S], [1, S] or [B, S]; None for ``j``.

    Positions that int32 does not hold, such as milliseconds since 1970, are counted from the least of them where they
    are known when tracing and the mask does not read them as they are, as `MaskFn` does; else binding refuses them.
    """

    mask: Mask
    q_positions: Any
    kv_positions: Any

    axes: ClassVar = {"q_positions": "bt", "kv_positions": "bs"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        given = (("q_positions", self.q_positions, T), ("kv_positions", self.kv_positions, S))
        q, kv = (None if x is None else token_array(name, x, B, n) for name, x, n in given)
        mask: Any = self.mask
        offset = getattr(mask, "offset", 0)
        unit = mask.position_unit() if hasattr(mask, "position_unit") else None
        q, kv, moved = positions_as_int32(q, kv, S - T if offset is None else offset, T, unit)
        mask = mask.moved(moved) if moved else mask
        return type(self)((mask if q is None else mask.with_offset(0)).bind(B, H, T, S), q, kv)

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        kv_positions = self.kv_positions if kv_positions is None else kv_positions
        if self.q_positions is None:
            return at(self.mask, q_positions, kv_positions)
        return At(self.mask, self.q_positions if q_positions is None else q_positions, kv_positions)

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds() | {"at"}

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        q = q if self.q_positions is None else take(self.q_positions, b, q)
        kv = kv if self.kv_positions is None else take(self.kv_positions, b, kv)
        # Differences of positions need not fit int32, where those of indices do.
        allowed = getattr(self.mask, "allowed_at", self.mask.allowed)
        return allowed(b, h, q, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        # Of a tile only the extent of its positions is looked at: what holds for all numbers between holds for them.
        q, kv = (grid.q_first, grid.q_last), (grid.kv_first, grid.kv_last)
        if self.q_positions is not None:
            q = grid.q_extent(self.q_positions)
        if self.kv_positions is not None:
            kv = grid.kv_extent(self.kv_positions)
        return self.mask.tiles(Grid(*q, *kv, of_positions=True))

    def __repr__(self) -> str:
        # Where positions are given, a bound mask's offset of 0 is not what anybody wrote.
        mask = self.mask if self.q_positions is None else self.mask.with_offset(None)  # type: ignore[attr-defined]
        return f"{mask!r}.at({text(self.q_positions)}, {text(self.kv_positions)})"


def at(mask: Mask, q_positions: Any, kv_positions: Any) -> Mask:
    """`At`, unless the mask says itself where queries stand.

    Raises:
        ValueError: both it and ``q_positions`` do.
    """
    offset = getattr(mask, "offset", None)
    if q_positions is not None and offset is not None:
        raise ValueError(
            f"{mask!r} states offset={text(offset)}, but q_positions={text(q_positions)} say where queries stand: "
            f"leave one of them out"
        )
    return At(mask, q_positions, kv_positions)


def token_array(name: str, values: Any, B: int, length: int) -> Any:
    """One value a token as [1, length] or [B, length]; lists become numpy's, arrays stay what they are.

    Raises:
        ValueError: the shape is another.
    """
    if not hasattr(values, "shape"):
        values = np.asarray(values)
    if values.shape not in ((length,), (1, length), (B, length)):
        raise ValueError(f"{name} has shape {values.shape}, but must have shape [{length}] or [{B}, {length}]")
    return values.reshape(-1, length)


def take(values: Any, b: Any, index: Any) -> Any:
    """``values[b, index]`` for values of shape [B or 1, length]."""
    check_by_token(values)
    if isinstance(values, np.ndarray) and not isinstance(index, np.ndarray):
        values = jnp.asarray(values)  # a traced index needs a JAX array
    found = values[0, index] if values.shape[0] == 1 else values[b, index]
    # The barrier keeps XLA from looking every token up again for each score of a tile.
    return lax.optimization_barrier(found) if isinstance(found, jax.core.Tracer) else found


def text(value: Any) -> str:
    """An array by dtype and shape, anything else as Python prints it."""
    is_array = isinstance(value, jax.Array) or getattr(value, "shape", ()) != ()
    return f"<{value.dtype} {list(value.shape)}>" if is_array else repr(value)
