"""Which tiles a kernel visits, in which order: for each row of tiles the FULL ones, then the PARTIAL ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.kernels import Foldable
from attnops.masks import Coverage
from attnops_triton.flash.bits import Pack


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ranges", "columns", "words", "first"],
    meta_fields=["maps", "rows", "width", "constant", "full", "partial"],
)
@dataclasses.dataclass(frozen=True)
class Visits(Foldable):
    """The tiles that each row visits. A pytree.

    Where the FULL columns of every row follow one another, and so do the PARTIAL ones, two ranges say it all; this is
    so for causal masks and windows. Else the ranges are of a list of columns.

    Attributes:
        ranges: int32 [maps · rows · 4], where FULL starts and stops, where PARTIAL starts and stops; None for constant.
        columns: int32 [maps · rows · width], the columns that the ranges are of; None where they are of columns.
        maps: the batches and heads that the maps tell apart, each 1 or all.
        rows: rows of a map.
        width: columns listed a row; 0 without a list.
        constant: the ranges, where they are the same for every row.
        full: whether there are FULL tiles.
        partial: whether there are PARTIAL tiles.
        words: int32 [tiles, bq, words a query], the bits of PARTIAL tiles row by row; None for a mask without bits.
        first: int32 [maps · rows], the number of a row's first PARTIAL tile among them.
    """

    ranges: Any
    columns: Any
    maps: tuple[int, int]
    rows: int
    width: int
    constant: tuple[int, int, int, int] | None
    full: bool
    partial: bool
    words: Any = None
    first: Any = None

    def fold(self, batched: Any, n: int, B: int) -> Visits:
        """See `attnops.kernels.vmap.Foldable.fold`."""
        is_shared = not any((batched.ranges, batched.columns, batched.words, batched.first))
        if is_shared and (self.maps[0] == 1 or (self.constant is not None and self.words is None)):
            return self

        def folded(x: Any, is_batched: Any) -> Any:
            if x is None:
                return None
            x = x.reshape(*([n] if is_batched else []), self.maps[0], -1)
            return jnp.broadcast_to(x if is_batched else x[None], (n, B, x.shape[-1])).reshape(-1)

        words, first = self.words, folded(self.first, batched.first)
        if words is not None and batched.words:
            # Each slice's tiles follow those of the one before it.
            first = (first.reshape(n, -1) + np.arange(n)[:, None] * words.shape[1]).reshape(-1)
            words = words.reshape(-1, *words.shape[2:])
        return dataclasses.replace(
            self,
            ranges=folded(self.ranges, batched.ranges),
            columns=folded(self.columns, batched.columns),
            maps=(n * B, self.maps[1]),
            words=words,
            first=first,
        )


class Scores(NamedTuple):
    """What a mask says of every tile.

    Attributes:
        coverage: int8 [B or 1, H or 1, tiles of q, tiles of kv].
        words: int32 [tiles, bq, words a query], the bits of those that are not EMPTY; None for a mask without bits.
        numbers: int32, as ``coverage``: the number of a tile among them.
    """

    coverage: Any
    words: Any
    numbers: Any


def visits(coverage: Any, pack: Pack | None = None, by_key: bool = False) -> Visits:
    """The visits of a block map.

    Args:
        coverage: [batches, heads, rows, columns] of `attnops.masks.Coverage`; numpy's where it is known when tracing.
            A traced one is put in order at run time, in O(rows · columns) integers.
        pack: computes the bits of tiles, for a mask that has them; of all tiles for a traced coverage.
        by_key: whether rows are tiles of keys, and columns of queries; else the other way round.
    """
    if pack is not None:
        given = pack
        pack = (lambda b, h, row, column: given(b, h, column, row)) if by_key else given
    return _known(coverage, pack) if isinstance(coverage, np.ndarray) else _traced(coverage, pack)


def _known(coverage: Any, pack: Pack | None) -> Visits:
    *maps, rows, columns = coverage.shape
    found = _static(coverage.reshape(-1, rows, columns), (maps[0], maps[1]))
    if pack is None or not found.partial:
        return found
    is_partial = coverage == Coverage.PARTIAL
    count = is_partial.sum(axis=3).reshape(-1)
    first = jnp.asarray(np.cumsum(count) - count, jnp.int32)
    return dataclasses.replace(found, words=pack(*np.nonzero(is_partial)), first=first)


def _traced(coverage: Any, pack: Pack | None) -> Visits:
    *maps, rows, columns = coverage.shape
    flat = coverage.reshape(-1, rows, columns)
    n_full = (flat == Coverage.FULL).sum(axis=2, dtype=jnp.int32)
    n_partial = (flat == Coverage.PARTIAL).sum(axis=2, dtype=jnp.int32)
    ranges = jnp.stack([jnp.zeros_like(n_full), n_full, n_full, n_full + n_partial], axis=2)
    order = jnp.argsort(_rank(flat), axis=2, stable=True).astype(jnp.int32)
    words = first = None
    if pack is not None:
        b, h, row, _ = (x.reshape(-1) for x in np.indices(coverage.shape, np.int32))
        words = pack(b, h, row, order.reshape(-1))
        first = (n_full + (np.arange(n_full.size, dtype=np.int32) * columns).reshape(n_full.shape)).reshape(-1)
    return Visits(
        ranges.reshape(-1), order.reshape(-1), (maps[0], maps[1]), rows, columns, None, True, True, words, first
    )  # fmt: skip


def every_score(coverage: Any, pack: Pack | None = None) -> Scores:
    """`Scores` of a block map.

    Args:
        coverage: see `visits`.
        pack: likewise; the bits of all tiles are computed where the coverage is traced.
    """
    if pack is None:
        return Scores(jnp.asarray(coverage), None, None)
    due = coverage > 0 if isinstance(coverage, np.ndarray) else np.ones(coverage.shape, bool)
    numbers = np.maximum(np.cumsum(due.reshape(-1)) - 1, 0).reshape(due.shape)
    at = np.nonzero(due) if due.any() else [np.zeros(1, np.int32)] * 4
    return Scores(jnp.asarray(coverage), pack(*at), jnp.asarray(numbers, jnp.int32))


def _static(coverage: np.ndarray[Any, Any], maps: tuple[int, int]) -> Visits:
    rows = coverage.shape[1]
    is_full, is_partial = coverage == Coverage.FULL, coverage == Coverage.PARTIAL
    full, partial = bool(is_full.any()), bool(is_partial.any())
    stretches = [_stretch(kind) for kind in (is_full, is_partial)]
    if all(whole for _, _, whole in stretches):
        bounds = [bound for start, stop, _ in stretches for bound in (start, stop)]
        ranges = np.stack(bounds, axis=2).astype(np.int32)
        first = ranges.reshape(-1, 4)[0]
        if (ranges == first).all():
            a, b, c, d = (int(x) for x in first)
            return Visits(None, None, maps, rows, 0, (a, b, c, d), full, partial)
        return Visits(jnp.asarray(ranges.reshape(-1)), None, maps, rows, 0, None, full, partial)
    n_full, n_partial = is_full.sum(axis=2), is_partial.sum(axis=2)
    width = max(1, int((n_full + n_partial).max()))
    order = np.argsort(_rank(coverage), axis=2, kind="stable")[..., :width]
    ranges = np.stack([np.zeros_like(n_full), n_full, n_full, n_full + n_partial], axis=2)
    flat, columns_of = (jnp.asarray(x.reshape(-1).astype(np.int32)) for x in (ranges, order))
    return Visits(flat, columns_of, maps, rows, width, None, full, partial)


def _stretch(kind: np.ndarray[Any, Any]) -> tuple[Any, Any, bool]:
    """Where the columns of a kind start and stop in each row, and whether all between are of the kind."""
    count = kind.sum(axis=2)
    start = np.where(count > 0, kind.argmax(axis=2), 0)
    stop = np.where(count > 0, kind.shape[2] - kind[..., ::-1].argmax(axis=2), 0)
    return start, stop, bool((stop - start == count).all())


def _rank(coverage: Any) -> Any:
    """FULL first, then PARTIAL, then EMPTY."""
    return int(Coverage.FULL) - coverage


class Maps(NamedTuple):
    """The tiles to visit, for each kernel.

    Attributes:
        forward: by tiles of queries.
        by_query: by tiles of queries, for the gradient of query; None where they are the forward's.
        by_key: by tiles of keys.
        by_score: every tile, for the gradients of arrays and tables; None without one.
    """

    forward: Visits
    by_query: Visits | None
    by_key: Visits
    by_score: Scores | None
