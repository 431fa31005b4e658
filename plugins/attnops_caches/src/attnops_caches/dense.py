"""DenseCache: a row of slots for each sequence."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attnops.exported import serialised
from attnops.sharding.placing import placed
from attnops_caches.integers import at_rows, check_size, int32, integers_of_shape
from attnops_caches.layout import TokenOptions
from attnops_caches.masks.slots import Slots
from attnops_caches.placement import PLACEMENT
from attnops_caches.store import Pieces, create_store
from attnops_caches.stored import StoredCache, create_rows

if TYPE_CHECKING:
    from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class RowCache(StoredCache):
    """A cache in which each row is one block of the store."""

    @property
    def length(self) -> int:
        return self.store.slots

    def _keys_values(self) -> tuple[jax.Array, jax.Array]:
        key, value = self.store.decoded({name: self.store.own(x) for name, x in self.store._blocks().items()})
        return key.swapaxes(1, 2).astype(self.dtype), value.swapaxes(1, 2).astype(self.dtype)

    def take_rows(self, rows: ArrayLike) -> Self:
        """The cache with row ``rows[b]`` in place of row b, as beam search reorders them.

        Args:
            rows: integers [B'], checked if known when tracing; else one that is no row gives an empty, overflowed row.

        On a mesh, axes that do not divide B' no longer shard the rows. With a layer axis, in every layer.

        Raises:
            ValueError: they are not integers of rank 1, or known not to be rows; the cache is one layer of several.
        """
        self.check_all_layers("take_rows")
        given = rows_to_take(rows, self.batch)
        kept = self.placement and self.placement.for_rows(given.shape[0])

        def taken(cache: Self, given: jax.Array) -> Self:
            exists, index = (given >= 0) & (given < cache.batch), jnp.clip(given, 0, cache.batch - 1)
            fields: Any = {name: jnp.take(x, index, 0) for name, x in cache._rows().items()}
            fields = {name: jnp.where(exists, x, jnp.zeros((), x.dtype)) for name, x in fields.items()}
            fields["overflowed"] |= ~exists
            axis = 0 if cache.layers is None else 1
            blocks = {name: jnp.take(x, index, axis) for name, x in cache.store._blocks().items()}
            return cache.with_blocks(blocks, placement=kept, **fields)

        placement = self.active_placement
        if placement is None:
            return taken(self, given)
        specs = placement.for_rows(given.shape[0]).specs(dataclasses.replace(self, placement=kept))
        result = placement.by_compiler(taken, specs, self, given)
        return jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), result, specs)  # type: ignore[no-any-return]


def rows_to_take(rows: ArrayLike, batch: int) -> jax.Array:
    """The rows that `RowCache.take_rows` is given, checked, int32 [B']."""
    array = integers_of_shape("rows", rows, [(max(np.size(rows), 1),)], "integers of rank 1, at least one")
    if isinstance(array, np.ndarray) and not 0 <= array.min() <= array.max() < batch:
        raise ValueError(f"rows={array.tolist()} must be rows of the cache, 0 to {batch - 1}")
    return int32(array)


@serialised(placement=PLACEMENT)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache(RowCache):
    """A row of S slots for each sequence; the token of index i is in slot i. See `Cache`."""

    storage: ClassVar[str] = "DenseCache"

    @classmethod
    def create(
        cls, *, batch: int, length: int, starts: ArrayLike | None = None, **tokens: Unpack[TokenOptions]
    ) -> DenseCache:
        """An empty cache.

        Args:
            batch: B, the rows.
            length: S, the slots of a row.
            starts: how many tokens of left padding each row begins with, integers [B]; None for none.
            **tokens: `TokenOptions`, what every storage is created with.

        Memory: B · S tokens of ``bytes_per_token``, times L.

        Raises:
            TypeError: a size that is not an int; an option that there is not, or one that is missing.
            ValueError: a size below 1; another dtype or codec; a latent larger than D; scales that are missing, or that
                the codec computes itself, or that are known not to be above 0; starts that are known to be negative.
        """
        check_size("batch", batch)
        store = create_store(batch, check_size("length", length), **tokens)
        return cls(store=store, **create_rows(batch, starts))

    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        first = 0 if self.first_slot is None else self.first_slot
        lengths, run = at_rows(self.lengths, rows), jnp.arange(rows.shape[0], dtype=jnp.int32)
        fit = jnp.clip((self.whole_block or self.length) - lengths, 0, count)
        # In slots of a shard: below 0 for a row whose next token belongs to an earlier shard.
        lengths = lengths - first
        slot = jnp.maximum(lengths, 0)
        size = jnp.maximum(jnp.minimum(lengths + fit, self.length) - slot, 0)
        return Pieces(run, slot - lengths, size, rows, slot), fit

    def slots(self) -> Slots:
        return self._slots(self.first_slot)
