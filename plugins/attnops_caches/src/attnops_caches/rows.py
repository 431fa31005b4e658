"""Rows: ragged rows of a serving batch, packed one after the other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from attnops.exported import serialised
from attnops_caches.integers import int32

if TYPE_CHECKING:
    from attnops.typing import Leaf


@serialised()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Which of N packed queries belong to which row of a cache: prompts and single tokens mixed.

    Queries ``starts[r] … starts[r + 1] − 1`` are the last tokens of the cache's row ``slots[r]``; queries before
    ``starts[0]`` and from ``starts[R]`` on are padding.

    Attributes:
        starts: integers [R + 1], not decreasing.
        slots: the row of the cache of each run, integers [R], different from each other; any for an empty run. If they
            are not known when tracing, queries are padding whose slot is no row, or the row of a run before.
    """

    starts: Leaf
    slots: Leaf

    def __post_init__(self) -> None:
        for name in ("starts", "slots"):  # each element of a list would be an argument of `jax.jit`
            if isinstance(value := getattr(self, name), (list, tuple)):
                object.__setattr__(self, name, np.asarray(value))

    def counts(self, N: int, batch: int) -> jax.Array:
        """How many of N tokens each run has, int32 [R]; 0 where its row is not one of the cache's."""
        bounds, slots = jnp.clip(jnp.asarray(self.starts), 0, N), jnp.asarray(self.slots)
        return jnp.where((slots >= 0) & (slots < batch), jnp.maximum(bounds[1:] - bounds[:-1], 0), 0)

    def first_counts(self, N: int, batch: int) -> jax.Array:
        """`counts`, and 0 for a run whose row has another run of some tokens before it."""
        counts, slots = self.counts(N, batch), jnp.asarray(self.slots)
        same = (slots[:, None] == slots[None, :]) & (counts > 0)[None, :]
        return jnp.where(jnp.tril(same, -1).any(axis=1), 0, counts)

    def of_queries(self, N: int, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cache's row of each of N queries, and its index in that row; int32 [N], −1 for padding.

        Args:
            N: packed queries.
            lengths: the lengths of the cache's rows, these queries included, int32 [B].
        """
        place = jnp.arange(N, dtype=jnp.int32)
        starts, slots = jnp.clip(jnp.asarray(self.starts), 0, N), jnp.asarray(self.slots)
        # The iterations of a binary search would each need as long as all comparisons.
        run = jnp.searchsorted(starts, place, side="right", method="compare_all").astype(jnp.int32) - 1
        is_real = (run >= 0) & (run < slots.shape[0])
        run = jnp.clip(run, 0, slots.shape[0] - 1)
        is_real &= self.first_counts(N, lengths.shape[0])[run] > 0
        row = jnp.clip(slots[run], 0, lengths.shape[0] - 1)
        index = lengths[row] - (starts[run + 1] - place)
        return jnp.where(is_real, row, -1), jnp.where(is_real, index, -1)


def check_rows(rows: object, N: int, batch: int) -> Rows:
    """The rows of N packed queries or tokens, and of a cache of ``batch`` rows, as int32 arrays.

    Raises:
        ValueError: no `Rows`; another shape or dtype; known runs that overlap, or that queries or cache do not hold.
    """
    if not isinstance(rows, Rows):
        raise ValueError(f"rows is a {type(rows).__name__}, but must be an attnops_caches.Rows(starts, slots)")
    starts, slots = (x if hasattr(x, "dtype") else np.asarray(x) for x in (rows.starts, rows.slots))
    for name, x in (("starts", starts), ("slots", slots)):
        if (np.dtype(x.dtype).kind not in "iu" and x.size) or x.ndim != 1:
            raise ValueError(f"Rows' {name} is {x.dtype} {tuple(x.shape)}, but must be integers of rank 1")
    if starts.shape[0] != slots.shape[0] + 1:
        raise ValueError(f"Rows has {starts.shape[0]} starts and {slots.shape[0]} slots, but must have one more start")
    if not slots.shape[0]:
        raise ValueError("Rows has 0 slots, but must have at least 1; its run may be empty: Rows([0, 0], [0])")
    if isinstance(starts, np.ndarray):
        bounds = starts.astype(np.int64)
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > N:
            raise ValueError(
                f"Rows' starts={bounds.tolist()} must not decrease, from 0 at least to the {N} queries at most"
            )
        if isinstance(slots, np.ndarray):
            used = slots.astype(np.int64)[np.diff(bounds) > 0].tolist()
            if len(set(used)) != len(used):
                raise ValueError(
                    f"Rows' slots={used} overlap: each row of the cache may have one run of queries; join its runs"
                )
            if used and (min(used) < 0 or max(used) >= batch):
                raise ValueError(f"Rows' slots={used} must be rows of the cache, 0 to {batch - 1}")
    return Rows(int32(starts), int32(slots))
