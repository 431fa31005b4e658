"""A storage that is not attnops-caches': pages as an engine lays them out, keys and values of a head side by side."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops_caches import Cache, Contents, KeyValue, Pieces, TileAt, TileLoader
from attnops_caches.masks import Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnginePages(Cache):
    """Pages [P, page, 2 · K, D]: the key of kv head k is at 2 · k, its value at 2 · k + 1.

    Attributes:
        pages: of all rows together.
        table: the pages of each row, int32 [B, M]; −1 where there is none.
    """

    pages: jax.Array
    table: jax.Array

    storage: ClassVar[str] = "EnginePages"
    by_row: ClassVar[tuple[str, ...]] = (*Cache.by_row, "table")

    @classmethod
    def create(
        cls, *, batch: int, pages: int, page: int, max_pages: int, kv_heads: int, head_dim: int, dtype: Any
    ) -> Self:
        """An empty cache."""
        zeros = jnp.zeros((batch,), jnp.int32)
        return cls(
            lengths=zeros, starts=zeros, overflowed=jnp.zeros((batch,), bool),
            pages=jnp.zeros((pages, page, 2 * kv_heads, head_dim), dtype),
            table=jnp.full((batch, max_pages), -1, jnp.int32),
        )  # fmt: skip

    @property
    def page(self) -> int:
        """Slots a page."""
        return self.pages.shape[1]

    @property
    def length(self) -> int:
        return self.table.shape[1] * self.page

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[2] // 2

    @property
    def head_dim(self) -> int:
        return self.pages.shape[3]

    @property
    def value_head_dim(self) -> int:
        return self.pages.shape[3]

    @property
    def dtype(self) -> Any:
        return self.pages.dtype

    @property
    def exists(self) -> jax.Array:
        """Whether the row has the page, bool [B, M]."""
        return (self.table >= 0) & (self.table < self.pages.shape[0])

    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        index = self.lengths[rows][:, None] + jnp.arange(T, dtype=jnp.int32)  # [R, T], a piece a token
        number, slot = index // self.page, index % self.page
        last = self.table.shape[1] - 1
        here = jnp.take_along_axis(self.exists[rows], jnp.minimum(number, last), axis=1) & (number <= last)
        wanted = jnp.arange(T) < count[:, None]
        fits = jnp.cumprod(here & wanted, axis=1).astype(jnp.int32)
        page = jnp.take_along_axis(self.table[rows], jnp.minimum(number, last), axis=1)
        run = jnp.broadcast_to(jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None], page.shape)
        token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), page.shape)
        pieces = Pieces(run, token, fits, jnp.clip(page, 0, self.pages.shape[0] - 1), slot)
        return Pieces(*(x.reshape(-1) for x in pieces)), fits.sum(1).astype(jnp.int32)

    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces, sparse: bool) -> Self:
        assert value is not None
        both = jnp.stack([key, value], axis=3).reshape(*key.shape[:2], 2 * self.kv_heads, self.head_dim)
        new = both[pieces.row, jnp.clip(pieces.first, 0, key.shape[1] - 1)]
        page = jnp.where(pieces.size > 0, pieces.block, self.pages.shape[0])  # out of range: dropped
        return dataclasses.replace(self, pages=self.pages.at[page, pieces.slot].set(new, mode="drop"))

    def slots(self) -> Slots:
        return dataclasses.replace(super().slots(), exists=self.exists, page_size=self.page)

    def read(self) -> Contents:
        taken = self.pages[jnp.clip(self.table, 0, self.pages.shape[0] - 1)]  # [B, M, page, 2 · K, D]
        flat = taken.reshape(self.batch, self.length, self.kv_heads, 2, self.head_dim)
        return Contents(flat[..., 0, :], flat[..., 1, :], *self.positions())

    def loader(self) -> TileLoader:
        return PagesLoader(self.pages, self.table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagesLoader(TileLoader):
    """Loads tiles for native `flash`, a page after the other."""

    pages: jax.Array
    table: jax.Array

    @property
    def slots(self) -> int:
        return self.table.shape[1] * self.unit

    @property
    def unit(self) -> int:
        return self.pages.shape[1]

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.pages.dtype).itemsize)

    def load(self, at: TileAt) -> KeyValue:
        first = at.slot // self.unit
        numbers = lax.dynamic_slice(self.table, (at.row, first), (1, at.size // self.unit))[0]
        tiles = []
        for number in jnp.clip(numbers, 0, self.pages.shape[0] - 1):
            zero = jnp.int32(0)
            sizes = (1, self.unit, 2 * at.heads, self.pages.shape[3])
            tiles.append(lax.dynamic_slice(self.pages, (number, zero, jnp.int32(2 * at.head), zero), sizes)[0])
        both = jnp.concatenate(tiles).reshape(at.size, at.heads, 2, -1).transpose(2, 1, 0, 3).astype(at.dtype)
        return KeyValue(both[0], both[1])
