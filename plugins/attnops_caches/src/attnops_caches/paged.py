"""PagedCache: pages that belong to rows by a table, so that rows grow as they need and share pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from attnops.errors import Reason
from attnops.exported import serialised
from attnops.sharding.placing import placed, whole
from attnops.sharding.specs import names_of
from attnops_caches.calls.request import CacheRequest
from attnops_caches.integers import LARGEST, at_rows, check_size, int32, integers_of_shape, pairs
from attnops_caches.layout import TokenOptions
from attnops_caches.masks.slots import Slots
from attnops_caches.placement import PLACEMENT, refusal
from attnops_caches.store import Pieces, create_store
from attnops_caches.stored import StoredCache, create_rows
from attnops_caches.tiles import StoreLoader, TileLoader

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops_caches.pool import PageCopies


@serialised(placement=PLACEMENT)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(StoredCache):
    """Pages of ``page_size`` slots, and a table of the pages of each row (Kwon et al. 2023, arXiv:2309.06180).

    The token of index i of row b is in slot ``i % page_size`` of page ``table[b, i // page_size]``. Which pages belong
    to which row is decided outside, by `PagePool` or by a server; pages may be shared by rows that have the same
    tokens in them. A token whose page is not in the table (−1, or not below the number of pages) does not fit.

    Attributes:
        table: the pages of each row, int32 [B, M]; −1 where there is none.
        copied: the page that each page was copied from since the last `with_table`, int32 [P]; −1 if it was not copied.
    """

    table: jax.Array
    copied: jax.Array

    by_row: ClassVar[tuple[str, ...]] = (*StoredCache.by_row, "table")
    storage: ClassVar[str] = "PagedCache"

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        pages: int,
        page_size: int,
        max_pages: int,
        starts: ArrayLike | None = None,
        table: ArrayLike | None = None,
        **tokens: Unpack[TokenOptions],
    ) -> PagedCache:
        """An empty cache.

        Args:
            batch: B, the rows.
            pages: P, the pages of all rows together.
            page_size: slots per page.
            max_pages: M, the most pages of a row.
            starts: how many tokens of left padding each row begins with, integers [B]; None for none.
            table: the pages of each row, integers [B, M], see `with_table`; None for no pages.
            **tokens: `TokenOptions`, what every storage is created with. Keys and values are one array in any
                case, [P, K, page_size, W], so that a page is one transfer; without ``width`` it has no zeros.

        Memory: ``pages * page_size`` tokens of ``bytes_per_token``, times L.

        Raises:
            ValueError: see `DenseCache.create` and `with_table`.
        """
        store = create_store(check_size("pages", pages), check_size("page_size", page_size), joins=True, **tokens)
        rows = create_rows(check_size("batch", batch), starts)
        empty = jnp.full((batch, check_size("max_pages", max_pages)), -1, jnp.int32)
        cache = cls(store=store, **rows, table=empty, copied=jnp.full((pages,), -1, jnp.int32))
        return cache if table is None else cache.with_table(table)

    @property
    def pages(self) -> int:
        """P, the pages of all rows together."""
        return self.store.own_blocks

    @property
    def pages_of_row(self) -> int:
        """The pages that a row's table may name: all, or on a mesh those of the row's shard."""
        return self.pages // self._shards

    @property
    def _shards(self) -> int:
        placement = self.active_placement
        return 1 if placement is None else placement.shards(placement.batch)

    def without_mesh(self) -> Self:
        cache = super().without_mesh()
        if self._shards == 1:
            return cache
        first = np.repeat(self.pages_of_row * np.arange(self._shards, dtype=np.int32), self.pages_of_row)
        copied = jnp.where(self.copied >= 0, self.copied + first, -1)
        table = jnp.where(self.slots().exists, self.table + self._first_pages, -1)
        return dataclasses.replace(cache, table=table, copied=copied)

    @property
    def _first_pages(self) -> np.ndarray:
        """The page of the store that each row's table calls 0, int32 [B, 1]."""
        shard = np.arange(self.batch, dtype=np.int32)[:, None] // (self.batch // self._shards)
        return shard * np.int32(self.pages_of_row)

    def describe(self) -> CacheRequest:
        placement = self.active_placement
        shards = 1 if placement is None else placement.shards(placement.slots)
        return dataclasses.replace(super().describe(), page_size=self.page_size // shards)

    def loader(self) -> TileLoader:
        return StoreLoader(self.store, self.table)

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.store.slots

    @property
    def max_pages(self) -> int:
        """M, the most pages of a row."""
        return self.table.shape[-1]

    @property
    def length(self) -> int:
        return self.max_pages * self.page_size

    def with_table(self, table: ArrayLike) -> Self:
        """The cache with another table, such as a `PagePool`'s.

        Args:
            table: integers [B, M]; −1 where there is no page. Known values are checked; with traced ones, tokens whose
                page is out of range do not fit, and are not read.

        A row keeps its tokens up to the first page that is neither the one which it had there nor a copy of it, made by
        `copy_pages` since the last table; and none beyond its last page. So a row that lost pages, as by
        `PagePool.release`, is shorter, and never sees what an earlier row wrote to a page. ``overflowed`` is kept.

        Raises:
            ValueError: another shape or dtype, or a known page that the cache does not have.
        """
        shape = self.table.shape
        what = f"integers [B, max_pages]={shape}: the batch and max_pages of the cache"
        array = integers_of_shape("table", table, [shape], what)
        if isinstance(array, np.ndarray) and array.size and (array.min() < -1 or array.max() >= self.pages_of_row):
            raise ValueError(
                f"table has pages from {array.min()} to {array.max()}, but the cache has pages 0 to "
                f"{self.pages_of_row - 1}{' for each shard of rows' * (self._shards > 1)}, and -1 means no page"
            )
        pages = int32(array) + jnp.int32(0)  # a buffer of its own, which can be donated
        # ``copied`` at the pages of the table.
        page, origin = whole(jnp.clip(pages, 0, self.pages_of_row - 1) + self._first_pages), whole(self.copied)
        copied = origin[page]
        if (placement := self.active_placement) is not None:
            by_row: Any = placement.specs(self).table
            pages, copied = (placed(x, by_row, placement.mesh) for x in (pages, copied))
        exists = (pages >= 0) & (pages < self.pages_of_row)
        is_other = exists & (jnp.where(copied >= 0, copied, pages) != self.table)
        number = jnp.arange(1, self.max_pages + 1, dtype=jnp.int32)
        kept = jnp.minimum(
            jnp.where(exists, number, 0).max(-1), jnp.where(is_other, number - 1, self.max_pages).min(-1)
        )
        lengths = jnp.minimum(self.lengths, kept * self.page_size)
        starts = jnp.where(lengths < self.lengths, jnp.minimum(self.starts, lengths), self.starts)
        forgotten = jnp.full_like(self.copied, -1)
        return dataclasses.replace(self, table=pages, lengths=lengths, starts=starts, copied=forgotten)

    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        p, lengths = self.whole_block or self.page_size, at_rows(self.lengths, rows)
        run, first = jnp.arange(rows.shape[0], dtype=jnp.int32), 0 if self.first_slot is None else self.first_slot
        most = 1 if T == 1 else (T - 1) // p + 2  # pages that T tokens may lie in
        number = lengths[:, None] // p + jnp.arange(most, dtype=jnp.int32)  # [R, most], index in the table
        at = jnp.clip(number, 0, self.max_pages - 1)
        page = jnp.take_along_axis(at_rows(self.table, rows), at, axis=1, mode="promise_in_bounds")
        exists = (number < self.max_pages) & (page >= 0) & (page < self.pages)
        here = number * p + first  # the index of the page's first slot on this device
        begin = jnp.maximum(lengths[:, None], here)  # indices of the first and last token in the page
        end = jnp.minimum((lengths + count)[:, None], here + self.page_size)
        # What comes after a token that has no page does not fit either. The first such index by columns, if they are
        # few: a GPU would need a kernel for a reduction.
        lacks = jnp.where(exists, LARGEST, number * p)
        columns = [lacks[:, i] for i in range(most)] if most <= 8 else [lacks.min(1)]
        fits = functools.reduce(jnp.minimum, columns, lengths + count)
        kept = jnp.clip(jnp.minimum(end, fits[:, None]) - begin, 0)
        pieces = Pieces(
            row=jnp.broadcast_to(run[:, None], page.shape),
            first=begin - lengths[:, None],
            size=kept,
            block=jnp.clip(page, 0, self.pages - 1),
            slot=begin - here,
        )
        return Pieces(*(x.reshape(-1) for x in pieces)), jnp.maximum(fits - lengths, 0)

    def row_blocks(self) -> jax.Array:
        return jnp.where((self.table >= 0) & (self.table < self.pages), self.table, -1)

    def slots(self) -> Slots:
        exists = (self.table >= 0) & (self.table < self.pages_of_row)
        slots = dataclasses.replace(super().slots(), exists=exists, page_size=self.page_size)
        if self.first_slot is None:
            return slots
        first, p, n = self.first_slot, self.whole_block, self.page_size
        start, stop = (x // p * n + jnp.clip(x % p - first, 0, n) for x in (slots.start, slots.stop))
        return dataclasses.replace(slots, shift=slots.shift + first, start=start, stop=stop, between=p - n)

    def positions_by_device(self) -> tuple[jax.Array, jax.Array]:
        placement = self.active_placement
        if placement is None or placement.slots is None:
            return self.positions()
        shape = self.batch, self.max_pages, placement.shards(placement.slots), -1
        position, held = (whole(x).reshape(shape).swapaxes(1, 2).reshape(x.shape) for x in self.positions())
        by_slot = PartitionSpec(placement.batch, placement.slots)
        return placed(position, by_slot, placement.mesh), placed(held, by_slot, placement.mesh)

    def _keys_values(self) -> tuple[jax.Array, jax.Array]:
        store = self.with_blocks({name: whole(x) for name, x in self.store._blocks().items()}).store
        table = whole(jnp.clip(self.table, 0, self.pages - 1)) + store.base
        taken = {name: x[table] for name, x in store.flat_blocks().items()}  # [B, M, K, page, d]
        key, value = store.decoded(taken)

        def rows(x: jax.Array) -> jax.Array:
            return x.swapaxes(2, 3).reshape(self.batch, self.length, self.kv_heads, x.shape[-1]).astype(self.dtype)

        return rows(key), rows(value)

    def fork(self, source: ArrayLike, target: ArrayLike, table: ArrayLike, copies: PageCopies) -> Self:
        """Rows that become copies of others, as `PagePool.fork` decided: their pages are shared, the last one copied.

        With a layer axis, in every layer. A target that the pool had no page for has no tokens, and is ``overflowed``.

        Args:
            source: integers [N], the rows to copy; −1, or no row, for an entry that does nothing.
            target: integers [N], the rows to replace; −1, or no row, for an entry that does nothing.
            table: the pool's table, afterwards.
            copies: which pages are copied, from `PagePool.fork`.

        Raises:
            TypeError, ValueError: source and target are not integers of one shape [N]; see `copy_pages`, `with_table`.
            UnsupportedError: see `copy_pages`.
        """
        moved = self.copy_pages(copies)
        source, target = map(int32, pairs(source, target))
        row = jnp.arange(self.batch, dtype=jnp.int32)
        origin, is_target = row, jnp.zeros((self.batch,), bool)
        for i in range(source.shape[0]):  # in order: a target may be a later source
            to = (source[i] >= 0) & (source[i] < self.batch) & (row == target[i])
            origin = jnp.where(to, origin[jnp.clip(source[i], 0, self.batch - 1)], origin)
            is_target |= to
        fields: dict[str, Any] = {name: jnp.take(x, origin, 0, mode="clip") for name, x in self._rows().items()}
        forked = dataclasses.replace(moved, **fields).with_table(table)
        failed = is_target & (forked.lengths < fields["lengths"])
        return dataclasses.replace(forked, overflowed=forked.overflowed | failed)

    def copy_pages(self, copies: PageCopies) -> Self:
        """The cache with pages copied, all read before any is written; with a layer axis, in every layer.

        Args:
            copies: ``source`` and ``target``, integers [N]; −1 for none.

        Raises:
            TypeError, ValueError: they are not integers of one shape [N].
            ValueError: the cache is one layer of one with a layer axis.
            UnsupportedError: a mesh shards the pages; each shard copies its own, in a `jax.shard_map`.
        """
        self.check_all_layers("copy_pages")
        if self._shards > 1:
            raise refusal("pages can't be copied or forked here", Reason(
                "placement.batch", names_of(self.placement.batch if self.placement else None),
                "shards rows and pages, which each shard's pool numbers from 0",
                "call it in a jax.shard_map over these axes, with cache.specs as in_specs and out_specs",
            ))  # fmt: skip
        source, target = map(int32, pairs(copies.source, copies.target, "copies."))
        target = jnp.where((source >= 0) & (target >= 0), target, self.pages)  # out of range: dropped
        source = jnp.clip(source, 0, self.pages - 1)
        lead = () if self.layers is None else (slice(None),)
        blocks = {
            name: jnp.asarray(x).at[(*lead, target)].set(x[(*lead, source)], mode="drop")
            for name, x in self.store._blocks().items()
        }
        # A copy of a copy counts as a copy of the first source.
        before = self.copied[source]
        copied = self.copied.at[target].set(jnp.where(before >= 0, before, source), mode="drop")
        return self.with_blocks(blocks, copied=copied)
