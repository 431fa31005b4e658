"""Tile schedules: the active tiles of a block map, as a list with one entry per grid step."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from attnops.kernels import Foldable
from attnops.masks import Coverage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from attnops.typing import Array, Leaf, PyTree, Ref

# The first bit of each field of an entry, an int32; bit 0 tells whether it is the first of its row.
_ROW, _COLUMN, _KIND, _LAST = 18, 4, 2, 1
MAX_ROWS: Final = 1 << (31 - _ROW)
MAX_COLUMNS: Final = 1 << (_ROW - _COLUMN)


# Scalar memory has 1 MiB on every generation; an entry has 4 bytes, and a kernel needs the remaining memory.
MAX_ENTRIES: Final = 160 * 1024
# The kind of PARTIAL tiles with code of their own, which leaves out sub-tiles that the mask hides, see `reduced`.
REDUCED: Final = 3
KINDS: Final = (int(Coverage.FULL), int(Coverage.PARTIAL), REDUCED)
_COMPARED: Final = 64
# Sub-tiles of a tile, (row, column) of the schedule.
Hidden: TypeAlias = tuple[tuple[int, int], ...]
# The lowest and the highest ``query − key`` that is seen, None for no limit.
Limits: TypeAlias = tuple[int | None, int | None]


class Body(NamedTuple):
    """What a kernel's code for a kind of tiles computes."""

    masked: bool = False  # whether the mask is applied
    hidden: Hidden = ()  # the sub-tiles that are fully masked in every such tile, and are not computed
    unmasked: Hidden = ()  # the sub-tiles in which no such tile has a masked score; the mask is not applied there
    band: Limits | None = None  # if not None, all that the mask does in the other sub-tiles

    def is_masked(self, row: int, column: int) -> bool:
        """Whether the mask is applied to a sub-tile."""
        return self.masked and (row, column) not in self.unmasked


MASKED: Final = Body(masked=True)
# The code of `REDUCED` tiles, and of other PARTIAL tiles.
Bodies: TypeAlias = tuple[Body, Body]


class Variant(NamedTuple):
    """Code for a kind of entries, without the sub-tiles that are hidden in all tiles before."""

    kind: int  # EMPTY: a row without tiles, or the end of a map
    # The kinds of the entries before; EMPTY: a row without tiles, or padding, after which scores are those of any tile
    # that was before. The last variant of a kind has what no other one has. Empty: any.
    before: tuple[int, ...] = ()


class Entry(NamedTuple):
    """One grid step of a kernel; scalars."""

    row: jax.Array  # index of the row of tiles, whose result is accumulated
    column: jax.Array  # index of the tile in the row
    kind: jax.Array  # an `attnops.masks.Coverage`, or `REDUCED`; EMPTY in the only entry of a row without active tiles
    first: jax.Array  # whether it is the first entry of its row
    last: jax.Array  # whether it is the last entry of its row


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["entries", "traced"],
    meta_fields=["map_shape", "longest", "kinds", "rows", "bodies", "variants", "joined"],
)
@dataclasses.dataclass(frozen=True)
class TileSchedule(Foldable):
    """The active tiles of each map, row by row. A pytree."""

    # Int32 [maps · (longest + 1)]; shorter maps are padded by repeating their last tile as EMPTY, and each map has one
    # such entry more. If batches are joined, the batch of each entry follows each map.
    entries: Ref
    map_shape: tuple[int, int]  # how many batches and heads the maps have, each 1 or all
    longest: int  # the most entries of a map
    kinds: tuple[int, ...]  # the kinds of entries, other than EMPTY; a kernel has code only for these
    rows: tuple[int, int]  # index of the first row, and of the last plus 1
    bodies: Bodies = (MASKED, MASKED)  # the code of `REDUCED` tiles, and of other PARTIAL tiles
    traced: Leaf = None  # for a traced mask, the grid steps that are needed, int32; else None
    variants: tuple[Variant, ...] = ()  # the code of a kernel that accumulates the tile before
    # How many batches each map lists, one after the other, so that none is padded; the grid has so many times fewer
    # batches.
    joined: int = 1

    @property
    def stride(self) -> int:
        """Elements of ``entries`` per map."""
        return (self.longest + 1) * (2 if self.joined > 1 else 1)

    @property
    def steps(self) -> jax.Array | int:
        """Steps of the grid."""
        return self.longest if self.traced is None else self.traced

    def body(self, kind: int) -> Body:
        """The code for a kind of tiles."""
        return _code(self.bodies, kind)

    def hidden_before(self, variant: Variant) -> Hidden:
        """The sub-tiles that are hidden in all tiles before a variant."""
        return tuple(sorted(_hidden(self.bodies, variant.before)))

    def fills(self, kind: int) -> bool:
        """Whether some code reads the scores that tiles of a kind hide, which then are -inf."""
        hidden = _hidden(self.bodies, (kind,))
        follow = (v for v in self.variants if not v.before or {kind, int(Coverage.EMPTY)} & set(v.before))
        return any(not hidden <= _hidden(self.bodies, v.before) for v in follow)

    def padded(self, longest: int) -> Array:
        """The entries, each map padded to a length; the padding is never read."""
        by_map = self.entries.reshape(-1, self.longest + 1)
        return jnp.pad(by_map, ((0, 0), (0, longest - self.longest)), mode="edge").reshape(-1)

    def fold(self, batched: PyTree, n: int, B: int) -> TileSchedule:
        """See `attnops.kernels.vmap.Foldable.fold`."""
        entries = self.entries.reshape(*([n] if batched.entries else []), self.map_shape[0], -1)
        if not batched.entries and self.map_shape[0] == 1:
            folded, batches = entries, 1
        else:
            batches = B // self.joined
            entries = jnp.broadcast_to(entries if batched.entries else entries[None], (n, batches, entries.shape[-1]))
            folded, batches = entries.reshape(n * batches, -1), n * batches
        steps = self.traced.max() if batched.traced else self.traced
        return dataclasses.replace(
            self, entries=folded.reshape(-1), map_shape=(batches, self.map_shape[1]), traced=steps
        )

    def most(self, batched: PyTree, n: int, B: int) -> int:
        """See `attnops.kernels.vmap.Foldable.most`: as many as fit scalar memory."""
        if not batched.entries and self.map_shape[0] == 1:
            return n
        return max(1, min(n, MAX_ENTRIES // (B // self.joined * self.map_shape[1] * self.stride)))

    def at(self, entries: Ref, b: jax.Array, h: jax.Array, step: jax.Array) -> Entry:
        """The entry at a step of the grid's batch ``b`` and head ``h``, read from ``entries`` in scalar memory."""
        return unpack(entries[self._map(b, h) * self.stride + step])

    def batch(self, entries: Ref, b: jax.Array, h: jax.Array, step: jax.Array) -> jax.Array:
        """The batch of an entry."""
        if self.joined == 1:
            return b
        return b * self.joined + entries[self._map(b, h) * self.stride + self.longest + 1 + step]

    def _map(self, b: jax.Array, h: jax.Array) -> jax.Array | int:
        return (b if self.map_shape[0] > 1 else 0) * self.map_shape[1] + (h if self.map_shape[1] > 1 else 0)


def unpack(entry: jax.Array) -> Entry:
    """The fields of a packed entry."""
    return Entry(
        row=entry >> _ROW,
        column=(entry >> _COLUMN) & (MAX_COLUMNS - 1),
        kind=(entry >> _KIND) & 3,
        first=entry & 1,
        last=(entry >> _LAST) & 1,
    )


def row_chunks(coverage: Array) -> list[tuple[int, int]]:
    """Chunks of rows, (start, stop), whose entries fit scalar memory: one chunk, except for millions of tiles.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`, a numpy array or traced.
    """
    *maps, rows, columns = coverage.shape
    known = isinstance(coverage, np.ndarray)
    longest = (coverage > 0).sum(axis=3).max(axis=(0, 1)) if known else np.full(rows, columns)
    used, chunks = 0, [[0, 0]]
    for cost in (maps[0] * maps[1] * np.maximum(longest, 1)).tolist():
        if used + cost > MAX_ENTRIES and used:
            chunks.append([chunks[-1][1], chunks[-1][1]])
            used = 0
        chunks[-1][1] += 1
        used += cost
    return [(first, stop) for first, stop in chunks]


def reduced(coverage: Array, of_sub_tiles: Array) -> tuple[Array, Bodies]:
    """A block map whose PARTIAL tiles are `REDUCED` if they lack certain sub-tiles, and the code of both kinds.

    The set of these sub-tiles is the one that spares most in all, such as those after the diagonal of a causal mask.
    Other PARTIAL tiles are computed without the sub-tiles that all of them lack, such as those before a window.
    The block map must be known when tracing.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`.
        of_sub_tiles: the coverage of sub-tiles, [batches, heads, rows · sub-rows, columns · sub-columns].
    """
    *_, rows, columns = coverage.shape
    down, across = of_sub_tiles.shape[2] // rows, of_sub_tiles.shape[3] // columns
    tiles = of_sub_tiles.reshape(-1, rows, down, columns, across).swapaxes(2, 3)
    tiles = tiles.reshape(*coverage.shape, down * across)[coverage == int(Coverage.PARTIAL)]
    hidden = tiles == int(Coverage.EMPTY)
    sets, times = np.unique(hidden, axis=0, return_counts=True)
    sets, times = sets[~sets.all(axis=1)], times[~sets.all(axis=1)]
    sets = sets[np.argsort(-times * sets.sum(axis=1))][:_COMPARED]
    if not sets.any():
        return coverage, (MASKED, MASKED)
    lacks = hidden.astype(np.int32) @ sets.T.astype(np.int32) == sets.sum(axis=1)
    best = int(np.argmax(lacks.sum(axis=0) * sets.sum(axis=1)))
    coverage = coverage.copy()
    coverage[coverage == int(Coverage.PARTIAL)] = np.where(lacks[:, best], REDUCED, int(Coverage.PARTIAL))
    is_reduced = lacks[:, best]
    return coverage, (_body(tiles[is_reduced], across), _body(tiles[~is_reduced], across))


def _body(tiles: Array, across: int) -> Body:
    """The code of PARTIAL tiles, [tiles, sub-tiles] of `attnops.masks.Coverage`, with ``across`` sub-tiles in a row."""
    if not len(tiles):
        return MASKED
    alike = ((tiles == int(kind)).all(axis=0) for kind in (Coverage.EMPTY, Coverage.FULL))
    hidden, unmasked = (tuple((int(i) // across, int(i) % across) for i in np.flatnonzero(x)) for x in alike)
    return Body(True, hidden, unmasked)


def _code(bodies: Bodies, kind: int) -> Body:
    return Body() if kind in (Coverage.EMPTY, Coverage.FULL) else bodies[kind != REDUCED]


def _hidden(bodies: Bodies, kinds: Iterable[int]) -> frozenset[tuple[int, int]]:
    """The sub-tiles that all tiles of these kinds hide; none of no kinds."""
    sets = [frozenset(_code(bodies, kind).hidden) for kind in kinds]
    return frozenset.intersection(*sets) if sets else frozenset()


def kinds_of(schedules: Iterable[TileSchedule]) -> tuple[int, ...]:
    """The kinds of entries of any of these schedules, in the order of `KINDS`."""
    kinds = {kind for schedule in schedules for kind in schedule.kinds}
    return tuple(kind for kind in KINDS if kind in kinds)


def tile_schedule(
    coverage: Array, first_row: int = 0, first_column: int = 0, bodies: Bodies = (MASKED, MASKED), joins: bool = False,
    sequential: bool = False, sub_tiles: int = 1, most_code: float = math.inf,
) -> TileSchedule:  # fmt: skip
    """The schedule of a block map: its active tiles, and one EMPTY entry for each row without any.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`. A numpy array if the mask is known when
            tracing; a traced one is sorted at run time, in O(rows · columns) integers.
        first_row: index of the first row, if the coverage is a chunk of rows.
        first_column: index of the first column, if the coverage is a chunk of columns.
        bodies: the code of `REDUCED` tiles, and of other PARTIAL tiles, from `reduced`.
        joins: whether the maps of batches may be listed one after the other, see `TileSchedule.joined`.
        sequential: whether one core runs all maps in order, so that a map's first tile follows another's last one.
        sub_tiles: how many sub-tiles a tile has.
        most_code: how much code the kernel may have, as a multiple of that of a FULL tile.

    Raises:
        ValueError: there are more tiles than an entry can number.
    """
    xp: ModuleType = np if isinstance(coverage, np.ndarray) else jnp
    *maps, rows, columns = coverage.shape
    if first_row + rows > MAX_ROWS or first_column + columns > MAX_COLUMNS:
        raise ValueError(f"{rows} × {columns} tiles are more than {MAX_ROWS} × {MAX_COLUMNS}; make tiles larger")
    coverage = coverage.reshape(-1, rows, columns).astype(np.int32)
    active = coverage > 0
    active = active | ((np.arange(columns) == 0) & ~active.any(axis=2, keepdims=True))
    position = xp.cumsum(active, axis=2)
    first, last = active & (position == 1), active & (position == position[:, :, -1:])
    row, column = np.arange(rows, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)
    packed = ((row + first_row) << _ROW) | ((column + first_column) << _COLUMN) | (coverage << _KIND)
    packed = packed | (last.astype(np.int32) << _LAST) | first
    packed, active = packed.reshape(len(coverage), -1), active.reshape(len(coverage), -1)
    n = maps[0] if joins and maps[1] == 1 and 2 * active.size < MAX_ENTRIES else 1
    if xp is np and n > 1 and len(set(active.sum(axis=1).tolist())) == 1:
        n = 1  # nothing is padded
    packed, active = packed.reshape(len(packed) // n, -1), active.reshape(len(active) // n, -1)
    count = active.sum(axis=1)
    if xp is np:
        longest = int(count.max())
        order = [np.flatnonzero(d) for d in active]
        index: Array = np.stack([np.pad(o, (0, longest + 1 - len(o)), mode="edge") for o in order])
        steps = None
        kinds = tuple(kind for kind in KINDS if (coverage == kind).any())
    else:
        kinds = KINDS[:2]
        longest = active.shape[1]
        index = jnp.minimum(jnp.arange(longest + 1), count[:, None] - 1)
        index = jnp.take_along_axis(jnp.argsort(~active, axis=1, stable=True), index, axis=1)
        steps = count.max().astype(jnp.int32)
    entries = xp.take_along_axis(packed, index, axis=1)
    repeated = np.arange(longest + 1) >= count[:, None]
    entries = xp.where(repeated, entries & ~((3 << _KIND) | (1 << _LAST) | 1), entries)
    variants = tuple(Variant(kind) for kind in (*kinds, int(Coverage.EMPTY)))
    if xp is np:
        variants = _variants(unpack(entries[:, :-1]), bodies, sequential, sub_tiles, most_code)
    if n > 1:
        entries = xp.concatenate([entries, index // (rows * columns)], axis=1)
    return TileSchedule(
        jnp.asarray(entries.reshape(-1), jnp.int32),
        (maps[0] // n, maps[1]),
        longest,
        kinds,
        (first_row, first_row + rows),
        bodies,
        steps,
        variants,
        n,
    )


def _variants(entries: Entry, bodies: Bodies, sequential: bool, sub_tiles: int, most: float) -> tuple[Variant, ...]:
    """`TileSchedule.variants`.

    Args:
        entries: [maps, entries of a map].
        bodies: the code of `REDUCED` tiles, and of other PARTIAL tiles.
        sequential: see `tile_schedule`.
        sub_tiles: how many sub-tiles a tile has.
        most: how much code a kernel may have, as a multiple of that of a FULL tile. Variants are merged until it fits,
            those first that then compute least in addition.
    """
    kinds, empty = entries.kind, int(Coverage.EMPTY)
    # Padding does nothing, and neither does a row without tiles after another.
    is_row = (kinds == empty) & (entries.first == 1)
    does = (kinds[:, 1:] != empty) | is_row[:, 1:] & ~is_row[:, :-1]
    runs = collections.Counter(zip(kinds[:, 1:][does].tolist(), kinds[:, :-1][does].tolist(), strict=True))
    starts, ends = set(kinds[:, 0].tolist()), set(kinds[:, -1].tolist())
    runs.update((empty, end) for end in ends)
    if sequential:
        runs.update((start, end) for start in starts for end in ends)
    # Before the first tile of all nothing has a score, so that any variant of its kind will do.
    runs.update((start, start) for start in starts - {kind for kind, _ in runs})
    variants = {Variant(kind, (before,)): times for (kind, before), times in runs.items()}

    def left_out(before: Iterable[int]) -> int:
        return len(_hidden(bodies, before))

    def size(variant: Variant) -> float:
        computed = 0 if variant.kind == empty else sub_tiles - left_out((variant.kind,))
        return (computed + sub_tiles - left_out(variant.before)) / (2 * sub_tiles)

    def merge(pair: tuple[Variant, Variant]) -> tuple[int, Variant]:
        """How many sub-tiles are accumulated in addition, and the merged variant."""
        both = Variant(pair[0].kind, tuple(sorted({*pair[0].before, *pair[1].before})))
        return sum(variants[v] * (left_out(v.before) - left_out(both.before)) for v in pair), both

    while pairs := [(*merge(x), x) for x in itertools.combinations(variants, 2) if x[0].kind == x[1].kind]:
        cost, both, pair = min(pairs)
        if cost and sum(map(size, variants)) <= most:
            break
        variants[both] = sum(variants.pop(v) for v in pair)
    return tuple(sorted(variants, key=lambda v: ((*KINDS, empty).index(v.kind), v.before)))


class TileSchedules(NamedTuple):
    """The schedules of all kernels."""

    forward: tuple[TileSchedule, ...]  # rows are tiles of queries; one for each chunk of rows, see `row_chunks`
    spans: tuple[TileSchedule, ...]  # rows are tiles of keys; one for each span of queries
    # for the gradient of an array bias: rows are tiles of queries, merged over the batches and heads that share an
    # element of the bias; None without one.
    by_score: TileSchedule | None
