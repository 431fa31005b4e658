"""StoredCache: a cache whose tokens are in a `Store`, on one device or on a mesh."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from attnops_caches.base import Cache, Contents
from attnops_caches.calls.request import CacheRequest
from attnops_caches.codec import Quantized
from attnops_caches.integers import check_layer, integers_by_row
from attnops_caches.placement import append_by_shard
from attnops_caches.rows import Rows
from attnops_caches.store import NewTokens, Pending, Pieces, Store
from attnops_caches.tiles import StoreLoader, TileLoader

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import DType

StoredType = TypeVar("StoredType", bound="StoredCache")


def _weak(layer: Any) -> Callable[[], Any]:
    """A function that returns a layer's number; if it is traced or an array, only while that exists elsewhere."""
    return weakref.ref(layer) if isinstance(layer, jax.Array) else lambda: layer


def create_rows(batch: int, starts: ArrayLike | None, layers: int | None) -> dict[str, Any]:
    """``lengths``, ``starts`` and ``overflowed`` of an empty cache."""
    lead = () if layers is None else (layers,)
    first = jnp.zeros((batch,), jnp.int32) if starts is None else integers_by_row("starts", starts, batch)
    if isinstance(starts, (int, list, tuple, np.ndarray)) and (np.asarray(starts) < 0).any():
        raise ValueError(f"starts={starts} must be at least 0: how many tokens of left padding each row has")
    return {
        "lengths": jnp.zeros((*lead, batch), jnp.int32),
        "starts": jnp.broadcast_to(first, (*lead, batch)) + jnp.int32(0),
        "overflowed": jnp.zeros((*lead, batch), bool),
    }


@dataclasses.dataclass(frozen=True)
class StoredCache(Cache):
    """A cache whose tokens are in blocks of a `Store`: what the storages of this package share.

    A layer axis may be in front of every array (``create(layers=L)``). Methods are for one layer, see `layer`, and
    raise a `ValueError` for all together; except those that empty, shorten or move rows or pages (``reset``,
    ``truncate``, ``with_table``, ``take_rows``, ``fork``, ``copy_pages``), which are for all layers.

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

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: x for name, x in self.__dict__.items() if name != "_taken"
        }  # what `layer` took has weak references

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

    def pending(
        self, key: ArrayLike, value: ArrayLike | None = None, lengths: ArrayLike | None = None, rows: Rows | None = None
    ) -> Pending[Self]:
        """`append` without its writes, for a kernel that writes.

        Raises:
            ValueError: see `append`.
            UnsupportedError: a mesh shards the context; or rows are packed, and it shards the cache's rows.
        """
        given, placement = self._new(key, value, lengths, rows), self.active_placement
        return self._pending(*given) if placement is None else Pending(*append_by_shard(placement, False, self, *given))

    def _pending(
        self, key: jax.Array, value: jax.Array | None, count: jax.Array | None, rows: Rows | None
    ) -> Pending[Self]:
        """`pending` on one device, its arguments checked."""
        cache, pieces, fit, starts = self.grown(key.shape[1], count, rows)
        first, blocks = self._first_new(pieces)
        given = (key,) if value is None else (key, value)
        return Pending(cache, NewTokens(self.store.encoded(key, value), first, fit, blocks, starts, given))

    def write_new(self, new: NewTokens, rows: jax.Array) -> Self:
        """The cache with some of the tokens that `pending` returned with it, where a kernel does not write them all.

        Args:
            new: the tokens.
            rows: whose are written, bool [B].

        The loop that writes has an iteration for each page of these rows that has new tokens.

        Raises:
            ValueError: the cache is on a mesh: a kernel is given each device's shard.
        """
        if self.active_placement is not None:
            raise ValueError("the cache is on a mesh: write_new is for a device's part of it, inside jax.shard_map")
        before = dataclasses.replace(self, lengths=self.lengths - new.size)
        T, every = new.tokens["key"].shape[2], jnp.arange(self.batch, dtype=jnp.int32)
        pieces, _ = before.place(T, jnp.where(rows, new.size, 0), every)
        store = self.store.write(new.tokens, pieces.packed(new.starts), sparse=True)
        return dataclasses.replace(self, store=store)

    def _first_new(self, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        """``first`` and ``blocks`` of `NewTokens`, from the pieces of all rows."""
        return self.lengths, pieces.block.reshape(self.batch, -1)

    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces, sparse: bool) -> Self:
        store = self.store.write(self.store.encoded(key, value), pieces, sparse=sparse)
        return dataclasses.replace(self, store=store)

    def layer(self, layer: ArrayLike) -> Self:
        """One layer of a cache with a layer axis, for `jax.lax.scan` over layers without a copy of the cache.

        The arrays still hold all layers, so that an append updates them in place: carry the cache through the scan
        (as its input and output XLA would copy it), and put the layer back by `with_layer`::

            def block(carry, layer):
                x, cache = carry
                ...
                out, one = op.step(query, key, value, cache.layer(layer), mask=Causal())
                return (x, cache.with_layer(layer, one)), None

        Args:
            layer: an integer, which may be traced.

        Raises:
            ValueError: there is no layer axis, or a known layer is not in it.
        """
        if self.lengths.ndim != 2:
            raise ValueError(f"lengths have shape {self.lengths.shape}, but must be [L, B]: there is no layer axis")
        check_layer(layer, self.lengths.shape[0])
        fields = {name: lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in self._of_layer().items()}
        # For `with_layer`; not a field, since it is no part of the cache.
        object.__setattr__(self, "_taken", (_weak(layer), {name: weakref.ref(x) for name, x in fields.items()}))
        return dataclasses.replace(self, store=self.store.at_layer(layer), **fields)  # type: ignore[arg-type]

    def with_layer(self, layer: ArrayLike, one: Self) -> Self:
        """This cache with a layer axis, with one layer replaced by what became of ``self.layer(layer)``.

        Args:
            layer: the integer that `layer` was given.
            one: that layer afterwards.

        Raises:
            ValueError: there is no layer axis, a known layer is not in it, or ``one`` is no layer of a cache.
        """
        if self.lengths.ndim != 2 or not isinstance(one, StoredCache) or one.store.layer is None:
            raise ValueError("with_layer takes what became of cache.layer(layer), and the cache itself")
        check_layer(layer, self.lengths.shape[0])
        new, (last, taken) = one._of_layer(), getattr(self, "_taken", (_weak(None), {}))
        # XLA would copy what `layer` took and nothing changed, such as tables.
        same = {name for name, x in taken.items() if last() is layer and x() is new[name]}
        fields = {
            name: lax.dynamic_update_index_in_dim(x, new[name], layer, 0)
            for name, x in self._of_layer().items() if name not in same
        }  # fmt: skip
        return self.with_blocks(one.store._blocks(), **fields)

    def with_blocks(self, blocks: dict[str, jax.Array], **fields: Any) -> Self:
        """This cache with other arrays in its store, by their names, and other fields."""
        return dataclasses.replace(self, store=dataclasses.replace(self.store, **blocks), **fields)  # type: ignore[arg-type]

    def read(self) -> Contents:
        self._check_layer()
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

    def _of_layer(self) -> dict[str, jax.Array]:
        """The arrays outside the store, which have the layer axis too."""
        names = [x.name for x in dataclasses.fields(self) if x.name != "store" and not x.metadata.get("static")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
