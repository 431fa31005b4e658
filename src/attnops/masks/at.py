"""Masks at given positions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid, check_by_token
from attnops.masks.integers import as_positions
from attnops.masks.picture import text
from attnops.typing import Array, BoolArray, Index, Leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class At(Mask):
    """A mask of positions with the tokens' positions given. Made by `Mask.at`.

    Attributes:
        mask: the mask.
        q_positions: integers [T], [1, T] or [B, T]; None for ``i`` plus the mask's own offset.
        kv_positions: integers [S], [1, S] or [B, S]; None for ``j``.

    Binding refuses positions that int32 does not hold, such as milliseconds since 1970. A window of 2³¹ − 1 or more is
    no limit, however far apart positions are.
    """

    mask: Mask
    q_positions: Array | None
    kv_positions: Array | None

    axes: ClassVar = {"q_positions": "bt", "kv_positions": "bs"}

    def bind(self, B: int, H: int, T: int, S: int) -> Mask:  # type: ignore[override]
        given = (("q_positions", self.q_positions, T), ("kv_positions", self.kv_positions, S))
        q, kv = (None if x is None else as_positions(name, token_array(name, x, B, n)) for name, x, n in given)
        mask: Any = self.mask
        if hasattr(mask, "bind_at"):  # it reads positions in its own way
            bound: Mask = mask.bind_at(B, H, T, S, q, kv)
            return bound
        return type(self)((mask if q is None else mask.with_offset(0)).bind(B, H, T, S), q, kv)

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        kv_positions = self.kv_positions if kv_positions is None else kv_positions
        if self.q_positions is None:
            return at(self.mask, q_positions, kv_positions)
        return At(self.mask, self.q_positions if q_positions is None else q_positions, kv_positions)

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds() | {"at"}

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        q = q if self.q_positions is None else take(self.q_positions, b, q)
        kv = kv if self.kv_positions is None else take(self.kv_positions, b, kv)
        # Differences of positions may overflow int32; differences of indices do not.
        allowed = getattr(self.mask, "allowed_at", self.mask.allowed)
        return allowed(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        # From a tile's lowest and highest position: what holds for all numbers in between holds for its positions.
        q, kv = (grid.q_first, grid.q_last), (grid.kv_first, grid.kv_last)
        if self.q_positions is not None:
            q = grid.q_extent(self.q_positions)
        if self.kv_positions is not None:
            kv = grid.kv_extent(self.kv_positions)
        return self.mask.coverage_bounds(Grid(*q, *kv, of_positions=True))

    def __repr__(self) -> str:
        # Binding sets the offset to 0 where positions are given; the expression had none.
        mask = self.mask if self.q_positions is None else self.mask.with_offset(None)  # type: ignore[attr-defined]
        return f"{mask!r}.at({text(self.q_positions)}, {text(self.kv_positions)})"


def at(mask: Mask, q_positions: Array | None, kv_positions: Array | None) -> Mask:
    """`At` of a mask of positions.

    Raises:
        ValueError: the mask has an offset of its own, and ``q_positions`` are given too.
    """
    offset = getattr(mask, "offset", None)
    if q_positions is not None and offset is not None:
        raise ValueError(
            f"{mask!r} has offset={text(offset)}, and q_positions={text(q_positions)} are given too: both place the "
            f"queries; give only one"
        )
    return At(mask, q_positions, kv_positions)


def token_array(name: str, values: Leaf, B: int, length: int) -> Array:
    """One value per token as [1, length] or [B, length]; lists become numpy arrays.

    Raises:
        ValueError: the shape is none of [length], [1, length] and [B, length].
    """
    if not hasattr(values, "shape"):
        values = np.asarray(values)
    if values.shape not in ((length,), (1, length), (B, length)):
        raise ValueError(f"{name} has shape {values.shape}, but must have shape [{length}] or [{B}, {length}]")
    return values.reshape(values.shape if values.ndim == 2 else (1, length))


def take(values: Leaf, b: Index, index: Index) -> Array:
    """``values[b, index]`` for values of shape [B or 1, length]."""
    check_by_token(values)
    if isinstance(values, np.ndarray) and not isinstance(index, np.ndarray):
        values = jnp.asarray(values)  # a traced index needs a JAX array
    taken = values[0, index] if values.shape[0] == 1 else values[b, index]
    # The barrier keeps XLA from repeating the gather for each score of a tile.
    return lax.optimization_barrier(taken) if isinstance(taken, jax.core.Tracer) else taken
