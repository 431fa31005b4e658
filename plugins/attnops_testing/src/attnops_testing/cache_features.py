"""Features of calls over a cache, each a change of a small problem; and rows, which combine one feature of each
group.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

from attnops_testing.cache_codec import Codec

PAGE: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The description of a problem over a cache; the defaults are the plain problem.

    Attributes:
        storage: "dense", "ring" or "paged".
        codec: how tokens are quantised; None: they are not.
        content: "equal" (D = Dv), "Dv" (D ≠ Dv), "joined" (a token's keys and values in one array, with padding between
            them) or "latent" (with padding).
        dtype: None for the one that fits the operation.
        mask, bias: names of a mask and of a bias, of which `attnops_testing.cache_masks` makes the arrays.
        T: queries per row.
        rows: "full", "ragged" or "packed".
        starts: whether rows begin with left padding.
        kv_heads: K, a divisor of the 4 query heads.
        sinks, softmax_scale, logits_soft_cap, return_lse: options of the call.
        return_max_logits: an option too; no feature of a row, since kernels that read caches in place refuse it.
        step: whether the call appends the queries' tokens too.
    """

    storage: str = "dense"
    codec: Codec | None = None
    content: str = "equal"
    dtype: str | None = None
    mask: str | None = None
    bias: str | None = None
    T: int = 1
    rows: str = "full"
    starts: bool = False
    kv_heads: int = 4
    sinks: bool = False
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    return_lse: bool = False
    return_max_logits: bool = False
    step: bool = False


@dataclasses.dataclass(frozen=True)
class CacheFeature:
    """A change of the plain problem. Features of one group exclude each other."""

    group: str
    changes: dict[str, Any]


def _features() -> Iterator[tuple[str, CacheFeature]]:
    def group(name: str, **values: dict[str, Any]) -> Iterator[tuple[str, CacheFeature]]:
        for key, changes in values.items():
            yield key, CacheFeature(name, changes)

    masks = ("Causal", "SlidingWindow", "window per batch", "window per head", "Chunked", "PrefixLM", "Segments",
             "Lengths", "KeyPadding", "Dense", "MaskFn", "mask & mask", "mask | mask", "~mask",
             "Ancestors")  # fmt: skip
    yield from group("mask", **{name: {"mask": name} for name in masks})
    codecs = itertools.product(("int8", "float8_e4m3fn", "float8_e5m2", "int4"), ("token_head", "head", "tensor"))
    yield from group("codec", **{f"{dtype} by {by}": {"codec": Codec(dtype, by)} for dtype, by in codecs})
    lengths = {f"{T} queries": {"T": T} for T in (3, PAGE, PAGE + 1, 19)}
    yield from group("length", **lengths)
    yield from group("storage", ring={"storage": "ring"}, paged={"storage": "paged"})
    yield from group("rows", query_lengths={"rows": "ragged"}, **{"packed rows": {"rows": "packed"}})
    biases = ("ALiBi", "RelativePosition", "ScoreFn", "array bias")
    yield from group("bias", **{name: {"bias": name} for name in biases})
    yield from group(
        "content", **{"D ≠ Dv": {"content": "Dv"}, "joined": {"content": "joined"}, "latent": {"content": "latent"}}
    )  # fmt: skip
    yield from group("heads", GQA={"kv_heads": 2}, MQA={"kv_heads": 1})
    yield from group("dtype", bfloat16={"dtype": "bfloat16"}, float16={"dtype": "float16"})
    yield from group("padding", **{"left padding": {"starts": True}})
    yield from group("how", **{"op.step": {"step": True}})
    yield from group("sinks", sinks={"sinks": True})
    yield from group("scale", softmax_scale={"softmax_scale": 0.7})
    yield from group("cap", **{"soft cap": {"logits_soft_cap": 0.5}})
    yield from group("logsumexp", logsumexp={"return_lse": True})


# By name. A page has 4 slots, so that "3 queries" are one less than a page.
CACHE_FEATURES: Final[dict[str, CacheFeature]] = dict(_features())

# Not for rings: positions in a ring have no limit, so that an array by key can't cover them.
_BY_KEY: Final = frozenset({"Segments", "KeyPadding", "Dense", "array bias"})


def combine_cache(names: Iterable[str]) -> CacheSpec:
    """The problem that has these features.

    Raises:
        ValueError: one is unknown, or two exclude each other.
    """
    changes: dict[str, Any] = {}
    chosen: list[str] = []
    for name in names:
        if name not in CACHE_FEATURES:
            raise ValueError(f"cache feature {name!r} is unknown; there are {', '.join(CACHE_FEATURES)}")
        for other in chosen:
            if not are_compatible(name, other):
                raise ValueError(f"{name!r} and {other!r} exclude each other")
        chosen.append(name)
        changes |= CACHE_FEATURES[name].changes
    return CacheSpec(**changes)


def are_compatible(a: str, b: str) -> bool:
    """Whether one problem can have both features."""
    pair = {a, b}
    if CACHE_FEATURES[a].group == CACHE_FEATURES[b].group:
        return False
    if pair == {"packed rows", "Ancestors"}:  # Ancestors counts queries from each row's first
        return False
    return not ("ring" in pair and pair & _BY_KEY)


def all_cache_pairs() -> Iterator[tuple[str, str]]:
    """Every pair of features that one problem can have."""
    return (pair for pair in itertools.combinations(CACHE_FEATURES, 2) if are_compatible(*pair))


@functools.cache
def cache_rows() -> tuple[tuple[str, ...], ...]:
    """Rows in which every feature occurs at least once; as many rows as there are masks, each with one feature of every
    group.
    """
    groups: dict[str, list[str | None]] = {}
    for name, feature in CACHE_FEATURES.items():
        groups.setdefault(feature.group, [None]).append(name)
    masks = groups.pop("mask")[1:]
    used: collections.Counter[tuple[str, str | None]] = collections.Counter()
    rng, rows = random.Random(0), []
    for mask in masks:
        row = [mask]
        # Large groups first, since each of their features occurs least.
        for group, names in sorted(groups.items(), key=lambda item: -len(item[1])):
            free = [name for name in names if name is None or all(are_compatible(name, x) for x in row if x)]
            # The least used feature, with some randomness, so that groups of equal size don't always combine alike.
            best = min(free, key=lambda name: used[group, name] + rng.random() * 1.5)
            used[group, best] += 1
            row.append(best)
        rows.append(tuple(sorted((name for name in row if name), key=list(CACHE_FEATURES).index)))
    return tuple(rows)


@functools.cache
def cache_pair_rows() -> tuple[tuple[str, ...], ...]:
    """Rows that have every pair of compatible features."""
    # Greedy and deterministic: each row begins with the first missing pair, and adds the features that cover most.
    missing = dict.fromkeys(all_cache_pairs())
    order = list(CACHE_FEATURES)
    rows = []
    while missing:
        row = list(next(iter(missing)))
        while True:
            free = [name for name in order if name not in row and all(are_compatible(name, x) for x in row)]
            gains = {name: sum((a, name) in missing or (name, a) in missing for a in row) for name in free}
            best = max(gains, key=lambda name: gains[name], default=None)
            if best is None or not gains[best]:
                break
            row.append(best)
        row.sort(key=order.index)
        for names in [names for names in missing if set(names) <= set(row)]:
            missing.pop(names)
        rows.append(tuple(row))
    return tuple(rows)
