"""TileLoader: loads tiles of keys and values for native `flash`; StoreLoader: from the arrays of a `Store`."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.forward import KeyValue
from attnops_caches.bits import from_bits
from attnops_caches.store import Store

if TYPE_CHECKING:
    from attnops.typing import DType, Index


class TileAt(NamedTuple):
    """The slots and kv heads of a tile.

    Attributes:
        row: the row of the cache, int32 [].
        head: the first kv head, int32 [].
        slot: the first slot of the row, int32 []; a multiple of `TileLoader.unit`.
        heads: how many kv heads; static.
        size: how many slots, a multiple of `TileLoader.unit`; static.
        dtype: the dtype of the operands of products; static.
    """

    row: Index
    head: Index
    slot: Index
    heads: int
    size: int
    dtype: DType


class TileLoader(abc.ABC):
    """Loads tiles of keys and values of a cache. A pytree: its arrays are leaves."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """S, the slots of a row."""

    @property
    def unit(self) -> int:
        """Tiles begin at a multiple of so many slots and have a multiple of so many, such as the page size."""
        return 1

    @property
    @abc.abstractmethod
    def itemsize(self) -> int:
        """The bytes of an element of a stored token."""

    @abc.abstractmethod
    def load(self, at: TileAt) -> KeyValue:
        """Keys [heads, size, D] and values [heads, size, Dv] of a tile in ``at.dtype``, and what is left to multiply.

        Slots that hold no token may give anything. Runs in a loop over tiles: it must slice, and not read all.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoreLoader(TileLoader):
    """Loads tiles from a `Store`.

    Attributes:
        store: the store of one layer, whose arrays may be those of all layers.
        table: int32 [rows, pages per row] where its blocks are pages; None where they are rows.
    """

    store: Store
    table: jax.Array | None

    @property
    def slots(self) -> int:
        return self.store.slots * (1 if self.table is None else self.table.shape[-1])

    @property
    def unit(self) -> int:
        return 1 if self.table is None else self.store.slots

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.store.layout.stored_dtype).itemsize

    def load(self, at: TileAt) -> KeyValue:
        store, layout = self.store, self.store.layout
        D, Dv, W = map(layout.elements, (layout.head_dim, layout.value_head_dim, layout.width))
        given = store.given_scales
        key_scale, value_scale = (
            self._scale(given.get(f"{name}_scale", getattr(store, f"{name}_scale")), at) for name in ("key", "value")
        )
        if layout.content == "latent":
            keys, stop = self._operands(self._tile(store.key, 0, D, at), at), layout.value_head_dim
            values = tuple(x[..., : stop - i * D] for i, x in enumerate(keys) if i * D < stop)
            return KeyValue(keys, values, key_scale, key_scale)
        if store.value is not None:
            key, value = self._tile(store.key, 0, D, at), self._tile(store.value, 0, Dv, at)
        elif self.itemsize < 4:
            # Narrow numbers are converted anyway: one gather takes 0.9 times the CPU time of two; in float32 1.1 times.
            both = self._tile(store.key, 0, W, at)
            key, value = layout.key_of(both), layout.value_of(both, None)
        else:
            key, value = self._tile(store.key, 0, D, at), self._tile(store.key, W - Dv, Dv, at)
        return KeyValue(self._operands(key, at), self._operands(value, at), key_scale, value_scale)

    def _tile(self, x: jax.Array, feature: int, d: int, at: TileAt) -> jax.Array:
        """The tile [heads, size, d], features from ``feature`` on, of an array [blocks, K, n, W] or [L, blocks, …]."""
        store = self.store
        # The arrays keep their layer axis: XLA's CPU backend copies a loop's array that is reshaped, for K = 1.
        lead = [] if store.layer is None else [store.layer]
        ones = (1,) * len(lead)
        if self.table is None:
            start = indices(*lead, at.row, at.head, at.slot, feature)
            return lax.dynamic_slice(x, start, (*ones, 1, at.heads, at.size, d)).reshape(at.heads, at.size, d)
        pages, size = jnp.clip(self.table, 0, store.own_blocks - 1), store.slots
        count = at.size // size
        numbers = lax.dynamic_slice(pages, indices(at.row, at.slot // size), (1, count))[0]
        # One gather, which XLA's CPU backend runs on all cores and fuses with the transpose; slices of each page,
        # concatenated, take up to 1.5 times the CPU time at 16 tokens per page.
        starts = [jnp.broadcast_to(i, numbers.shape) for i in indices(*lead, numbers, at.head, feature)]
        sizes, axes = (*ones, 1, at.heads, size, d), range(x.ndim)
        by_page = lax.GatherDimensionNumbers(
            offset_dims=(1, 2, 3), collapsed_slice_dims=(*axes[:-3],), start_index_map=(*axes[:-2], axes[-1])
        )
        taken = lax.gather(x, jnp.stack(starts, 1), by_page, sizes, mode="promise_in_bounds")
        return taken.swapaxes(0, 1).reshape(at.heads, at.size, d)

    def _scale(self, x: jax.Array | None, at: TileAt) -> jax.Array | None:
        """The scales of a tile, which broadcast to [heads, size], from a scale [], [K] or [blocks, K, n]."""
        if x is None or x.ndim == 0:
            return x if x is None else x[None, None]
        if x.ndim == 1:
            return lax.dynamic_slice(x, indices(at.head), (at.heads,))[:, None]
        return self._tile(x[..., None], 0, 1, at)[..., 0]

    def _operands(self, x: jax.Array, at: TileAt) -> tuple[jax.Array, ...]:
        """The parts of a tile in the dtype of products, which holds each number of 8 bits."""
        layout = self.store.layout
        x = from_bits(x, layout.stored_dtype)
        return tuple(part.astype(at.dtype) for part in ((x,) if layout.codec is None else layout.codec.parts(x)))


def indices(*given: Index) -> list[jax.Array]:
    """Indices as int32, since slicing needs one dtype: with x64 on, Python integers are wider than a loop's."""
    return [jnp.asarray(index, jnp.int32) for index in given]
