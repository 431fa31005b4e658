"""The slots of a cache's rows as masks: where tokens lie is computed from values by row, not read from arrays by slot.

The token in slot s of row b has the number ``n = s``; in a ring of R slots, ``n = s`` up to the newest token's slot and
``n = s - R`` after it. Its position is ``n + shift[b]``, and ``between`` more for each page before its own; it is held
if ``start[b] <= n < stop[b]`` and it has a page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks.at import At, take
from attnops.masks.base import And, Mask, Not, Or
from attnops.masks.coverage import CoverageBounds, Grid, extents
from attnops.masks.picture import text
from attnops.masks.shift import Shifted
from attnops.masks.tokens import Segments

if TYPE_CHECKING:
    from attnops.typing import BoolArray, Index, Leaf

# Segments of what is not there: no query and no key are in the same one.
NO_QUERY, NO_KEY = -1, -2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Slots(Mask):
    """Every query sees the slots that hold a token. Made by `attnops_caches.Cache.slots`.

    Attributes:
        shift: a token's position minus its number, int32 [B].
        start: the number of the first token that is held, int32 [B].
        stop: one more than the number of the last, int32 [B].
        newest: for a ring, the slot of the newest token, int32 [B]; else None.
        exists: for a paged cache, whether each page is in the table, bool [B, M]; else None.
        length: S, the slots of a row; R for a ring.
        page_size: slots per page; 0 without pages.
        between: how many tokens between two pages are on other devices, where a mesh shards the context.
    """

    shift: Leaf
    start: Leaf
    stop: Leaf
    newest: Leaf
    exists: Leaf
    length: int
    page_size: int = 0
    between: int = 0

    axes: ClassVar = {"shift": "b", "start": "b", "stop": "b", "newest": "b", "exists": "b."}
    is_internal: ClassVar = True

    def kinds(self) -> frozenset[str]:
        return frozenset({"Segments"})

    def without_pages(self) -> Slots:
        """The same slots as if every page were in the table; positions do not change."""
        return dataclasses.replace(self, exists=None, page_size=self.page_size if self.between else 0)

    def position(self, b: Index | None, slot: Index) -> jax.Array:
        """The position of the token in a slot, elementwise; None for all rows."""
        return self._apart(self._number(b, slot)) + _of_row(self.shift, b)

    def held(self, b: Index | None, slot: Index) -> BoolArray:
        """Whether a slot holds a token, elementwise; None for all rows."""
        number = self._number(b, slot)
        held = (number >= _of_row(self.start, b)) & (number < _of_row(self.stop, b))
        if self.exists is None:
            return held
        n = self.page_size
        return held & (jnp.repeat(self.exists, n, axis=1) if b is None else take(self.exists, b, slot // n))

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return self.held(b, kv) & (q == q)

    def of_rows(self, rows: jax.Array) -> Slots:
        """The slots of some rows, int32 [n]."""
        taken: Any = {name: jnp.asarray(x)[rows] for name in self.axes if (x := getattr(self, name)) is not None}
        return dataclasses.replace(self, **taken)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        start, stop = _by_tile(self.start), _by_tile(self.stop)
        some: BoolArray = np.False_
        every: BoolArray = np.True_
        for first, last in self._runs(grid.kv_first, grid.kv_last):
            occurs = first <= last
            some = some | (occurs & (jnp.maximum(first, start) <= jnp.minimum(last, stop - 1)))
            every = every & (~occurs | ((first >= start) & (last < stop)))
        held = CoverageBounds(some, every)
        if self.exists is None:
            return held
        pages = (x.reshape(-1) // self.page_size for x in (grid.kv_first, grid.kv_last))
        every, some = (x[:, None, None, :] for x in extents(self.exists, *pages))
        return held & CoverageBounds(some, every)

    def position_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        """The least and the greatest position in each tile of keys."""
        runs, shift = self._runs(grid.kv_first, grid.kv_last), _by_tile(self.shift)
        if len(runs) == 1:
            return self._apart(runs[0][0]) + shift, self._apart(runs[0][1]) + shift
        (first, last), (first_after, last_after) = runs
        # Numbers after the newest token's slot are below those before it.
        least = jnp.where(first_after <= last_after, first_after, first)
        return least + shift, jnp.where(first <= last, last, last_after) + shift

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """The position of each slot int32 [B, S], and whether it holds a token, bool [B, S]."""
        slot = jnp.arange(self.length, dtype=jnp.int32)[None]
        return self.position(None, slot), jnp.asarray(self.held(None, slot))

    def __repr__(self) -> str:
        return f"<int32 {[np.shape(self.shift)[0], self.length]}>"

    def _number(self, b: Index | None, slot: Index) -> jax.Array:
        slot = jnp.asarray(slot, jnp.int32)
        if self.newest is None:
            return slot
        return jnp.where(slot > _of_row(self.newest, b), slot - np.int32(self.length), slot)

    def _apart(self, number: jax.Array) -> jax.Array:
        """Numbers with those of the tokens that are on other devices, before them."""
        return number + number // self.page_size * self.between if self.between else number

    def _runs(self, first: Leaf, last: Leaf) -> list[tuple[jax.Array, jax.Array]]:
        """The first and last number of each run of slots from ``first`` to ``last``; none where the last is less."""
        first, last = jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)
        if self.newest is None:
            return [(first, last)]
        newest, length = _by_tile(self.newest), np.int32(self.length)
        return [(first, jnp.minimum(last, newest)), (jnp.maximum(first, newest + 1) - length, last - length)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Held(Mask):
    """Queries that are not padding see the slots that hold a token.

    Attributes:
        q_positions: int32 [B, T], −1 for padding.
        slots: where the tokens of each row lie.
    """

    q_positions: Leaf
    slots: Slots

    axes: ClassVar = {"q_positions": "bt"}
    is_internal: ClassVar = True
    has_segments: ClassVar = True

    def kinds(self) -> frozenset[str]:
        return frozenset({"Segments"})

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return (take(self.q_positions, b, q) >= 0) & self.slots.held(b, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        least, most = grid.q_extent(self.q_positions)
        return CoverageBounds(most >= 0, least >= 0) & self.slots.coverage_bounds(grid)

    def segments(self) -> Segments:
        """The same mask by arrays."""
        return segments(self.q_positions, self.slots.arrays()[1])

    def __repr__(self) -> str:
        return f"Segments({text(self.q_positions)}, {self.slots!r})"


def segments(q_positions: jax.Array, held: jax.Array) -> Segments:
    """Queries that are not padding, positions int32 [B, T], see the slots that hold a token, bool [B, S]."""
    return Segments(jnp.where(q_positions < 0, NO_QUERY, 0), jnp.where(held, 0, NO_KEY))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AtSlots(Mask):
    """A mask of positions at the positions of queries and slots; `At` without arrays by slot.

    Attributes:
        mask: the mask.
        q_positions: int32 [B, T].
        slots: where the tokens of each row lie.
    """

    mask: Mask
    q_positions: Leaf
    slots: Slots

    axes: ClassVar = {"q_positions": "bt"}
    is_internal: ClassVar = True

    def bind(self, B: int, H: int, T: int, S: int) -> AtSlots:  # type: ignore[override]
        mask = self.mask.with_offset(0)  # type: ignore[attr-defined]
        return AtSlots(mask.bind(B, H, T, S), self.q_positions, self.slots)

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds() | {"at"}

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        allowed = getattr(self.mask, "allowed_at", self.mask.allowed)
        return allowed(b, h, take(self.q_positions, b, q), self.slots.position(b, kv))

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        kv = self.slots.position_bounds(grid)
        return self.mask.coverage_bounds(Grid(*grid.q_extent(self.q_positions), *kv, of_positions=True))

    def __repr__(self) -> str:
        return f"{self.mask.with_offset(None)!r}.at({text(self.q_positions)}, {self.slots!r})"  # type: ignore[attr-defined]


def by_arrays(mask: Mask) -> Mask:
    """A mask with the slots' positions, and whether they hold a token, as arrays: for code that knows no `Slots`."""

    def arrays(x: Mask) -> Mask:
        if isinstance(x, AtSlots):
            return At(x.mask, x.q_positions, x.slots.arrays()[0])
        return x.segments() if isinstance(x, Held) else x

    return mapped(mask, arrays)


def without_table(mask: Mask) -> tuple[Mask, Slots | None]:
    """A mask as if every page were in the table, and the `Slots` that say which pages are; None without pages."""
    with_pages: list[Slots] = []

    def whole(x: Mask) -> Mask:
        if not isinstance(x, Held) or x.slots.exists is None:
            return x
        with_pages.append(x.slots)
        return Held(x.q_positions, x.slots.without_pages())

    mask = mapped(mask, whole)
    return mask, with_pages[0] if with_pages else None


def mapped(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """A mask with ``change(x)`` in place of each mask x that ``&``, ``|`` and ``~`` combine to it."""
    if isinstance(mask, (And, Or)):
        return dataclasses.replace(mask, left=mapped(mask.left, change), right=mapped(mask.right, change))
    if isinstance(mask, (Not, Shifted)):
        return dataclasses.replace(mask, mask=mapped(mask.mask, change))
    return change(mask)


def _of_row(values: Leaf, b: Index | None) -> jax.Array:
    if b is None:  # not indexed by row, which explicit mesh axes do not allow
        return jnp.asarray(values)[:, None]
    taken = jnp.asarray(values)[b]
    # The barrier keeps XLA from repeating the gather for each score of a tile.
    return lax.optimization_barrier(taken) if isinstance(taken, jax.core.Tracer) else taken


def _by_tile(values: Leaf) -> jax.Array:
    return jnp.asarray(values)[:, None, None, None]
