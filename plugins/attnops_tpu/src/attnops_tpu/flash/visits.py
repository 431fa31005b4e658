"""The list of tiles that a kernel visits, one grid step each, built from a block map."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.kernels import Foldable
from attnops.masks import Coverage

# An entry is one int32: tile of the row, tile of the column, what is to be done, and where a row begins and ends.
_ROW, _COLUMN, _KIND, _LAST = 18, 4, 2, 1
MAX_ROWS: Final = 1 << (31 - _ROW)
MAX_COLUMNS: Final = 1 << (_ROW - _COLUMN)


# Scalar memory has 1 MiB on every generation; an entry has 4 bytes, and a kernel needs the rest.
MOST_ENTRIES: Final = 160 * 1024
KINDS: Final = (int(Coverage.FULL), int(Coverage.PARTIAL))


class Entry(NamedTuple):
    """One visit, as a kernel sees it; numbers.

    Attributes:
        row: the tile whose result is accumulated.
        column: the tile that is added to it.
        kind: an `attnops.masks.Coverage`; EMPTY where a row has nothing to add and only its end is due.
        first: whether the row begins.
        last: whether the row ends.
    """

    row: Any
    column: Any
    kind: Any
    first: Any
    last: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["entries", "traced"],
    meta_fields=["maps", "longest", "kinds", "rows"],
)
@dataclasses.dataclass(frozen=True)
class Visits(Foldable):
    """The visits of each map, in order of rows. A pytree.

    Attributes:
        entries: int32 [maps · (longest + 1)]; a map's end, and one entry more, repeat its last tile and do nothing.
        maps: the batches and heads that the maps tell apart, each 1 or all.
        longest: visits a map.
        kinds: the `attnops.masks.Coverage` that entries may have, EMPTY excepted; a kernel has code for no other.
        rows: the first row, and the one after the last.
        traced: where that is more than a grid needs, the steps that it needs, int32; else None.
    """

    entries: Any
    maps: tuple[int, int]
    longest: int
    kinds: tuple[int, ...]
    rows: tuple[int, int]
    traced: Any = None

    @property
    def steps(self) -> Any:
        """The steps of a grid."""
        return self.longest if self.traced is None else self.traced

    def padded(self, longest: int) -> Any:
        """The entries of each map, padded to a length; the padding is never reached."""
        by_map = self.entries.reshape(-1, self.longest + 1)
        return jnp.pad(by_map, ((0, 0), (0, longest - self.longest)), mode="edge").reshape(-1)

    def fold(self, batched: Any, n: int, B: int) -> Visits:
        """See `attnops.kernels.vmap.Foldable.fold`."""
        entries = self.entries.reshape(*([n] if batched.entries else []), self.maps[0], -1)
        if not batched.entries and self.maps[0] == 1:
            folded, batches = entries, 1
        else:
            entries = jnp.broadcast_to(entries if batched.entries else entries[None], (n, B, entries.shape[-1]))
            folded, batches = entries.reshape(n * B, -1), n * B
        steps = self.traced.max() if batched.traced else self.traced
        return dataclasses.replace(self, entries=folded.reshape(-1), maps=(batches, self.maps[1]), traced=steps)

    def at(self, entries: Any, b: Any, h: Any, step: Any) -> Entry:
        """The visit of a batch and head at a step, read from ``entries`` in scalar memory."""
        m = (b if self.maps[0] > 1 else 0) * self.maps[1] + (h if self.maps[1] > 1 else 0)
        return unpack(entries[m * (self.longest + 1) + step])


def unpack(entry: Any) -> Entry:
    """The parts of a packed entry."""
    return Entry(
        row=entry >> _ROW,
        column=(entry >> _COLUMN) & (MAX_COLUMNS - 1),
        kind=(entry >> _KIND) & 3,
        first=entry & 1,
        last=(entry >> _LAST) & 1,
    )


def row_spans(coverage: Any) -> list[tuple[int, int]]:
    """Rows, first and stop, whose visits fit scalar memory together: all of them but for millions of tiles.

    Args:
        coverage: see `visits`.
    """
    *maps, rows, columns = coverage.shape
    known = isinstance(coverage, np.ndarray)
    longest = (coverage > 0).sum(axis=3).max(axis=(0, 1)) if known else np.full(rows, columns)
    room, spans = 0, [[0, 0]]
    for cost in (maps[0] * maps[1] * np.maximum(longest, 1)).tolist():
        if room + cost > MOST_ENTRIES and room:
            spans.append([spans[-1][1], spans[-1][1]])
            room = 0
        spans[-1][1] += 1
        room += cost
    return [(first, stop) for first, stop in spans]


def visits(coverage: Any, first_row: int = 0, first_column: int = 0) -> Visits:
    """The tiles of a block map that are not EMPTY, and one entry for each row that has none.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`; numpy's where it is known when tracing. A
            traced one is put in order at run time, O(rows · columns) integers.
        first_row: the number of the first row, where these are a part.
        first_column: of the first column, likewise.

    Raises:
        ValueError: there are more tiles than an entry can number.
    """
    xp: Any = np if isinstance(coverage, np.ndarray) else jnp
    *maps, rows, columns = coverage.shape
    if first_row + rows > MAX_ROWS or first_column + columns > MAX_COLUMNS:
        raise ValueError(f"{rows} × {columns} tiles are more than {MAX_ROWS} × {MAX_COLUMNS}; make tiles larger")
    coverage = coverage.reshape(-1, rows, columns).astype(np.int32)
    due = coverage > 0
    due = due | ((np.arange(columns) == 0) & ~due.any(axis=2, keepdims=True))
    position = xp.cumsum(due, axis=2)
    first, last = due & (position == 1), due & (position == position[:, :, -1:])
    row, column = np.arange(rows, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)
    packed = ((row + first_row) << _ROW) | ((column + first_column) << _COLUMN) | (coverage << _KIND)
    packed = packed | (last.astype(np.int32) << _LAST) | first
    packed, due = packed.reshape(len(coverage), -1), due.reshape(len(coverage), -1)
    count = due.sum(axis=1)
    if xp is np:
        longest = int(count.max())
        order = [np.flatnonzero(d) for d in due]
        index: Any = np.stack([np.pad(o, (0, longest + 1 - len(o)), mode="edge") for o in order])
        steps = None
        kinds = tuple(kind for kind in KINDS if (coverage == kind).any())
    else:
        kinds = KINDS
        longest = rows * columns
        index = jnp.minimum(jnp.arange(longest + 1), count[:, None] - 1)
        index = jnp.take_along_axis(jnp.argsort(~due, axis=1, stable=True), index, axis=1)
        steps = count.max().astype(jnp.int32)
    entries = xp.take_along_axis(packed, index, axis=1)
    repeated = np.arange(longest + 1) >= count[:, None]
    entries = xp.where(repeated, entries & ~((3 << _KIND) | (1 << _LAST) | 1), entries)
    return Visits(
        jnp.asarray(entries.reshape(-1), jnp.int32),
        (maps[0], maps[1]),
        longest,
        kinds,
        (first_row, first_row + rows),
        steps,
    )


class Maps(NamedTuple):
    """The tiles to visit, for each kernel.

    Attributes:
        forward: by tiles of queries, for as many rows as fit scalar memory together.
        spans: by tiles of keys, for each span of queries.
        by_score: every tile once, of all batches and heads together: for the gradient of an array bias.
    """

    forward: tuple[Visits, ...]
    spans: tuple[Visits, ...]
    by_score: Visits | None
