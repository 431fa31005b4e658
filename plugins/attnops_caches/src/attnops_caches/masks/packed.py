"""The masks of packed rows, [1, H, N, B · S]: N queries of B rows of a cache over the slots of all rows.

Both have ``of_tiles``, for kernels in which a tile's queries are of one row: it needs no array by query and slot.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks.at import At, take
from attnops.masks.base import And, Dense, Mask
from attnops.masks.coverage import CoverageBounds, Grid
from attnops.masks.tokens import Segments
from attnops.programs.pytree import replaced
from attnops_caches.masks.slots import NO_QUERY, AtSlots, Held, Slots, mapped

if TYPE_CHECKING:
    from attnops.typing import BoolArray, Index, Leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Packed(And):
    """What the caller's mask allows, and `Segments` of the rows.

    Attributes:
        rows: the index, in the whole cache, of each row on this device, int32 [1, B]; consecutive.
    """

    rows: Leaf

    axes: ClassVar = {"rows": "bs"}
    is_internal: ClassVar = True

    @property
    def q_rows(self) -> jax.Array:
        """The row of each query, counted from this device's first, int32 [N]; −1 for padding and others' rows."""
        return _rows_here(self.right, self.rows)

    def of_tiles(self, queries: jax.Array, exists: jax.Array, row: jax.Array, slots: Slots) -> Mask:
        """The mask of tiles of queries as that of a batch, [n, H, bq, S].

        Args:
            queries: the packed queries of each tile, all of one row, int32 [n, bq].
            exists: whether there is such a tile, bool [n].
            row: the row of each tile, counted from this device's first, int32 [n].
            slots: the slots of each tile's row.
        """

        def of(mask: Mask) -> Mask:
            if not isinstance(mask, At):
                return mask
            assert mask.q_positions is not None
            return AtSlots(mask.mask, jnp.asarray(mask.q_positions)[0][queries], slots.without_pages())

        return And(mapped(self.left, of), _of_tiles(queries, exists, slots))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PackedByRow(Mask):
    """`Packed` for a mask that has values by row, query or key, or is a function of the row.

    It looks values up by both query and key: forwards that don't compute row by row get it as an array, see `by_query`.

    Attributes:
        mask: the mask of a batch by slot, bound to [B, H, N, S]: each row has all N queries.
        exists: `Segments` of the rows.
        rows: the rows of the cache, int32 [1, B].
        slots: S.
    """

    mask: Mask
    exists: Segments
    rows: Leaf
    slots: int

    axes: ClassVar = {"rows": "bs"}
    inner_axes: ClassVar = {"mask": "h"}  # the mask is for all rows, each with its own slots
    is_internal: ClassVar = True

    def kinds(self) -> frozenset[str]:
        return frozenset({"Dense"})

    @property
    def q_rows(self) -> jax.Array:
        return _rows_here(self.exists, self.rows)

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        row = jnp.maximum(take(self.exists.q_ids, b, q), 0)
        return self.mask.allowed(row, h, q, kv % self.slots) & self.exists.allowed(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        exists = self.exists.coverage_bounds(grid)
        return CoverageBounds(exists.some, exists.all & np.False_)

    def of_tiles(self, queries: jax.Array, exists: jax.Array, row: jax.Array, slots: Slots) -> Mask:
        rows = row + jnp.asarray(self.rows)[0, 0]
        return And(OfRows(self.mask, rows, queries), _of_tiles(queries, exists, slots))

    def __repr__(self) -> str:
        return f"{self.mask!r} & {self.exists!r}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OfRows(Mask):
    """A mask of a batch for tiles of queries of some of its rows, [n, H, bq, S].

    Attributes:
        mask: the mask of a batch by slot, bound to [B, H, N, S]: each row has all N queries.
        rows: the row of each tile, int32 [n].
        queries: the queries of each tile, int32 [n, bq].
    """

    mask: Mask
    rows: Leaf
    queries: Leaf

    axes: ClassVar = {"rows": "b", "queries": "bt"}
    is_internal: ClassVar = True

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds()

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return self.mask.allowed(jnp.asarray(self.rows)[b], h, take(self.queries, b, q), kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return self._taken(self.mask).coverage_bounds(grid)

    def _taken(self, mask: Mask) -> Mask:
        """A mask whose arrays by row or query are by tile."""
        if mask.axes is None:
            return mask
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(mask):  # type: ignore[arg-type]
            value, letters = getattr(mask, field.name), mask.axes.get(field.name, "")
            if isinstance(value, Mask):
                changes[field.name] = self._taken(value)
            elif "t" in letters and hasattr(value, "shape"):
                assert letters == "bt", letters
                value = jnp.asarray(value)
                lead = 0 if value.shape[0] == 1 else self.rows[:, None]
                changes[field.name] = value[lead, self.queries]
            elif letters.startswith("b") and np.ndim(value) and value.shape[0] > 1:
                changes[field.name] = jnp.asarray(value)[self.rows]
        return replaced(mask, changes)

    def __repr__(self) -> str:
        return repr(self.mask)


def by_query(mask: Mask, shape: tuple[int, int, int, int]) -> Mask:
    """A mask for forwards that don't compute row by row: a `PackedByRow` as booleans [1, H or 1, N, B · S]."""
    if not isinstance(mask, PackedByRow):
        return mask
    allowed = mask.dense(*shape)
    return Dense(jnp.broadcast_to(allowed, (*allowed.shape[:2], *shape[2:])))


def _rows_here(exists: Any, rows: Leaf) -> jax.Array:
    row = jnp.asarray(exists.q_ids)[0] - jnp.asarray(rows)[0, 0]
    is_here = (exists.q_ids[0] >= 0) & (row >= 0) & (row < np.shape(rows)[1])
    return jnp.where(is_here, row, -1)


def _of_tiles(queries: jax.Array, exists: jax.Array, slots: Slots) -> Held:
    return Held(jnp.where(jnp.broadcast_to(exists[:, None], queries.shape), 0, NO_QUERY), slots)
