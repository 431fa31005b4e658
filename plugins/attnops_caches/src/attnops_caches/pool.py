"""Which pages of a paged cache belong to which row: an allocator of static shapes, for use inside ``jax.jit``.

Paging is from vLLM's PagedAttention (Kwon et al. 2023, arXiv:2309.06180): block tables, reference counts, and copies of
partial pages alone. Which requests are served, evicted or share a prefix is the caller's decision.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.exported import serialised, serialised_tuple
from attnops.programs.varying import equally_varying
from attnops_caches.integers import LARGEST, array, check_size, int32, integers, pairs

if TYPE_CHECKING:
    from attnops.typing import Array, Leaf


@serialised_tuple
class PageCopies(NamedTuple):
    """Pages whose contents must be copied, -1 where there is nothing to copy.

    All sources must be read before any target is written: a page may be the source of one copy and the target of
    another; no page is the target of two. Apply them before any append or later copies: a source may already be free.

    Attributes:
        source: int32 [N], ids of the pages to copy from.
        target: int32 [N], ids of the pages to copy to, -1 exactly where ``source`` is.
    """

    source: jax.Array
    target: jax.Array


@serialised()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagePool:
    """P pages of `page_size` tokens and the R rows (requests) that hold them; a pytree. Made by `create`.

    A row of n tokens holds the ``ceil(n / page_size)`` pages ``table[r, 0], table[r, 1], …``, and token i of it lies in
    page ``table[r, i // page_size]`` at slot ``i % page_size``. Rows share full pages only: a partial last page, to
    which the next token is written, always has one reference, so that appending never needs a copy.

    Methods return a new pool, whose `ok` is False for rows that could not be served. One program serves all values.
    Memory and time of a call grow as P + R · M (`fork`: P + N · M).

    Attributes:
        table: int32 [R, M], ids of each row's pages in the order of its tokens, -1 where there is none.
        free: int32 [P], a stack of the ids of free pages, the next one last; -1 from `free_count` on.
        free_count: int32 [], how many pages are free.
        references: int32 [P], how many rows hold a page; 0 if it is free.
        lengths: int32 [R], how many tokens, left padding included, each row has pages for.
        ok: bool [R], whether the last call did what it was asked for a row; True for rows not asked for anything.
        page_size: tokens per page; static.
    """

    table: jax.Array
    free: jax.Array
    free_count: jax.Array
    references: jax.Array
    lengths: jax.Array
    ok: jax.Array
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, *, pages: int, page_size: int, rows: int, max_pages: int) -> Self:
        """A pool whose pages are all free. Page 0 is the first to be given out.

        Args:
            pages: P, how many pages there are.
            page_size: tokens per page.
            rows: R, how many requests hold pages at a time.
            max_pages: M, how many pages a row holds at most.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is below 1, or int32 does not hold the ids of all pages or the length of a row.
        """
        pages, page_size = check_size("pages", pages), check_size("page_size", page_size)
        rows, max_pages = check_size("rows", rows), check_size("max_pages", max_pages)
        if pages > LARGEST:
            raise ValueError(f"pages={pages} must be at most {LARGEST}, so that int32 holds their ids")
        if max_pages * page_size > LARGEST:
            raise ValueError(
                f"max_pages={max_pages} of page_size={page_size} are {max_pages * page_size} tokens a row, but must be "
                f"at most {LARGEST}, so that int32 holds a row's length; take fewer pages a row"
            )
        return cls(
            table=jnp.full((rows, max_pages), -1, jnp.int32),
            free=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
            free_count=jnp.asarray(pages, jnp.int32),
            references=jnp.zeros(pages, jnp.int32),
            lengths=jnp.zeros(rows, jnp.int32),
            ok=jnp.ones(rows, bool),
            page_size=page_size,
        )

    @property
    def pages(self) -> int:
        """P, how many pages there are."""
        return self.references.shape[0]

    @property
    def rows(self) -> int:
        """R, how many rows there are."""
        return self.table.shape[0]

    @property
    def max_pages(self) -> int:
        """M, how many pages a row holds at most."""
        return self.table.shape[1]

    @property
    def available(self) -> jax.Array:
        """int32 [], how many pages are free."""
        return self.free_count

    def reserve(self, lengths: Array) -> Self:
        """Give rows the pages that they need for this many tokens; no row shrinks.

        Rows are served in order. A row that needs more than M pages in all, or more than are left, gets none, and its
        `ok` is False; later rows that need fewer are served.

        Args:
            lengths: integers [R]. A traced negative number leaves the row as it is, `ok` False.

        Raises:
            TypeError, ValueError: they are not integers of shape [R], or one that is known when tracing is negative.
        """
        return _reserve(self, self._lengths(lengths))

    def release(self, rows: Leaf) -> Self:
        """Take all pages from rows, which then have length 0. A page is free when no row holds it.

        Args:
            rows: bool [R], the rows to empty.

        Raises:
            TypeError, ValueError: they are not booleans of shape [R].
        """
        rows = array(rows)
        if rows.dtype != bool:
            raise TypeError(
                f"rows has dtype {rows.dtype}, but must be bool [R={self.rows}]: True for each row to empty"
            )
        self._check_shape("rows", rows)
        return _release(self, jnp.asarray(rows))

    def truncate(self, lengths: Array) -> tuple[Self, PageCopies]:
        """Take the pages beyond these lengths from rows; no row grows.

        A page that becomes the partial last one of a row and that other rows hold too is replaced by a fresh one, to
        which it must be copied. Rows are served in order; a row for whose copy no page is free is unchanged, not `ok`.

        Args:
            lengths: integers [R]. A traced negative number leaves the row as it is, `ok` False.

        Returns:
            The pool, and the copies, an entry for each row.

        Raises:
            TypeError, ValueError: they are not integers of shape [R], or one that is known when tracing is negative.
        """
        return _truncate(self, self._lengths(lengths))

    def fork(self, source: Array, target: Array) -> tuple[Self, PageCopies]:
        """Make rows copies of others: full pages are shared, a partial last page is copied to a fresh one.

        Entries are served in order, so that the target of one may be the source of a later one. The pages of a target
        are released first. If no page is free for its copy, a target is empty and not `ok`, as are later copies of it.

        What is full, `lengths` of the pool say: `truncate` a source to the tokens that it holds before forking it, or
        pages reserved for its next tokens are shared, and both rows write to them.

        Args:
            source: integers [N], the rows to copy; -1 for an entry that does nothing.
            target: integers [N], the rows to replace; -1 for an entry that does nothing. Traced ids out of range, and a
                traced target that is its own source, change nothing; `ok` of a target in range is False.

        Returns:
            The pool, and the copies, at most one for each entry.

        Raises:
            TypeError, ValueError: they are not integers of one shape [N]; or, of ids known when tracing, one is neither
                -1 nor a row, or a row is its own source.
        """
        source, target = pairs(source, target, what=": entry i makes row target[i] a copy of row source[i]")
        for name, ids in (("source", source), ("target", target)):
            for i in np.flatnonzero((ids < -1) | (ids >= self.rows)) if isinstance(ids, np.ndarray) else ():
                raise ValueError(
                    f"{name}[{i}]={ids[i]}, but the pool has rows={self.rows}: ids are from 0 to {self.rows - 1}, "
                    f"or -1 for an entry that does nothing"
                )
        if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
            for i in np.flatnonzero((source == target) & (source >= 0)):
                raise ValueError(
                    f"source[{i}]={source[i]} and target[{i}]={target[i]} are one row, which can't be a copy of "
                    f"itself; pass -1 for an entry that does nothing"
                )
        return _fork(self, int32(source), int32(target))

    def _lengths(self, lengths: Array) -> jax.Array:
        lengths = integers("lengths", lengths)
        self._check_shape("lengths", lengths)
        for r in np.flatnonzero(lengths < 0) if isinstance(lengths, np.ndarray) else ():
            raise ValueError(f"lengths[{r}]={lengths[r]} must be >= 0: it counts the tokens of row {r}")
        return int32(lengths)

    def _check_shape(self, name: str, values: Array) -> None:
        if values.shape != (self.rows,):
            raise ValueError(
                f"{name} has shape {values.shape}, but must have shape [R]={(self.rows,)}, one for each row"
            )


@jax.jit
def _reserve(pool: PagePool, lengths: jax.Array) -> PagePool:
    pool, lengths = equally_varying((pool, lengths))
    held, needed = (_page_count(x, pool.page_size)[:, None] for x in (pool.lengths, lengths))
    more = jnp.maximum(needed - held, 0)
    possible = (lengths >= 0) & (needed[:, 0] <= pool.max_pages)

    def serve(left: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        more, possible = row
        ok = possible & (more <= left)
        return left - jnp.where(ok, more, 0), ok

    left, ok = lax.scan(serve, pool.free_count, (more[:, 0], possible))
    more = jnp.where(ok[:, None], more, 0)
    popped_before = jnp.cumsum(more, axis=0, dtype=jnp.int32) - more
    slot = _range(pool.max_pages)
    new = (slot >= held) & (slot < held + more)
    ids = pool.free[jnp.where(new, pool.free_count - 1 - popped_before - (slot - held), 0)]
    return dataclasses.replace(
        pool,
        table=jnp.where(new, ids, pool.table),
        free=jnp.where(_range(pool.pages) < left, pool.free, -1),
        free_count=left,
        references=pool.references.at[jnp.where(new, ids, pool.pages)].set(1, mode="drop"),
        lengths=jnp.where(ok, jnp.maximum(lengths, pool.lengths), pool.lengths),
        ok=ok,
    )


@jax.jit
def _release(pool: PagePool, rows: jax.Array) -> PagePool:
    pool, rows = equally_varying((pool, rows))
    given = rows[:, None] & (pool.table >= 0)
    references = pool.references.at[jnp.where(given, pool.table, pool.pages)].add(-1, mode="drop")
    freed = (pool.references > 0) & (references == 0)
    pool = _push(dataclasses.replace(pool, references=references), _range(pool.pages), freed)
    return dataclasses.replace(
        pool,
        table=jnp.where(rows[:, None], -1, pool.table),
        lengths=jnp.where(rows, 0, pool.lengths),
        ok=pool.ok | True,  # not ones_like, which varies over no mesh axis
    )


@jax.jit
def _truncate(pool: PagePool, lengths: jax.Array) -> tuple[PagePool, PageCopies]:
    pool, lengths = equally_varying((pool, lengths))
    slot = _range(pool.max_pages)

    def serve(pool: PagePool, row: tuple[jax.Array, jax.Array]) -> tuple[PagePool, PageCopies]:
        r, length = row
        ids = pool.table[r]
        shrinks = (length >= 0) & (length < pool.lengths[r])
        kept = _page_count(length, pool.page_size)
        beyond = shrinks & (slot >= kept) & (ids >= 0)
        last = ids[jnp.maximum(kept - 1, 0)]
        copied = shrinks & (length % pool.page_size > 0) & (pool.references[last] > 1)
        # Pages that only this row holds, and gives back, are there for its copy.
        freed = (beyond & (pool.references[ids] == 1)).sum(dtype=jnp.int32)
        ok = (length >= 0) & (~copied | (pool.free_count + freed > 0))
        shrinks, copied, beyond = shrinks & ok, copied & ok, beyond & ok

        pool = _drop(pool, ids, beyond | (copied & (slot == kept - 1)))
        pool, fresh = _pop(pool, copied)
        ids = jnp.where(beyond, -1, jnp.where(copied & (slot == kept - 1), fresh, ids))
        pool = dataclasses.replace(
            pool,
            table=pool.table.at[r].set(ids),
            lengths=pool.lengths.at[r].set(jnp.where(shrinks, length, pool.lengths[r])),
            ok=pool.ok.at[r].set(ok),
        )
        return pool, PageCopies(jnp.where(copied, last, -1), fresh)

    return lax.scan(serve, pool, (_range(pool.rows), lengths))


@jax.jit
def _fork(pool: PagePool, source: jax.Array, target: jax.Array) -> tuple[PagePool, PageCopies]:
    R, slot = pool.rows, _range(pool.max_pages)

    def serve(
        carry: tuple[PagePool, jax.Array], entry: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[PagePool, jax.Array], PageCopies]:
        (pool, origin), (s, t) = carry, entry
        asked = (s != -1) & (t >= 0) & (t < R)
        valid = asked & (s >= 0) & (s < R) & (s != t)
        s, written = jnp.clip(s, 0, R - 1), jnp.where(valid, t, R)  # row R does not exist: mode="drop"
        old = pool.table[jnp.clip(t, 0, R - 1)]
        pool = _drop(pool, old, valid & (old >= 0))

        ids, length = pool.table[s], pool.lengths[s]
        full, partial = length // pool.page_size, length % pool.page_size > 0
        ok = valid & pool.ok[s] & (~partial | (pool.free_count > 0))
        copied = ok & partial
        pool, fresh = _pop(pool, copied)
        last = ids[jnp.where(copied, full, 0)]
        shared = ok & (slot < full)
        ids = jnp.where(shared, ids, jnp.where(copied & (slot == full), fresh, -1))
        pool = dataclasses.replace(
            pool,
            table=pool.table.at[written].set(ids, mode="drop"),
            references=pool.references.at[jnp.where(shared, ids, pool.pages)].add(1, mode="drop"),
            lengths=pool.lengths.at[written].set(jnp.where(ok, length, 0), mode="drop"),
            ok=pool.ok.at[jnp.where(asked, t, R)].set(ok, mode="drop"),
        )
        read = jnp.where(copied, origin[last], -1)
        origin = origin.at[jnp.where(copied, fresh, pool.pages)].set(read, mode="drop")
        return (pool, origin), PageCopies(read, fresh)

    # Page origin[p] had, before this call, what p is to hold: forks of forks read no page that a copy has written.
    pool = dataclasses.replace(pool, ok=jnp.ones_like(pool.ok))
    pool, origin, source, target = equally_varying((pool, _range(pool.pages), source, target))
    (pool, _), copies = lax.scan(serve, (pool, origin), (source, target))
    # A later entry may release a page that an earlier one has copied to, and copy something else to it.
    entry, target = _range(len(source)), copies.target
    last = jnp.full(pool.pages, -1, jnp.int32).at[jnp.where(target >= 0, target, pool.pages)].max(entry, mode="drop")
    kept = (target >= 0) & (last[target] == entry) & (pool.references[target] > 0)
    return pool, PageCopies(*(jnp.where(kept, x, -1) for x in copies))


def _drop(pool: PagePool, ids: jax.Array, given: jax.Array) -> PagePool:
    """Give back one reference of each of the ``given`` ids of a row."""
    references = pool.references.at[jnp.where(given, ids, pool.pages)].add(-1, mode="drop")
    return _push(dataclasses.replace(pool, references=references), ids, given & (references[ids] == 0))


def _push(pool: PagePool, ids: jax.Array, freed: jax.Array) -> PagePool:
    """Put the ``freed`` ids on the stack, in their order."""
    count = jnp.cumsum(freed, dtype=jnp.int32)
    place = jnp.where(freed, pool.free_count + count - 1, pool.pages)
    return dataclasses.replace(
        pool, free=pool.free.at[place].set(ids, mode="drop"), free_count=pool.free_count + count[-1]
    )


def _pop(pool: PagePool, wanted: jax.Array) -> tuple[PagePool, jax.Array]:
    """One page from the stack, with one reference, if ``wanted``; else -1. The stack must not be empty."""
    top = pool.free_count - 1
    page = jnp.where(wanted, pool.free[top], -1)
    return dataclasses.replace(
        pool,
        free=pool.free.at[jnp.where(wanted, top, pool.pages)].set(-1, mode="drop"),
        free_count=jnp.where(wanted, top, pool.free_count),
        references=pool.references.at[jnp.where(wanted, page, pool.pages)].set(1, mode="drop"),
    ), page


def _page_count(lengths: jax.Array, page_size: int) -> jax.Array:
    # Not (lengths + page_size - 1) // page_size, which overflows near 2³¹.
    return lengths // page_size + (lengths % page_size > 0)


def _range(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)
