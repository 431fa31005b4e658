"""Cache: keys and values of earlier tokens, one row per sequence."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dispatch.source import Source
from attnops.exported import serialised_tuple
from attnops.masks.base import Mask
from attnops_caches.calls.bind import bind_cached
from attnops_caches.calls.on_mesh import run_over_cache
from attnops_caches.calls.request import CacheRequest
from attnops_caches.calls.step import step
from attnops_caches.integers import array, check_size, integers_by_row
from attnops_caches.masks.slots import Slots
from attnops_caches.pending import Pending
from attnops_caches.placement import Placement, pending_on_mesh, written_on_mesh
from attnops_caches.rows import Rows, check_rows
from attnops_caches.store import GivenTokens, Pieces
from attnops_caches.transfer import put, take

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.output import OperationOutput
    from attnops.typing import DType
    from attnops_caches.tiles import TileLoader


CacheType = TypeVar("CacheType", bound="Cache")


@serialised_tuple
class Contents(NamedTuple):
    """What a cache holds, by slot.

    Attributes:
        keys: [B, S, K, D], dequantised, of the cache's dtype.
        values: [B, S, K, Dv], dequantised, of the cache's dtype.
        positions: the tokens' positions in their sequences, int32 [B, S].
        held: whether the slot holds a token, bool [B, S]; the others may hold anything, NaN too.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    held: jax.Array


@dataclasses.dataclass(frozen=True)
class Cache(Source):
    """Keys and values of earlier tokens, one row per sequence: a pytree of static shapes.

    Tokens of a row are numbered from 0 in the order they were appended: this is the *index* of a token. The first
    ``starts[b]`` are left padding, which is never seen; the *position* of a token is its index minus ``starts[b]``, and
    masks and biases go by positions. Attention over a cache is attention over the tokens that it holds::

        op(query, cache, mask=mask)  ==  vanilla(query, keys, values, mask=mask.at(query_positions, positions) & held)

    with ``keys, values, positions, held = cache.read()``. All methods return a new cache and leave the old one as it
    is; where its buffers are donated they are updated in place.

    Most storages of this package are `StoredCache`s. A storage of another layout, such as `KiviCache`, subclasses this
    class, and implements its abstract methods, and `slots`; and `loader`, for native `flash` to read it in place.

    Attributes:
        lengths: indices in use, left padding included, int32 [B].
        starts: tokens of left padding, int32 [B].
        overflowed: whether tokens were dropped because they did not fit, bool [B]; it stays True.
        placement: the mesh axes that shard it, see `attnops_caches.sharded`; None without a mesh.
    """

    lengths: jax.Array
    starts: jax.Array
    overflowed: jax.Array
    placement: Placement | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    options: ClassVar[frozenset[str]] = frozenset({"query_lengths", "rows"})
    # The methods of a `Source`, with `run`.
    bind = bind_cached
    step = step
    # Rows that move to another cache.
    take = take
    put = put
    # Its name in requests and limits.
    storage: ClassVar[str]
    # Whether positions may exceed the number of slots, so that masks and biases with an array by key have no meaning.
    unbounded: ClassVar[bool] = False
    # The fields that have an entry for each row, [B] or [B, …].
    by_row: ClassVar[tuple[str, ...]] = ("lengths", "starts", "overflowed")
    # Whether it is a `StoredCache`, whose tokens kernels may write, and which a mesh may shard.
    is_stored: ClassVar[bool] = False

    def describe(self) -> CacheRequest:
        """The static description of this cache in a request."""
        return CacheRequest(storage=self.storage, rows=self.batch, has_loader=type(self).loader is not Cache.loader)

    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        """See `attnops.Source.run`: in place where the class has a reader for it, else on the arrays of `read`."""
        return run_over_cache(operation, forward, call)[0]

    @property
    def batch(self) -> int:
        """B, the rows."""
        return self.lengths.shape[-1]

    @property
    def layers(self) -> int | None:
        """L, if the arrays of tokens have a layer axis; else None."""
        return None

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """S, the slots of a row."""

    @property
    @abc.abstractmethod
    def kv_heads(self) -> int:
        """K."""

    @property
    @abc.abstractmethod
    def head_dim(self) -> int:
        """D, of keys."""

    @property
    @abc.abstractmethod
    def value_head_dim(self) -> int:
        """Dv, of values."""

    @property
    @abc.abstractmethod
    def dtype(self) -> DType:
        """The dtype of keys and values as they are appended and read: float32, bfloat16 or float16."""

    @property
    def is_latent(self) -> bool:
        """Whether the value of a token is a part of its key, and is not given."""
        return False

    def append(
        self, key: ArrayLike, value: ArrayLike | None = None, lengths: ArrayLike | None = None, rows: Rows | None = None
    ) -> Self:
        """The cache with new tokens after those of each row.

        Args:
            key: [B, T, K, D], of the cache's dtype; [1, N, K, D] with ``rows``.
            value: [B, T, K, Dv], of the cache's dtype; [1, N, K, Dv] with ``rows``; None for latent content.
            lengths: integers [B] from 0 to T: the first ``lengths[b]`` tokens of row b are real. None: all T. Values
                known when tracing are checked, others are clipped.
            rows: which packed tokens belong to which row; None for a batch [B, T].

        Tokens that don't fit are dropped and set ``overflowed``; they change nothing else. If two runs of ``rows``
        have the same row, the tokens of the second are dropped too. A run whose slot is no row is padding.

        Raises:
            ValueError: another shape or dtype; lengths or rows that are known not to fit the tokens; both of them.
            UnsupportedError: in a `jax.shard_map` over mesh axes that shard the context.
        """
        self.check_layer()
        keys, values = self.tokens(key, value, rows)
        given = keys.shape[1], *self._counts(keys.shape[1], lengths, rows)
        if self.active_placement is None:
            return self._append(keys, values, *given)
        return self._pending(*given).write(keys, values).cache

    @functools.partial(jax.jit, inline=True, static_argnames="T")  # of eager calls too, one program
    def _append(
        self, keys: jax.Array, values: jax.Array | None, T: int, count: jax.Array | None, rows: Rows | None
    ) -> Self:
        """`append` on one device, its arguments checked."""
        return self._pending(T, count, rows).write(keys, values).cache

    def pending(self, T: int, lengths: ArrayLike | None = None, rows: Rows | None = None) -> Pending[Self]:
        """An append of T tokens per row that `Pending.write` or a step over it writes, layer by layer.

        Args:
            T: tokens per row, or of all packed rows.
            lengths: see `append`.
            rows: see `append`.

        Raises:
            TypeError, ValueError, UnsupportedError: see `append`.
        """
        return self._pending(T, *self._counts(check_size("T", T), lengths, rows))

    def tokens(self, key: ArrayLike, value: ArrayLike | None, rows: Rows | None) -> tuple[jax.Array, jax.Array | None]:
        """Key and value of new tokens, checked."""
        batch = self.batch if rows is None else 1
        keys = self._tokens("key", key, self.head_dim, batch)
        if value is None and not self.is_latent:
            raise ValueError("value=None, but the cache stores values; give them, or create it with latent=…")
        if value is not None and self.is_latent:
            raise ValueError(
                f"value is given, but the cache has latent content: its value is the first {self.value_head_dim} "
                f"features of the key; leave value out"
            )
        values = None if value is None else self._tokens("value", value, self.value_head_dim, batch)
        if values is not None and values.shape[1] != keys.shape[1]:
            raise ValueError(
                f"value has length {values.shape[1]}, but key has length {keys.shape[1]}: they must be equal"
            )
        return keys, values

    def _counts(self, T: int, lengths: ArrayLike | None, rows: Rows | None) -> tuple[jax.Array | None, Rows | None]:
        """How many of T new tokens of each row are real, int32 [B], or None and the packed rows; checked."""
        self.check_all_layers("an append, cache.pending(T).layer(layer),")
        runs = None if rows is None else check_rows(rows, T, self.batch)
        self.check_run(T, rows, appends=True)
        if runs is None:
            return self.row_lengths("lengths", lengths, T), None
        if lengths is not None:
            raise ValueError("rows and lengths are both given: packed rows have their lengths in rows.starts")
        return None, runs

    def _pending(self, T: int, count: jax.Array | None, rows: Rows | None) -> Pending[Self]:
        """`pending`, its arguments checked."""
        placement = self.active_placement
        if placement is None:
            return self.grown(T, count, rows)
        cache, fields = pending_on_mesh(placement, T, self, count, rows)
        return Pending(cache, **fields, rows=rows, T=T)

    @functools.partial(jax.jit, inline=True, static_argnames="T")
    def grown(self, T: int, count: jax.Array | None, rows: Rows | None) -> Pending[Self]:
        """`pending` on one device: of T tokens per row ``count`` are real, or of T tokens of packed ``rows``."""
        if rows is None:
            assert count is not None
            wanted, starts = count, None
        else:
            add = jnp.zeros((self.batch,), jnp.int32).at[jnp.clip(rows.slots, 0, self.batch - 1)].add
            counts = rows.first_counts(T, self.batch)
            wanted, count = add(rows.counts(T, self.batch)), add(counts)
            starts = add(jnp.where(counts > 0, jnp.clip(rows.starts, 0, T)[:-1], 0))
        every: Any = np.arange(self.batch, dtype=np.int32)  # known, see `at_rows`
        fit = self.place(T, count, every)[1]
        cache = self.advanced(self.lengths + fit, self.overflowed | (fit < wanted))
        return Pending(cache, count, fit, starts, rows, T=T)

    def advanced(self, lengths: jax.Array, overflowed: jax.Array) -> Self:
        """This cache with the lengths and the flags after an append; its arrays lack the tokens."""
        return dataclasses.replace(self, lengths=lengths, overflowed=overflowed)

    def pieces(self, T: int, size: jax.Array, starts: jax.Array | None) -> Pieces:
        """Where the last ``size[b]`` tokens of each row lie, of T at most; ``starts``: see `GivenTokens`."""
        before, every = dataclasses.replace(self, lengths=self.lengths - size), np.arange(self.batch, dtype=np.int32)
        return Pieces(*map(jnp.asarray, before.place(T, size, every)[0])).packed(starts)  # type: ignore[arg-type]

    def with_tokens(self, given: GivenTokens) -> Self:
        """This cache, whose lengths count them, with these tokens in its arrays."""
        placement = self.active_placement
        return self._with_tokens(given) if placement is None else written_on_mesh(placement, self, given)

    @functools.partial(jax.jit, inline=True)
    def _with_tokens(self, given: GivenTokens) -> Self:
        """`with_tokens` on one device."""
        size, starts, key, value = given
        return self.write(key, value, self.pieces(key.shape[1], size, starts), starts is not None)

    @abc.abstractmethod
    def write(self, key: jax.Array, value: jax.Array | None, pieces: Pieces, sparse: bool) -> Self:
        """This cache, whose lengths count them, with new tokens in its arrays; every other slot is unchanged.

        Args:
            key: [B, T, K, D]; for packed rows [1, N, K, D].
            value: [B, T, K, Dv]; for packed rows [1, N, K, Dv]. None if the value is a part of the key.
            pieces: where they go.
            sparse: whether most pieces may be empty.
        """

    def loader(self) -> TileLoader | None:
        """Loads tiles for native `flash`; None if the cache is read by `read` alone."""
        return None

    @abc.abstractmethod
    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        """Where new tokens go: the first ``count[r]`` of T tokens go to row ``rows[r]``; no row occurs twice.

        Returns:
            The pieces, whose ``row`` is r; and how many tokens of each run fit, int32 [R].
        """

    @abc.abstractmethod
    def read(self) -> Contents:
        """All slots: keys and values dequantised, positions, and whether the slot holds a token.

        O(B · S) memory: for operations that don't read the storage in place.
        """

    def slots(self) -> Slots:
        """Where the tokens of each row lie: ``positions`` and ``held`` of `read`, computed from a few values per row.

        The token of index i is in slot i, unless a storage says otherwise.
        """
        return self._slots()

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """The position of each slot, int32 [B, S], and whether it holds a token, bool [B, S]; as in `read`."""
        return self.slots().arrays()

    def positions_by_device(self) -> tuple[jax.Array, jax.Array]:
        """`positions`, all slots of the first device that shards a row's slots, then the next one's."""
        return self.positions()

    def _slots(self, base: jax.Array | None = None, newest: jax.Array | None = None) -> Slots:
        """`slots` where the token of index i has the number ``i - base``; None for 0."""
        start = jnp.maximum(self.starts, 0)
        if base is None:
            return Slots(-self.starts, start, self.lengths, None, None, self.length)
        return Slots(base - self.starts, start - base, self.lengths - base, newest, None, self.length)

    def truncate(self, lengths: ArrayLike) -> Self:
        """The cache with the last tokens taken back, such as rejected drafts.

        Args:
            lengths: integers [B]: row b keeps its first ``lengths[b]`` indices, all if it has fewer, none below 0.

        A `PagedCache` keeps its table: `PagePool.truncate` gives pages back.

        Raises:
            ValueError: another shape or dtype.
        """
        kept = jnp.minimum(self.lengths, jnp.maximum(integers_by_row("lengths", lengths, self.batch), 0))
        return dataclasses.replace(self, lengths=kept)

    @property
    def active_placement(self) -> Placement | None:
        """``placement`` without the mesh axes of an enclosing `jax.shard_map`; None if it shards nothing then."""
        return None if self.placement is None else self.placement.free()

    def without_mesh(self) -> Self:
        """This cache as an ordinary one, without its placement; it holds the same tokens."""
        return dataclasses.replace(self, placement=None)

    def _rows(self) -> dict[str, jax.Array]:
        """The arrays of ``by_row``."""
        return {name: getattr(self, name) for name in self.by_row}

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

    def check_run(self, T: int, rows: Rows | None, *, appends: bool) -> None:
        """Raise a `ValueError` if the storage is known not to take so many tokens or queries of a row at once.

        Args:
            T: tokens or queries per row; with ``rows`` N, packed.
            rows: which packed ones belong to which row; None for a batch.
            appends: whether tokens are appended, and not queries given.
        """

    def mask(self, mask: Mask | None) -> Mask | None:
        """The mask of a call over this cache: the caller's, and what a storage adds, such as a ring's window."""
        return mask

    def query_positions(self, T: int, query_lengths: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """The positions of T queries of each row, the first ``query_lengths[b]`` real, int32 [B, T]; −1 for padding.

        Both arguments are int32 [B]. ``lengths`` counts a row's tokens with these queries; None: the cache's lengths.
        """
        lengths = self.lengths if lengths is None else lengths
        place = jnp.arange(T, dtype=jnp.int32)
        position = (lengths - self.starts - query_lengths)[:, None] + place
        return jnp.where((place < query_lengths[:, None]) & (position >= 0), position, -1)

    def row_lengths(self, name: str, lengths: ArrayLike | None, T: int) -> jax.Array:
        """How many of T tokens of each row are real, int32 [B], at most T: ``lengths``, checked, or T for None."""
        if lengths is None:
            return jnp.full((self.batch,), T, jnp.int32)
        lengths = array(lengths)
        if isinstance(lengths, np.ndarray) and lengths.dtype.kind in "iu" and ((lengths < 0) | (lengths > T)).any():
            raise ValueError(f"{name}={lengths.tolist()} must be from 0 to T={T}, the tokens that were given")
        return jnp.clip(integers_by_row(name, lengths, self.batch), 0, T)

    def check_layer(self) -> None:
        """Raise a `ValueError` for several layers, of which calls and appends need one."""
        if self.layers is not None:
            raise ValueError(
                f"the {type(self).__name__} has {self.layers} layers: give a call one of them, by cache.layer(layer), "
                f"and a step one of an append to all, by cache.pending(T).layer(layer)"
            )

    def check_all_layers(self, what: str) -> None:
        """Raise a `ValueError` for one of several layers, since ``what`` is for all of them together."""

    def _tokens(self, name: str, x: Any, d: int, batch: int) -> jax.Array:
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} is a {type(x).__name__}, but must be an array [B, T, K, head_dim]")
        wanted = (batch, x.shape[1] if len(x.shape) == 4 else "T", self.kv_heads, d)
        if len(x.shape) != 4 or tuple(x.shape) != wanted or not x.shape[1]:
            fits = len(x.shape) == 4 and (*x.shape[:2], x.shape[3]) == (batch, self.kv_heads, d)
            hint = f". With heads and tokens swapped it fits: {name}.swapaxes(1, 2), or metadata.layout of op.step"
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the cache takes [B, T, K, head_dim]="
                f"[{batch}, T, {self.kv_heads}, {d}] with T of at least 1{hint if fits else ''}"
            )
        if jnp.dtype(x.dtype) != jnp.dtype(self.dtype):
            raise ValueError(
                f"{name} has dtype {x.dtype}, but the cache was created for {jnp.dtype(self.dtype).name}: cast it, or "
                f"create the cache with dtype={x.dtype}"
            )
        return jnp.asarray(x)
