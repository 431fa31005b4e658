"""StoredCache: a cache whose tokens are in a `Store`, on one device or on a mesh."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from attnops_caches.base import Cache, Contents
from attnops_caches.calls.request import CacheRequest
from attnops_caches.codec import Quantized
from attnops_caches.integers import check_layer, integers_by_row
from attnops_caches.store import GivenTokens, NewTokens, Pieces, Store
from attnops_caches.tiles import StoreLoader, TileLoader

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import DType

StoredType = TypeVar("StoredType", bound="StoredCache")


def create_rows(batch: int, starts: ArrayLike | None) -> dict[str, Any]:
    """``lengths``, ``starts`` and ``overflowed`` of an empty cache."""
    first = jnp.zeros((batch,), jnp.int32) if starts is None else integers_by_row("starts", starts, batch)
    if isinstance(starts, (int, list, tuple, np.ndarray)) and (np.asarray(starts) < 0).any():
        raise ValueError(f"starts={starts} must be at least 0: how many tokens of left padding each row has")
    return {
        "lengths": jnp.zeros((batch,), jnp.int32),
        "starts": first + jnp.int32(0),
        "overflowed": jnp.zeros((batch,), bool),
    }


@dataclasses.dataclass(frozen=True)
class StoredCache(Cache):
    """A cache whose tokens are in blocks of a `Store`: what the storages of this package share.

    A layer axis may be in front of the arrays of tokens (``create(layers=L)``); lengths, flags and tables are shared by
    all layers. Calls over such a cache and ``read`` are for one layer, see `layer`; all that changes it is for all
    layers: `pending`, ``reset``, ``truncate``, ``with_table``, ``take_rows``, ``fork``, ``copy_pages``.

    Attributes:
        store: the arrays of the tokens.
        first_slot: for one device's part of a cache whose context a mesh shards, in a `jax.shard_map`: the slot of a
            whole block that is slot 0 here, int32 []; lengths and starts are those of the whole rows. Else None.
        whole_block: the slots of a whole block, if ``first_slot`` is given; static.
    """

    store: Store
    first_slot: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    whole_block: int = dataclasses.field(default=0, kw_only=True, metadata={"static": True})

    is_stored: ClassVar[bool] = True

    def describe(self) -> CacheRequest:
        layout, codec = self.store.layout, self.codec
        fields: Any = {"latent": self.is_latent, "joined": layout.content == "joined", "width": layout.width}
        fields |= {} if codec is None else {"codec": codec.dtype, "scales": codec.scales}
        return dataclasses.replace(super().describe(), **fields)

    @property
    def kv_heads(self) -> int:
        return self.store.key.shape[-3]

    @property
    def head_dim(self) -> int:
        return self.store.layout.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.store.layout.value_head_dim

    @property
    def dtype(self) -> DType:
        return self.store.layout.dtype

    @property
    def is_latent(self) -> bool:
        return self.store.layout.content == "latent"

    @property
    def codec(self) -> Quantized | None:
        """How tokens are stored; None: as they are."""
        return self.store.layout.codec

    @property
    def specs(self) -> Self:
        """The partition spec of every array on the mesh of ``placement``, a pytree of this structure.

        Raises:
            ValueError: it has no placement.
        """
        if self.placement is None:
            raise ValueError("placement=None: the cache is on no mesh; make it by attnops_caches.sharded(create, mesh)")
        return self.placement.specs(self)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token of one layer, scales and zeros of its ``width`` included."""
        sizes = {name: 1 if name.endswith("scale") else x.shape[-1] for name, x in self.store._blocks().items()}
        return self.kv_heads * sum(n * getattr(self.store, name).dtype.itemsize for name, n in sizes.items())

    def loader(self) -> TileLoader:
        return StoreLoader(self.store, None)

    def new_tokens(self, given: GivenTokens) -> NewTokens:
        """What a kernel needs to write tokens that the lengths count."""
        pieces = self.pieces(given.key.shape[1], given.size, given.starts)
        first, blocks = self._first_new(self.lengths - given.size, pieces)
        return NewTokens(self.store.encoded(given.key, given.value), first, given.size, blocks, given.starts, given)

    def _first_new(self, lengths: jax.Array, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        """``first`` and ``blocks`` of `NewTokens`, from the lengths before the append and the pieces of all rows."""
        return lengths, pieces.block.reshape(self.batch, -1)

    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces, sparse: bool) -> Self:
        store = self.store.write(self.store.encoded(key, value), pieces, sparse=sparse)
        return dataclasses.replace(self, store=store)

    @property
    def layers(self) -> int | None:
        return self.store.key.shape[0] if self.store.key.ndim == 5 and self.store.layer is None else None

    def layer(self, layer: ArrayLike) -> Self:
        """One layer of a cache with a layer axis, without a copy: the arrays of tokens still hold all layers.

        Calls, and ``read``, are for one layer; tokens are appended to all, see `pending`.

        Args:
            layer: an integer, which may be traced.

        Raises:
            ValueError: there is no layer axis, or a known layer is not in it.
        """
        check_layer(layer, self.layers)
        return dataclasses.replace(self, store=self.store.at_layer(layer))  # type: ignore[arg-type]

    def check_all_layers(self, what: str) -> None:
        if self.store.layer is not None:
            raise ValueError(f"{what} is for all layers together: call it on the cache with the layer axis")

    def with_blocks(self, blocks: dict[str, jax.Array], **fields: Any) -> Self:
        """This cache with other arrays in its store, by their names, and other fields."""
        return dataclasses.replace(self, store=dataclasses.replace(self.store, **blocks), **fields)  # type: ignore[arg-type]

    def read(self) -> Contents:
        self.check_layer()
        placement = self.active_placement
        if placement is None:
            return Contents(*self._keys_values(), *self.positions())
        by_token = PartitionSpec(placement.batch, placement.slots, placement.kv_heads)
        by_slot = PartitionSpec(placement.batch, placement.slots)
        specs = Contents(by_token, by_token, by_slot, by_slot)  # type: ignore[arg-type]
        return placement.by_compiler(lambda cache: cache.without_mesh().read(), specs, self)  # type: ignore[no-any-return]

    @abc.abstractmethod
    def _keys_values(self) -> tuple[jax.Array, jax.Array]:
        """``keys`` and ``values`` of `read`, on one device."""

    def row_blocks(self) -> jax.Array:
        """The blocks of each row in the order of its tokens, int32 [B, blocks]; −1 where there is none."""
        return jnp.arange(self.batch, dtype=jnp.int32)[:, None]
