"""Cache: keys and values of earlier tokens, one row a sequence."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from attnops.dispatch.source import Source
from attnops.masks.base import Mask
from attnops_caches.calls.bind import bind_cached
from attnops_caches.calls.request import CacheRequest
from attnops_caches.calls.run import run_over_cache
from attnops_caches.calls.step import step
from attnops_caches.codec import Quantized
from attnops_caches.integers import check_layer, integers_by_row
from attnops_caches.masks.slots import Slots
from attnops_caches.placement import Placement
from attnops_caches.placement import append as append_by_shard
from attnops_caches.placement import pending as pending_by_shard
from attnops_caches.rows import Rows, check_rows
from attnops_caches.store import Pieces, Store
from attnops_caches.tokens import Contents, NewTokens

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.binding import Call
    from attnops.output import OperationOutput
    from attnops.typing import DType


CacheType = TypeVar("CacheType", bound="Cache")


@dataclasses.dataclass(frozen=True)
class Cache(Source):
    """Keys and values of earlier tokens, one row a sequence: a pytree of static shapes.

    Tokens of a row are numbered in the order they were appended: the *index* of a token, from 0. The first
    ``starts[b]`` are left padding, which is never seen; the *position* of a token is its index minus ``starts[b]``, and
    masks and biases go by positions. Attention over a cache is that over the tokens that it holds::

        op(query, cache, mask=mask)  ==  vanilla(query, keys, values, mask=mask.at(query_positions, positions) & held)

    with ``keys, values, positions, held = cache.read()``. All methods return a new cache and leave the old one as it
    is; where its buffers are donated they are updated in place.

    A layer axis may be in front of every array (``create(layers=L)``). Methods are for one layer, see `layer`, and
    raise a `ValueError` for all together; except those that empty, shorten or move rows or pages (``reset``,
    ``truncate``, ``with_table``, ``take_rows``, ``fork``, ``copy_pages``), which are for all layers.

    Attributes:
        store: the arrays of the tokens.
        lengths: indices in use, left padding included, int32 [B].
        starts: tokens of left padding, int32 [B].
        overflowed: whether tokens were dropped because they did not fit, bool [B]; it stays True.
        placement: the mesh axes that shard it, see `attnops_caches.sharded`; None without a mesh.
    """

    store: Store
    lengths: jax.Array
    starts: jax.Array
    overflowed: jax.Array
    placement: Placement | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    options: ClassVar[frozenset[str]] = frozenset({"query_lengths", "rows"})
    # Its name in requests and limits.
    storage: ClassVar[str]
    # Whether positions may exceed the number of slots, so that masks and biases with an array by key have no meaning.
    unbounded: ClassVar[bool] = False

    def describe(self) -> CacheRequest:
        """The static description of this cache in a request."""
        store, codec = self.store, self.codec
        return CacheRequest(
            storage=self.storage,
            codec="" if codec is None else codec.dtype,
            scales="" if codec is None else codec.scales,
            latent=store.latent is not None,
            width=store.width,
            joined=store.is_joined,
            rows=self.batch,
        )

    def bind(self, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
        """See `attnops.Source.bind`. Options of a call over a cache, in addition to the operation's:

        query_lengths: integers [B]: the first ``query_lengths[b]`` queries of row b are real, the others give output 0
            and logsumexp −inf. None: all T. Query i of row b is that of index ``lengths[b] - query_lengths[b] + i``.
        rows: `Rows` of packed rows: the query is [1, N, H, D], masks and biases are for [B, H, N, S]. None for a batch.
        """
        return bind_cached(operation.metadata, query, self, dict(options))

    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        """See `attnops.Source.run`: in place where the class has a reader for it, else on the arrays of `read`."""
        return run_over_cache(operation, forward, call)

    def step(
        self,
        operation: OperationImpl,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike | None,
        options: Mapping[str, Any],
    ) -> tuple[OperationOutput, Self]:
        """See `attnops.OperationImpl.step`: with ``rows`` query, key and value are [1, N, …], one batch of N tokens.

        Queries of tokens that did not fit see the tokens that did; ``overflowed`` says so.
        """
        rest = {name: x for name, x in options.items() if name not in self.options}
        return step(operation, query, key, value, self, options.get("query_lengths"), options.get("rows"), rest)

    @property
    def batch(self) -> int:
        """B, the rows."""
        return self.lengths.shape[-1]

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """S, the slots of a row."""

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.store.kv_heads

    @property
    def head_dim(self) -> int:
        """D, of keys."""
        return self.store.head_dim

    @property
    def value_head_dim(self) -> int:
        """Dv, of values."""
        return self.store.value_head_dim

    @property
    def dtype(self) -> DType:
        """The dtype of keys and values as they are appended and read."""
        return self.store.dtype

    @property
    def codec(self) -> Quantized | None:
        """How tokens are stored; None: as they are."""
        return self.store.codec

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
        store = self.store
        arrays = [x for x in (store.key, store.value) if x is not None]
        scales = [x for x in (store.key_scale, store.value_scale) if x is not None and store.has_token_scales]
        features = sum(x.shape[-1] * x.dtype.itemsize for x in arrays)
        return store.kv_heads * (features + 4 * len(scales))

    def append(
        self,
        key: ArrayLike,
        value: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        rows: Rows | None = None,
    ) -> Self:
        """The cache with new tokens after those of each row.

        Args:
            key: [B, T, K, D], of the cache's dtype; [1, N, K, D] with ``rows``.
            value: [B, T, K, Dv], of the cache's dtype; [1, N, K, Dv] with ``rows``; None for latent content.
            lengths: integers [B] from 0 to T: of row b the first ``lengths[b]`` tokens are real. None: all T. Those
                known when tracing are checked, others are clipped.
            rows: which packed tokens belong to which row; None for a batch [B, T].

        Tokens that don't fit are dropped and set ``overflowed``; nothing else is changed by them. So are those of
        a run whose row has another run before it. Those of a run whose slot is no row are padding.

        Raises:
            ValueError: another shape or dtype; lengths or rows that are known not to fit the tokens; both of them.
            UnsupportedError: packed rows, and a mesh that shards the context.
        """
        key, value, count, rows = self._new(key, value, lengths, rows)
        placement = None if self.placement is None else self.placement.free()
        if placement is not None:
            return append_by_shard(placement, self, key, value, count, rows)
        return self._append(key, value, count, rows)

    def pending(
        self,
        key: ArrayLike,
        value: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        rows: Rows | None = None,
    ) -> tuple[Self, NewTokens]:
        """`append` without its writes, for a kernel that writes: the cache after them, and the tokens.

        Raises:
            ValueError: see `append`.
            UnsupportedError: a mesh that shards the context, or of packed rows the rows.
        """
        key, value, count, rows = self._new(key, value, lengths, rows)
        placement = None if self.placement is None else self.placement.free()
        if placement is None:
            return self._pending(key, value, count, rows)
        return pending_by_shard(placement, self, key, value, count, rows)

    def _pending(
        self, key: jax.Array, value: jax.Array | None, count: jax.Array | None, rows: Rows | None
    ) -> tuple[Self, NewTokens]:
        """`pending` on one device, its arguments checked."""
        T, starts = key.shape[1], None
        if rows is None:
            assert count is not None
            wanted = count
        else:
            slots, none = jnp.clip(rows.slots, 0, self.batch - 1), jnp.zeros((self.batch,), jnp.int32)
            wanted, own = none.at[slots].add(rows.counts(T, self.batch)), rows.first_counts(T, self.batch)
            count = none.at[slots].add(own)
            starts = none.at[slots].add(jnp.where(own > 0, rows.firsts(T), 0))
        pieces, fit = self.place(T, count, jnp.arange(self.batch, dtype=jnp.int32))
        first, blocks = self._first_new(pieces)
        new = NewTokens(self.store._tokens(key, value), first, fit, blocks, starts)
        return self._appended(self.store, self.lengths + fit, fit < wanted), new

    def write_new(self, new: NewTokens, rows: jax.Array) -> Self:
        """The cache with some of the tokens that `pending` returned with it, where a kernel does not write them all.

        Args:
            new: the tokens.
            rows: whose are written, bool [B].

        The loop that writes has a turn for each page of these rows that has new tokens; before it, all pages that the
        tokens of all rows might lie in are sorted.

        Raises:
            ValueError: the cache is on a mesh: a kernel is given each device's part.
        """
        if self.placement is not None and self.placement.free() is not None:
            raise ValueError("the cache is on a mesh: write_new is for a device's part of it, inside jax.shard_map")
        before = dataclasses.replace(self, lengths=self.lengths - new.size)
        T, every = new.tokens["key"].shape[2], jnp.arange(self.batch, dtype=jnp.int32)
        pieces, _ = before.place(T, jnp.where(rows, new.size, 0), every)
        if new.starts is not None:
            pieces = pieces._replace(first=pieces.first + new.starts[pieces.row], row=jnp.zeros_like(pieces.row))
        return dataclasses.replace(self, store=self.store.write_some(new.tokens, pieces))

    def _first_new(self, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        """``first`` and ``blocks`` of `NewTokens`, from the pieces of all rows."""
        return self.lengths, pieces.block.reshape(self.batch, -1)

    def _new(
        self, key: ArrayLike, value: ArrayLike | None, lengths: ArrayLike | None, rows: Rows | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Rows | None]:
        """The arguments of `append`, checked; lengths are those of all rows, or None for packed rows."""
        self._check_layer()
        batch = self.batch if rows is None else 1
        key, value = self._tokens("key", key, self.head_dim, batch), self._value(value, batch)
        if value is not None and value.shape[1] != key.shape[1]:
            raise ValueError(
                f"value has length {value.shape[1]}, but key has length {key.shape[1]}: they must be equal"
            )
        T = key.shape[1]
        if rows is None:
            return key, value, self.row_lengths("lengths", lengths, T), None
        if lengths is not None:
            raise ValueError("rows and lengths are both given: packed rows have their lengths in rows.starts")
        return key, value, None, check_rows(rows).checked(T, self.batch)

    @functools.partial(jax.jit, inline=True)  # of eager calls too, one program
    def _append(self, key: jax.Array, value: jax.Array | None, count: jax.Array | None, rows: Rows | None) -> Self:
        """`append` on one device, its arguments checked."""
        T = key.shape[1]
        if rows is None:
            assert count is not None
            pieces, fit = self.place(T, count, jnp.arange(self.batch, dtype=jnp.int32))
            return self._appended(self.store.write(key, value, pieces), self.lengths + fit, fit < count)
        wanted = rows.counts(T, self.batch)
        count = rows.first_counts(T, self.batch)
        slots = jnp.clip(rows.slots, 0, self.batch - 1)
        pieces, fit = self.place(T, count, slots)
        pieces = pieces._replace(first=pieces.first + rows.firsts(T)[pieces.row], row=jnp.zeros_like(pieces.row))
        grown = jnp.asarray(self.lengths).at[slots].add(fit)
        dropped = jnp.zeros_like(self.overflowed).at[slots].max(fit < wanted)
        store = self.store.write_some(self.store._tokens(key, value), pieces)
        return self._appended(store, grown, dropped)

    def _appended(self, store: Store, lengths: jax.Array, dropped: jax.Array) -> Self:
        """This cache with another store after an append."""
        return dataclasses.replace(self, store=store, lengths=lengths, overflowed=self.overflowed | dropped)

    @abc.abstractmethod
    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        """Where new tokens go: the first ``count[r]`` of T tokens go to row ``rows[r]``, all of them different.

        Returns:
            The pieces, whose ``row`` is r; and how many tokens of each run fit, int32 [R].
        """

    @abc.abstractmethod
    def read(self) -> Contents:
        """All slots: keys and values dequantised, positions, and whether the slot holds a token.

        O(B · S) memory: for operations that don't read the storage in place.
        """

    @abc.abstractmethod
    def slots(self) -> Slots:
        """Where the tokens of each row lie: the last two of `read`, as values by row."""

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """The last two of `read`: positions int32 [B, S] and held bool [B, S]."""
        return self.slots().arrays()

    def _slots(self, base: jax.Array | None = None, newest: jax.Array | None = None) -> Slots:
        """`slots` where the token of index i has the number ``i - base``; None for 0."""
        start = jnp.maximum(self.starts, 0)
        if base is None:
            return Slots(-self.starts, start, self.lengths, None, None, self.length)
        return Slots(base - self.starts, start - base, self.lengths - base, newest, None, self.length)

    def truncate(self, lengths: ArrayLike) -> Self:
        """The cache with the last tokens taken back, such as rejected drafts.

        Args:
            lengths: integers [B]: row b keeps its first ``lengths[b]`` indices; more than it has keeps all, and a
                negative number none.

        A `PagedCache` keeps its table: `PagePool.truncate` gives pages back.

        Raises:
            ValueError: another shape or dtype.
        """
        kept = jnp.minimum(self.lengths, jnp.maximum(integers_by_row("lengths", lengths, self.batch), 0))
        return dataclasses.replace(self, lengths=kept)

    def without_mesh(self) -> Self:
        """This cache without its placement; tokens, and what it means, are the same."""
        return dataclasses.replace(self, placement=None)

    def _read_placed(self) -> Contents:
        """`read` of a cache on a mesh."""
        assert self.placement is not None
        placement = self.placement.free()
        if placement is None:
            return self.without_mesh().read()
        by_token = PartitionSpec(placement.batch, placement.slots, placement.kv_heads)
        by_slot = PartitionSpec(placement.batch, placement.slots)
        specs = Contents(by_token, by_token, by_slot, by_slot)  # type: ignore[arg-type]
        result: Contents = placement.by_compiler(lambda cache: cache.without_mesh().read(), specs, self)
        return result

    def layer(self, layer: ArrayLike) -> Self:
        """One layer of a cache with a layer axis, for `jax.lax.scan` over layers without a copy of the cache.

        The arrays stay those of all layers, so that an append updates them in place: carry the cache through the scan,
        and put the layer back by `with_layer`::

            def block(carry, layer):
                x, cache = carry
                ...
                out, one = op.step(query, key, value, cache.layer(layer), mask=Causal())
                return (x, cache.with_layer(layer, one)), None

        A cache that is an input and an output of the scan, and not its carry, is copied by XLA.

        Args:
            layer: an integer, which may be traced.

        Raises:
            ValueError: there is no layer axis, or a known layer is not in it.
        """
        if self.lengths.ndim != 2:
            raise ValueError(f"lengths have shape {self.lengths.shape}, but must be [L, B]: there is no layer axis")
        check_layer(layer, self.lengths.shape[0])
        fields = {name: lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in self._of_layer().items()}
        return dataclasses.replace(self, store=self.store.layer(layer), **fields)  # type: ignore[arg-type]

    def with_layer(self, layer: ArrayLike, one: Self) -> Self:
        """This cache with a layer axis, with one layer replaced by what became of ``self.layer(layer)``.

        Args:
            layer: the integer that `layer` was given.
            one: that layer afterwards.

        Raises:
            ValueError: there is no layer axis, a known layer is not in it, or ``one`` is no layer of a cache.
        """
        if self.lengths.ndim != 2 or not isinstance(one, Cache) or one.store.first is None:
            raise ValueError("with_layer takes what became of cache.layer(layer), and the cache itself")
        check_layer(layer, self.lengths.shape[0])
        new = one._of_layer()
        fields = {name: lax.dynamic_update_index_in_dim(x, new[name], layer, 0) for name, x in self._of_layer().items()}
        return dataclasses.replace(self, store=self.store.with_layer(one.store), **fields)  # type: ignore[arg-type]

    def _rows(self) -> dict[str, jax.Array]:
        """The arrays by row."""
        names = ("lengths", "starts", "overflowed", "written", "table")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def _of_layer(self) -> dict[str, jax.Array]:
        """The arrays outside the store that have the layer axis."""
        return self._rows()

    def reset(self, rows: ArrayLike) -> Self:
        """The cache with some rows emptied, for new sequences: no tokens, no padding, not overflowed.

        Args:
            rows: bool [B], True for those to be emptied.

        A `PagedCache` keeps its table: `PagePool.release` gives pages back.

        Raises:
            ValueError: another shape or dtype.
        """
        chosen = jnp.asarray(rows)
        if chosen.dtype != np.bool_ or chosen.shape != (self.batch,):
            raise ValueError(f"rows is {chosen.dtype} {chosen.shape}, but must be bool [B]=({self.batch},)")
        fields = {name: x for name, x in self._rows().items() if name != "table"}
        changes: dict[str, Any] = {name: jnp.where(chosen, jnp.zeros((), x.dtype), x) for name, x in fields.items()}
        return dataclasses.replace(self, **changes)

    def check_queries(self, T: int, rows: Rows | None) -> None:
        """Raises a `ValueError` for queries of which it is known that the storage does not hold the keys they see.

        Args:
            T: queries a row; of packed rows, of all rows.
            rows: of packed rows.
        """

    def mask(self, mask: Mask | None) -> Mask | None:
        """The mask of a call over this cache; a storage may add its own."""
        return mask

    def query_positions(self, T: int, query_lengths: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """The positions of the last ``query_lengths[b]`` tokens of each row, int32 [B, T]; −1 for padding.

        Args:
            T: queries a row.
            query_lengths: int32 [B]; query i is padding from this one on.
            lengths: of the rows, queries included, int32 [B]; None for the cache's.
        """
        lengths = self.lengths if lengths is None else lengths
        place = jnp.arange(T, dtype=jnp.int32)
        position = (lengths - self.starts - query_lengths)[:, None] + place
        return jnp.where((place < query_lengths[:, None]) & (position >= 0), position, -1)

    def row_lengths(self, name: str, lengths: ArrayLike | None, T: int) -> jax.Array:
        """How many of T tokens of each row are real, int32 [B], at most T.

        Raises:
            ValueError: they are not integers [B], or known to be outside 0 … T.
        """
        self._check_layer()
        if lengths is None:
            return jnp.full((self.batch,), T, jnp.int32)
        if isinstance(lengths, (int, list, tuple, np.ndarray, np.generic)):
            known = np.asarray(lengths)
            if known.dtype.kind in "iu" and ((known < 0) | (known > T)).any():
                raise ValueError(f"{name}={known.tolist()} must be from 0 to T={T}, the tokens that were given")
        return jnp.clip(integers_by_row(name, lengths, self.batch), 0, T)

    def _check_layer(self) -> None:
        if self.lengths.ndim != 1:
            raise ValueError(
                f"{type(self).__name__}'s lengths have shape {self.lengths.shape}, but must have shape [B]: it has a "
                f"layer axis in front; take one layer by cache.layer(layer)"
            )

    def _value(self, value: ArrayLike | None, batch: int) -> jax.Array | None:
        latent = self.store.latent
        if latent is not None:
            if value is not None:
                raise ValueError(
                    f"value is given, but the cache has latent content: its value is the first {latent} features of "
                    f"the key; leave value out"
                )
            return None
        if value is None:
            raise ValueError("value=None, but the cache stores values; give them, or create it with latent=…")
        return self._tokens("value", value, self.value_head_dim, batch)

    def _tokens(self, name: str, x: Any, d: int, batch: int) -> jax.Array:
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} is a {type(x).__name__}, but must be an array [B, T, K, head_dim]")
        wanted = (batch, x.shape[1] if len(x.shape) == 4 else "T", self.kv_heads, d)
        if len(x.shape) != 4 or tuple(x.shape) != wanted or not x.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the cache takes [B, T, K, head_dim]="
                f"[{batch}, T, {self.kv_heads}, {d}] with T of at least 1"
            )
        if jnp.dtype(x.dtype) != jnp.dtype(self.dtype):
            raise ValueError(
                f"{name} has dtype {x.dtype}, but the cache was created for {jnp.dtype(self.dtype).name}: cast it, or "
                f"create the cache with dtype={x.dtype}"
            )
        return jnp.asarray(x)
