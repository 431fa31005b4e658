"""WindowCache: a ring of the last tokens of each sequence."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attnops.exported import serialised
from attnops.masks.base import Mask
from attnops.masks.positions import SlidingWindow
from attnops_caches.dense import RowCache
from attnops_caches.integers import at_rows, check_size
from attnops_caches.layout import TokenOptions
from attnops_caches.masks.slots import Slots
from attnops_caches.placement import PLACEMENT
from attnops_caches.rows import Rows
from attnops_caches.store import Pieces, create_store
from attnops_caches.stored import create_rows

if TYPE_CHECKING:
    from jax.typing import ArrayLike


@serialised(placement=PLACEMENT)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowCache(RowCache):
    """A ring of R slots for each sequence; the token of index i is in slot i mod R. See `Cache`.

    A query sees the last ``window`` tokens, itself included: the window belongs to every call over this cache, as if
    ``mask & SlidingWindow(window - 1, None)`` were given over a `DenseCache`. Masks and biases with an array by key are
    refused, since positions grow beyond the slots.

    More than ``max_append`` tokens of a row at once raise a `ValueError`; of traced packed rows, the others don't fit.

    Attributes:
        written: one more than the largest index that was ever written, int32 [B].
        window: tokens that a query sees.
        max_append: the most tokens of one append.
    """

    written: jax.Array
    window: int = dataclasses.field(metadata={"static": True})
    max_append: int = dataclasses.field(metadata={"static": True})

    by_row: ClassVar[tuple[str, ...]] = (*RowCache.by_row, "written")
    storage: ClassVar[str] = "WindowCache"
    unbounded: ClassVar[bool] = True

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        window: int,
        max_append: int = 1,
        starts: ArrayLike | None = None,
        **tokens: Unpack[TokenOptions],
    ) -> WindowCache:
        """An empty cache of R = ``window - 1 + max_append`` slots per row.

        Args:
            batch: B, the rows.
            window: tokens that a query sees, itself included.
            max_append: the most tokens that one append adds or `truncate` removes; append a longer prompt in chunks.
            starts: how many tokens of left padding each row begins with, integers [B]; None for none.
            **tokens: `TokenOptions`, what every storage is created with.

        Raises:
            ValueError: see `DenseCache.create`.
        """
        slots = check_size("window", window) - 1 + check_size("max_append", max_append)
        store = create_store(check_size("batch", batch), slots, **tokens)
        rows = create_rows(batch, starts)
        return cls(store=store, **rows, written=jnp.zeros_like(rows["lengths"]), window=window, max_append=max_append)

    def _first_new(self, lengths: jax.Array, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        return lengths % self.length, jnp.arange(self.batch, dtype=jnp.int32)[:, None]

    def check_run(self, T: int, rows: Rows | None, *, appends: bool) -> None:
        most = T if rows is None else 0
        if rows is not None and not isinstance(rows.starts, jax.Array):  # as far as it is known when tracing
            most = int(np.diff(np.asarray(rows.starts).astype(np.int64)).max(initial=0))
        if self.max_append < most:
            what, why = "tokens are appended", "more would overwrite tokens that a query still sees; append in chunks"
            if not appends:
                what = "queries of a row are given"
                why = "it no longer has all tokens that the first of them sees; call it with the queries of one append"
            raise ValueError(
                f"{most} {what} at once, but the cache was created with max_append={self.max_append}: {why}, or "
                f"create it with more"
            )

    def place(self, T: int, count: jax.Array, rows: jax.Array) -> tuple[Pieces, jax.Array]:
        R, lengths = self.length, at_rows(self.lengths, rows)
        # int32 holds no index beyond 2³¹ − 1.
        fit = jnp.clip(jnp.minimum(jnp.int32(2**31 - 1) - lengths, self.max_append), 0, count)
        slot, run, zero = lengths % R, jnp.arange(rows.shape[0], dtype=jnp.int32), jnp.zeros_like(rows)
        before = jnp.minimum(fit, R - slot)
        if T == 1:
            return Pieces(run, zero, fit, rows, slot), fit
        pieces = Pieces(run, zero, before, rows, slot), Pieces(run, before, fit - before, rows, zero)
        return Pieces(*(jnp.concatenate(x) for x in zip(*pieces, strict=True))), fit

    def advanced(self, lengths: jax.Array, overflowed: jax.Array) -> Self:
        cache = super().advanced(lengths, overflowed)
        return dataclasses.replace(cache, written=jnp.maximum(self.written, lengths))

    def truncate(self, lengths: ArrayLike) -> Self:
        """See `Cache.truncate`; sets ``overflowed`` where the ring lost tokens that the next query sees."""
        cache = super().truncate(lengths)
        kept = cache.lengths
        # If only padding is kept, the ring's tokens are of no use, and its slots are free.
        written = jnp.where(kept <= self.starts, kept, self.written)
        oldest = written - self.length  # the first index that the ring still has
        lost = (kept < self.lengths) & (oldest > jnp.maximum(kept - self.window + 1, self.starts))
        return dataclasses.replace(cache, overflowed=cache.overflowed | lost, written=written)

    def mask(self, mask: Mask | None) -> Mask | None:
        window = SlidingWindow(self.window - 1, None)
        return window if mask is None else mask & window

    def slots(self) -> Slots:
        # A slot has the largest index below `written` that falls in it.
        last = self.written - 1
        newest = last % self.length
        return self._slots(last - newest, newest)
