"""Masks and biases of problems over a cache, and what they mean: functions of rows, heads, queries and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from attnops.biases import ALiBi, RelativePosition, ScoreFn
from attnops.masks import (
    Ancestors,
    Causal,
    Chunked,
    Dense,
    KeyPadding,
    Lengths,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from attnops_testing import oracle

Array = np.ndarray[Any, Any]

# A function of b, h, a query's index in the call, its position, and the keys' positions: for a mask, whether the query
# sees each key; for a bias, the number that is added to each score.
Meaning = Callable[[int, int, int, int, Array], Any]


@dataclasses.dataclass(frozen=True)
class ScoreCase:
    """A mask or a bias as the caller gives it, and its meaning.

    Attributes:
        given: the mask or bias for queries in a batch [B, T].
        meaning: ``meaning(b, h, i, q, positions)`` for query i of row b, at position q.
        packed: if packed rows need another mask or bias, with arrays by query in packed order: a function that makes
            it, from a function that packs an array.
    """

    given: Any
    meaning: Meaning
    packed: Callable[[Callable[[Array], Array]], Any] | None = None


def mask_case(name: str, rng: np.random.Generator, B: int, H: int, T: int, S: int) -> ScoreCase:
    """The mask of a problem. A row has ``S`` slots, and arrays by key have S positions."""
    # Windows, chunks and prefixes differ so much between batches and heads that a mix-up shows.
    left_of_row, left_of_head = rng.permutation(B) * 5 + 1, rng.permutation(H) * 4
    ids, ids_of_queries = rng.integers(0, 2, (B, S)), rng.integers(0, 2, (B, T))
    tokens, dense = rng.random((B, S)) < 0.7, rng.random((B, H, T, S)) < 0.6
    counts = rng.permutation(B) * 8 + 5
    parents = np.array([[-1, *(rng.integers(-1, i) for i in range(1, T))] for _ in range(B)])

    def window(left: int) -> Meaning:
        return lambda b, h, i, q, k: (q - left <= k) & (k <= q)

    def is_ancestor(b: int, i: int, j: int) -> bool:
        while i > j:
            i = parents[b, i]
        return i == j

    def tree(b: int, h: int, i: int, q: int, k: Array) -> Array:
        first = q - i
        return np.array([j < first or (j < first + T and is_ancestor(b, i, j - first)) for j in k])

    simple: dict[str, tuple[Any, Meaning]] = {
        "Causal": (Causal(), lambda b, h, i, q, k: k <= q),
        "SlidingWindow": (SlidingWindow(2, 1), lambda b, h, i, q, k: (q - 2 <= k) & (k <= q + 1)),
        "window per batch": (
            SlidingWindow(left_of_row[:, None], 0),
            lambda b, h, i, q, k: window(int(left_of_row[b]))(b, h, i, q, k),
        ),
        "window per head": (
            SlidingWindow(left_of_head[None], 0),
            lambda b, h, i, q, k: window(int(left_of_head[h]))(b, h, i, q, k),
        ),
        "Chunked": (Chunked(3), lambda b, h, i, q, k: q // 3 == k // 3),
        "PrefixLM": (PrefixLM(2), lambda b, h, i, q, k: (k < 2) | (k <= q)),
        "Lengths": (Lengths(counts), lambda b, h, i, q, k: k < counts[b]),
        "KeyPadding": (KeyPadding(tokens), lambda b, h, i, q, k: tokens[b, k]),
        "MaskFn": (
            MaskFn(lambda b, h, q, kv: (2 * q + kv + h + b) % 3 != 0),
            lambda b, h, i, q, k: (2 * q + k + h + b) % 3 != 0,
        ),
        "mask & mask": (
            Causal() & Chunked(3) & Lengths(counts),
            lambda b, h, i, q, k: (k <= q) & (q // 3 == k // 3) & (k < counts[b]),
        ),
        "mask | mask": (
            SlidingWindow(1, 0) | PrefixLM(1),
            lambda b, h, i, q, k: ((q - 1 <= k) & (k <= q)) | (k < 1) | (k <= q),
        ),
        "~mask": (~SlidingWindow(1, 0), lambda b, h, i, q, k: ~((q - 1 <= k) & (k <= q))),
        "Ancestors": (Ancestors(parents), tree),
    }
    if name == "Segments":
        return ScoreCase(
            Segments(ids_of_queries, ids),
            lambda b, h, i, q, k: ids[b, k] == ids_of_queries[b, i],
            lambda pack: Segments(pack(ids_of_queries[:, None, :, None])[:, 0, :, 0], ids),
        )
    if name == "Dense":
        return ScoreCase(Dense(dense), lambda b, h, i, q, k: dense[b, h, i, k], lambda pack: Dense(pack(dense)))
    return ScoreCase(*simple[name])


_BUCKETS: Final = 8, 16  # RelativePosition's number of buckets and largest distance


def bias_case(name: str, rng: np.random.Generator, B: int, H: int, T: int, S: int) -> ScoreCase:
    """The bias of a problem. A row has ``S`` slots, and arrays by key have S positions."""
    slopes, table = rng.uniform(0.2, 0.6, H).astype(np.float32), rng.normal(size=(_BUCKETS[0], H)).astype(np.float32)
    array = rng.normal(size=(B, 1, T, S)).astype(np.float32)
    if name == "ALiBi":
        return ScoreCase(ALiBi(slopes), lambda b, h, i, q, k: -np.float64(slopes[h]) * np.abs(k - q))
    if name == "RelativePosition":
        n = 64
        buckets = oracle.relative_position_buckets(_BUCKETS[0], n, n, True, _BUCKETS[1])
        return ScoreCase(RelativePosition(table, max_distance=_BUCKETS[1]),
                    lambda b, h, i, q, k: np.float64(table[buckets[q, k], h]))  # fmt: skip
    if name == "ScoreFn":
        return ScoreCase(
            # Exact in float32: the oracle's bias is not rounded.
            ScoreFn(lambda scores, b, h, q, kv: scores + 0.03125 * ((b + 1) * (h + 1) * ((3 * q + 5 * kv) % 7))),
            lambda b, h, i, q, k: 0.03125 * ((b + 1) * (h + 1) * ((3 * q + 5 * k) % 7)),
        )
    return ScoreCase(array, lambda b, h, i, q, k: np.float64(array[b, 0, i, k]), lambda pack: pack(array))
