"""Pages that rows of a batch share, attended to once for all of them: cascade attention (Ye et al. 2024,
https://flashinfer.ai/2024/02/02/cascade-inference.html; Juravsky et al. 2024, arXiv:2402.05099).

A tile of shared pages is loaded once, and multiplied with the queries of all rows; each row attends to its other pages
by itself, and the two partial softmaxes are merged. Which pages are shared is found when the program runs, from the
table: one number is one page, so that one program serves all tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from attnops.errors import Reason
from attnops.masks.base import Mask
from attnops.masks.blocks import block_map
from attnops.operations.flash.forward import LoadKeyValue, forward
from attnops.operations.flash.operands import NativeArrays
from attnops.operations.flash.plan import Index, NativePlan, NativeTileIndex, quotient_and_remainder
from attnops.operations.flash.tile_schedule import tile_schedule
from attnops.operations.flash.tile_sizes import WIDE, choose_problems_per_tile
from attnops.softmax import PartialSoftmax, merge, with_sinks
from attnops_caches.flash.whole import Results, if_finite
from attnops_caches.masks.slots import Held, Slots, mapped, without_table
from attnops_caches.tiles import StoreLoader

# Loads tiles for a plan.
Loads: TypeAlias = Callable[[NativePlan, StoreLoader], LoadKeyValue]

# Up to so many queries of a row, keys take longer to read than to multiply with.
_MOST_QUERIES: Final = 16
# Rows of fewer slots are not worth a look, 3 to 6 % of a call that shares nothing, nor some 2 s to compile both parts.
_LEAST_SLOTS: Final = 1024
# So many slots fewer must be read.
_LEAST_SAVED: Final = 1024
# Multiplying a tile with the queries of so many rows takes as long as loading it once more.
_ROWS_OF_A_LOAD: Final = 4
# Keys per tile of shared pages, and of a row's own, of which few are not shared.
_KEYS: Final = 512
_OWN_KEYS: Final = 128


class Shared(NamedTuple):
    """The pages that rows share with one of them, the leader, where sharing saves time."""

    leader: jax.Array  # the row, int32 []
    pages: jax.Array  # which pages of each row are the leader's, bool [B, M]
    saved: jax.Array  # slots that are not loaded again, less those that as much multiplication costs, int32 []


def shared_pages(table: jax.Array, slots: Slots, seen: jax.Array) -> Shared:
    """The shared pages of a table, int32 [B, M], among those that are ``seen``, bool [B, M]; O(B · (B · log M + M))."""
    B, M = table.shape
    used = seen & jnp.asarray(slots.exists) & (np.arange(M) * slots.page_size < jnp.asarray(slots.stop)[:, None])
    # Columns 0, 1, 3, 7, … stand for those up to the next: what rows share begins with their first pages.
    columns = np.minimum(2 ** np.arange(M.bit_length()) - 1, M - 1)
    page = jnp.where(used, table, -1)[:, columns]
    equal = (page[:, None] == page) & (page >= 0)
    leader = (equal.sum(1, dtype=jnp.int32) * np.diff(columns, append=M).astype(np.int32)).sum(1).argmax()
    pages = used & used[leader] & (table == table[leader])
    gain = pages.sum(0, dtype=jnp.int32) - 1 - B // _ROWS_OF_A_LOAD
    return Shared(leader, pages & (gain > 0), jnp.maximum(gain, 0).sum() * slots.page_size)


@dataclasses.dataclass(frozen=True)
class TogetherPlan(NativePlan):
    """The plan of a batch of one row, which has the queries of all rows, row after row.

    Attributes:
        rows: how many rows there are.
    """

    rows: int = 1

    def tile_index(self, group: Index, q_tile: Index, kv_tile: Index, transposed: bool) -> NativeTileIndex:
        return by_row(super().tile_index(group, q_tile, kv_tile, transposed), self.rows, self.T // self.rows)


def by_row(index: NativeTileIndex, rows: int, T: int) -> NativeTileIndex:
    """The indices of a tile, with the row and the query in it of queries that are counted through all rows."""
    row, q = quotient_and_remainder(index.q, T)
    return index._replace(b=jnp.minimum(row, rows - 1), q=jnp.asarray(q))


def serves(plan: NativePlan, loader: StoreLoader, mask: Mask | None) -> bool:
    """Whether rows of a call may share pages so that it saves time; static."""
    has_pages = mask is not None and without_table(mask)[1] is not None
    return loader.table is not None and has_pages and not reasons(plan.B, plan.T, plan.S)


def reasons(B: int, T: int, S: int) -> list[Reason]:
    """Why B rows of S slots with T queries each do not attend to shared pages together."""
    most, least = f"must be at most {_MOST_QUERIES} tokens a row", f"must be at least {_LEAST_SLOTS} slots a row"
    rules = (
        ("batch", B, isinstance(B, int) and B > 1, "must be at least 2, and known when tracing"),
        ("query", T, T <= _MOST_QUERIES, f"{most}: keys of more take longer to multiply with than to read"),
        ("cache.length", S, S >= _LEAST_SLOTS, f"{least} to save time"),
    )
    return [Reason(name, value, rule) for name, value, holds, rule in rules if not holds]


def attend_or(
    plan: NativePlan, query: jax.Array, loader: StoreLoader, arrays: NativeArrays, load: Loads,
    in_tiles: Callable[[], Results],
) -> Results:  # fmt: skip
    """`attend` where rows share enough pages and its output is finite, else what ``in_tiles`` computes.

    A value that is not finite, in a slot that only some of the rows see, must not reach the others, and 0 · NaN is NaN.
    """
    assert loader.table is not None and arrays.mask is not None  # noqa: PT018
    slots, M = without_table(arrays.mask)[1], loader.table.shape[1]
    assert slots is not None
    seen = _active((plan.B, plan.H, plan.T, plan.S), arrays.mask, plan.bk)
    shared = shared_pages(loader.table, slots, jnp.repeat(seen, plan.bk // loader.unit, 1)[:, :M])
    saves = shared.saved >= _LEAST_SAVED
    return if_finite(plan, query, saves, lambda: attend(plan, query, loader, arrays, load, shared), in_tiles)


def attend(
    plan: NativePlan, query: jax.Array, loader: StoreLoader, arrays: NativeArrays, load: Loads, shared: Shared
) -> Results:
    """Attention in two parts; see `attnops.operations.flash.forward.forward`."""
    assert loader.table is not None
    B, T, H, leader = plan.B, plan.T, plan.H, loader.table[shared.leader][None]

    def part(plan: NativePlan, query: jax.Array, loader: StoreLoader, pages: jax.Array) -> PartialSoftmax:
        mask = _over(arrays.mask, pages)
        rows = plan.bq // T * plan.nq
        active = jnp.pad(_active((B, H, T, plan.S), mask, plan.bk), ((0, plan.B * rows - B), (0, 0)))
        active = active.reshape(plan.B, plan.nq, -1, plan.nk).any(2)
        # All of them PARTIAL: a second loop, without masks, takes longer to compile than it saves.
        schedule = dataclasses.replace(tile_schedule(active.astype("int8")), any_full=False)
        out, *statistics = forward(plan, query, load(plan, loader), arrays._replace(mask=mask, sinks=None), schedule)
        by_row = (x if plan.B == B else x.reshape(H, B, T).swapaxes(0, 1) for x in statistics)
        return PartialSoftmax(out.reshape(B, T, H, plan.Dv), *by_row)

    # Tiles of as many rows as `WIDE` has room for.
    of_all: NativePlan = TogetherPlan(**vars(plan) | {"B": 1, "T": B * T, "rows": B})
    of_all = _with_tiles(of_all, max(1, min(B, WIDE.rows // (plan.G * T))) * T, _KEYS, loader.unit)
    both = merge(
        part(of_all, query.reshape(1, B * T, H, plan.D), dataclasses.replace(loader, table=leader), shared.pages),
        part(_with_tiles(plan, T, _OWN_KEYS, loader.unit), query, loader, ~shared.pages),
    )
    if arrays.sinks is not None:
        both = with_sinks(both, arrays.sinks[0])
    highest = [] if both.max_logits is None else [both.max_logits]
    return both.out.astype(query.dtype), both.lse, both.lse_residual, *highest


def _active(scores: tuple[int, int, int, int], mask: Mask | None, keys: int) -> jax.Array:
    """Which tiles of so many keys some query of a row may see, bool [B, tiles]."""
    active = (block_map(mask, scores, scores[2], keys).coverage > 0).any((1, 2))
    return jnp.broadcast_to(active, (scores[0], active.shape[1]))


def _over(mask: Mask | None, pages: jax.Array) -> Mask:
    """A mask by slot of these pages alone, bool [B, M]."""
    assert mask is not None

    def over(x: Mask) -> Mask:
        if not isinstance(x, Held):
            return x
        return Held(x.q_positions, dataclasses.replace(x.slots, exists=jnp.asarray(x.slots.exists) & pages))

    return mapped(mask, over)


def _with_tiles(plan: NativePlan, bq: int, keys: int, unit: int) -> NativePlan:
    """The plan of a partial softmax with these tiles, and a list of active ones for each batch."""
    bk = max(1, min(keys, plan.bk) // unit) * unit
    problems = choose_problems_per_tile(plan.B, plan.K, plan.G * bq * bk, True, False, False)
    return dataclasses.replace(plan, bq=bq, bk=bk, problems_per_tile=problems, map_shape=(plan.B, 1), is_partial=True)
