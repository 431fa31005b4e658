"""Mistakes of an attention, each of which some architecture must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from attnops.masks import And, At, Causal, Chunked, Full, KeyPadding, Mask, PrefixLM, Segments, SlidingWindow
from attnops_adapters.transformers import Attend

Options = dict[str, Any]


def faulty(attend: Attend, fault: str) -> Attend:
    """``attend`` with a mistake of `FAULTS` in its options."""
    return lambda *arrays, **options: attend(*arrays, **FAULTS[fault](options))


def _wrong_scale(options: Options) -> Options:
    return options | {"softmax_scale": 1.001 * options["softmax_scale"]}


def _without(name: str) -> Callable[[Options], Options]:
    return lambda options: {key: value for key, value in options.items() if key != name}


def _with_masks(change: Callable[[Mask], Mask]) -> Callable[[Options], Options]:
    """A change to each primitive of a mask."""

    def changed(mask: Mask) -> Mask:
        if isinstance(mask, And):
            return changed(mask.left) & changed(mask.right)
        if isinstance(mask, At):
            inner = changed(mask.mask)
            return inner if isinstance(inner, Full) else dataclasses.replace(mask, mask=inner)
        return change(mask)

    return lambda options: options | {"mask": changed(options["mask"])}


def _as_full(kind: type[Mask]) -> Callable[[Options], Options]:
    return _with_masks(lambda mask: Full() if isinstance(mask, kind) else mask)


def _wider(mask: Mask) -> Mask:
    return dataclasses.replace(mask, left=mask.left + 1) if isinstance(mask, SlidingWindow) else mask


def _larger(mask: Mask) -> Mask:
    return dataclasses.replace(mask, size=mask.size + 1) if isinstance(mask, Chunked) else mask


def _shorter(mask: Mask) -> Mask:
    return dataclasses.replace(mask, length=mask.length - 1) if isinstance(mask, PrefixLM) else mask


FAULTS: dict[str, Callable[[Options], Options]] = {
    "scale": _wrong_scale,
    "cap": _without("logits_soft_cap"),
    "sinks": _without("sinks"),
    "bias": _without("bias"),
    "window": _with_masks(_wider),
    "chunks": _with_masks(_larger),
    "prefix": _with_masks(_shorter),
    "padding": _as_full(KeyPadding),
    "causal": _as_full(Causal),
    "segments": _as_full(Segments),
}
