"""Combinations of features: rows with each feature once, pairs with each feature, rows that cover all pairs."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from attnops_testing.feature_masks import TRACED_MASKS
from attnops_testing.features import FEATURES, combine
from attnops_testing.fit import Fit

# The most features in one problem, so that each still has an effect.
ROW: Final = 5

# Pairs that were wrong in kernels although each feature alone was right; they are in every sample.
ALWAYS: Final = (
    ("GQA", "Segments"), ("D ≠ Dv", "sinks"), ("SlidingWindow", "logsumexp"), ("T < S", "Causal"),
    ("sinks", "max logits"),
)  # fmt: skip

# Features that have an effect only together with another: a float32 bias is special only with other dtypes.
COMPANIONS: Final = {"bfloat16": "float32 bias"}

# Features with scores so far apart that features of the groups `SCORE_GROUPS` hardly change the result.
EXTREME: Final = frozenset({"rising bias", "bias near finfo.min", "large logits"})
SCORE_GROUPS: Final = frozenset({"bias", "scale", "logits", "cap", "sinks"})
# Large logits at large head dims: XLA's CPU backend sums small products sequentially, so that its float32 error exceeds
# numpy's, on which the tolerance is based (4.4 instead of 1.8 ulp of the largest element, at 24 × 24 × 256, JAX 0.12).
INEXACT: Final = {"large logits": frozenset({"head_dim 256", "head dims 576/512"})}


def joined(names: Sequence[str]) -> str:
    """The name of a combination of features."""
    return " + ".join(names) or "plain"


def changing(fit: Fit | None = None) -> tuple[str, ...]:
    """The features that change the plain problem of this fit."""
    plain = combine([], fit=fit)
    return tuple(name for name in FEATURES if combine([name], fit=fit) != plain)


def proven_pairs(row: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs that a problem with all features of the row tests."""
    trivial = {name for name in row if FEATURES[name].trivial}
    return [pair for pair in itertools.combinations(row, 2) if not trivial or trivial & set(pair)]


def all_pairs(names: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
    """Every pair of features of different groups.

    Args:
        names: the features, in the order of `FEATURES`; None for all that change the default problem.
    """
    for a, b in itertools.combinations(changing() if names is None else names, 2):
        if FEATURES[a].group != FEATURES[b].group:
            yield a, b


@functools.cache
def rows_of_each() -> tuple[tuple[str, ...], ...]:
    """Combinations in which every feature occurs once: as few as the largest group allows, and of about equal cost.

    A row has at most two masks, joined by ``&``, each of which hides keys that the other shows. Features that make
    others trivial are alone in their row.
    """
    order = list(FEATURES)
    sizes = collections.Counter(feature.group for feature in FEATURES.values())
    sizes["mask"] = -(-sizes["mask"] // 2)
    rows: list[list[str]] = [[] for _ in range(max(sizes.values()))]
    # The largest group first; of the others, the costliest first.
    for name in sorted(changing(), key=lambda name: (-sizes[FEATURES[name].group], -FEATURES[name].cost)):
        if FEATURES[name].trivial:
            rows.append([name])
            continue
        with_companion = [row for row in rows if COMPANIONS.get(name) in row]
        free = (row for row in with_companion or rows if _combine([*row, name]))
        row = min(free, key=lambda row: sum(FEATURES[other].cost for other in row), default=None)
        if row is None:
            rows.append(row := [])
        row.append(name)
    return tuple(tuple(sorted(row, key=order.index)) for row in rows)


def _combine(row: Sequence[str]) -> bool:
    """Whether one problem can have all these features, the last being new, so that each still has an effect."""
    *others, new = (FEATURES[name] for name in row)
    groups = collections.Counter(feature.group for feature in others)
    masks = [feature for feature in (*others, new) if feature.group == "mask"]
    if (
        new.trivial
        or any(feature.trivial for feature in others)
        or groups[new.group] >= (2 if new.group == "mask" else 1)
    ):
        return False
    # Masks that are joined must both have arrays that are arguments of the program, or both not.
    if len({feature.name in TRACED_MASKS for feature in masks}) > 1:
        return False
    if any(x.name in EXTREME and y.group in SCORE_GROUPS for other in others for x, y in ((other, new), (new, other))):
        return False
    names = set(row)
    if any(name in names and not many.isdisjoint(names) for name, many in INEXACT.items()):
        return False
    if new.group not in ("mask", "padding"):
        return True
    # No mask may hide everything that the others hide.
    shape = 2, 2, 24, 24
    seen = [
        np.broadcast_to(feature.changes[feature.group](*shape).visible, shape)
        for feature in (*others, new)
        if feature.group in ("mask", "padding")
    ]
    without = [np.logical_and.reduce([x for x in seen if x is not one] or [np.ones(shape, bool)]) for one in seen]
    return bool(
        np.logical_and.reduce(seen).any() and all((x & ~one).any() for x, one in zip(without, seen, strict=True))
    )


def sampled_pairs() -> list[tuple[str, str]]:
    """Pairs in which each feature occurs that can be combined with another.

    The first are `ALWAYS`; each other feature is paired with one as far away in the table as possible.
    """
    names = changing()
    pairs = list(ALWAYS)
    left = [name for name in names if not any(name in pair for pair in pairs)]
    half = len(left) // 2
    first, second = left[:half], left[half:]
    for i, name in enumerate(first):
        partners = (second[(i + shift) % len(second)] for shift in range(len(second)))
        used = {partner for _, partner in pairs}
        free = [p for p in partners if FEATURES[p].group != FEATURES[name].group]
        if partner := next((p for p in free if p not in used), None):
            pairs.append((name, partner))
    paired = {name for pair in pairs for name in pair}
    for name in names:
        if name not in paired:
            others = (p for p in names if FEATURES[p].group != FEATURES[name].group)
            if partner := next(others, None):
                a, b = sorted((name, partner), key=list(FEATURES).index)
                pairs.append((a, b))
    return list(dict.fromkeys(pairs))


@functools.cache
def covering_rows() -> tuple[tuple[str, ...], ...]:
    """Combinations of at most `ROW` features that together test every pair.

    Greedy all-pairs testing (Cohen et al. 1997, "The AETG system"). Deterministic.
    """
    missing, changes = dict.fromkeys(all_pairs()), changing()
    order = {name: i for i, name in enumerate(FEATURES)}
    rows = []
    while missing:
        row = list(next(iter(missing)))
        while len(row) < ROW:
            groups = {FEATURES[name].group for name in row}
            gains = {name: _gain(row, name, missing, order) for name in changes if FEATURES[name].group not in groups}
            best = max(gains, key=lambda name: gains[name], default=None)
            if best is None or not gains[best]:
                break
            row.append(best)
        row.sort(key=order.__getitem__)
        for pair in proven_pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(row))
    return tuple(rows)


def _gain(row: Sequence[str], feature: str, missing: dict[tuple[str, str], None], order: dict[str, int]) -> int:
    """The number of missing pairs that the row tests with the feature and not without it."""
    if FEATURES[feature].trivial:
        return 0  # the feature would make pairs of the others untested
    trivial = [name for name in row if FEATURES[name].trivial]
    partners = trivial or row
    return sum(tuple(sorted((name, feature), key=order.__getitem__)) in missing for name in partners)
