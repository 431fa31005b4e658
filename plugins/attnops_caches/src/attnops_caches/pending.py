"""Pending: an append to a cache, whose tokens are written layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import jax

from attnops.dispatch.source import Source
from attnops.exported import serialised
from attnops_caches.calls.step import length_of, step_pending
from attnops_caches.integers import check_layer
from attnops_caches.rows import Rows
from attnops_caches.store import GivenTokens

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.output import OperationOutput
    from attnops_caches.base import Cache

PendingCache = TypeVar("PendingCache", bound="Cache")


@serialised()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending(Source, Generic[PendingCache]):
    """An append of T tokens per row to all layers of a cache. `Cache.pending` makes it.

    What the layers share (lengths, flags, the table of pages) is advanced once. A step writes the tokens of one layer,
    and needs that layer's arrays alone, so that a pending append is the carry of a `jax.lax.scan` over layers::

        def block(carry, layer):
            x, pending = carry
            ...
            out, pending = op.step(query, key, value, pending.layer(layer), mask=Causal())
            return (x, pending), None

        (x, pending), _ = jax.lax.scan(block, (x, cache.pending(T)), jnp.arange(L))
        cache = pending.cache

    ``op(query, pending.layer(layer))`` attends to a layer that is written, by the queries of the same tokens.

    Attributes:
        cache: the cache with its lengths after the append. Its arrays lack the tokens of layers that are not written.
        count: the tokens of each row, int32 [B]: also those that do not fit.
        size: how many of them fit, int32 [B].
        starts: for packed rows, the index of each row's first token among the T, int32 [B]; else None.
        rows: the packed rows; None for a batch.
        index: the layer of the next step, int32 []; None in between, and without a layer axis.
        T: the tokens per row, or of all packed rows; static.
    """

    cache: PendingCache
    count: jax.Array
    size: jax.Array
    starts: jax.Array | None
    rows: Rows | None
    index: ArrayLike | None = None
    T: int = dataclasses.field(default=1, metadata={"static": True})

    step = step_pending

    def layer(self, layer: ArrayLike) -> Self:
        """This append, of whose layers the next call writes or reads the one of this number, which may be traced.

        Raises:
            ValueError: the cache has no layer axis, or a known layer is not in it.
        """
        check_layer(layer, self.cache.layers)
        return dataclasses.replace(self, index=layer)

    @property
    def one(self) -> PendingCache:
        """The layer ``index`` of ``cache``, or ``cache`` if it has no layer axis."""
        cache: Any = self.cache
        return cache if self.index is None else cache.layer(self.index)  # type: ignore[no-any-return]

    def bind(self, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
        """See `attnops.Source.bind`: a call over the layer, by the queries of its new tokens."""
        length = length_of(operation, query)
        if length not in (None, self.T):
            raise ValueError(
                f"query has length {length}, but key has length {self.T}: they must be equal, since a step is of the "
                f"queries of the tokens that it appends; else append them, and call op(query, cache)"
            )
        before = self.cache.lengths - self.size
        queries = {"rows": self.rows} if self.rows is not None else {"query_lengths": self.count}
        return self.one.bind(operation, query, {**options, **queries, "_lengths": before + self.count})

    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        """See `attnops.Source.run`: `bind` binds the layer, which runs its calls."""
        raise NotImplementedError("a Pending binds calls over a cache, which runs them")

    def write(self, key: ArrayLike, value: ArrayLike | None = None) -> Self:
        """This append with key and value of one layer written, see `Cache.append`, without attention.

        Raises:
            ValueError: another shape or dtype; of several layers, none was chosen by `layer`.
        """
        return self.written(self.one.with_tokens(self.given(key, value)))

    def given(self, key: ArrayLike, value: ArrayLike | None) -> GivenTokens:
        """Tokens of one layer, checked."""
        self.one.check_layer()
        keys, values = self.cache.tokens(key, value, self.rows)
        if keys.shape[1] != self.T:
            raise ValueError(f"key has length {keys.shape[1]}, but the append is pending for T={self.T}")
        return GivenTokens(self.size, self.starts, keys, values)

    def written(self, one: PendingCache) -> Self:
        """This append after its layer became ``one``."""
        cache, changed = cast("Any", self.cache), cast("Any", one)
        cache = cache.with_blocks(changed.store._blocks()) if one.is_stored else one
        return dataclasses.replace(self, cache=cache, index=None)
