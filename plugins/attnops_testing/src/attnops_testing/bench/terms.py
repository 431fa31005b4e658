"""A mask in the terms of other libraries: causal, a window, documents, and the rest."""

from __future__ import annotations

import dataclasses
import functools

from attnops.masks import And, Causal, Full, Mask, Segments, SlidingWindow
from attnops_testing.bench.case import Case


@dataclasses.dataclass(frozen=True)
class Terms:
    """A mask as a conjunction of the masks for which peers have arguments.

    Attributes:
        causal: no query sees a key after it. With T = S top-left and bottom-right alignment are the same.
        window: the number of keys before and after each query's position, without the key at that position.
        segments: segment ids.
        rest: the mask for which peers have no argument, to be passed as an array.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    segments: Segments | None = None
    rest: Mask | None = None


def terms_of(case: Case) -> Terms:
    """The terms of a case's mask."""
    terms = Terms()
    parts = [] if case.mask is None else [case.mask]
    while parts:
        part = parts.pop()
        match part:
            case And(left, right):
                parts += [right, left]
            case Full():
                pass
            case Causal(offset=None | 0):
                terms = dataclasses.replace(terms, causal=True)
            case SlidingWindow(int() | None, int() | None, offset=None | 0) if terms.window is None:
                before, after = (case.length if side is None else side for side in (part.left, part.right))
                terms = dataclasses.replace(terms, window=(before, after))
            case Segments(kv_ids=None) if terms.segments is None:
                terms = dataclasses.replace(terms, segments=part)
            case _:
                terms = dataclasses.replace(terms, rest=part if terms.rest is None else terms.rest & part)
    return terms


def all_of(*masks: Mask | None) -> Mask | None:
    """What all of these masks show; None if there is none."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(And, given) if given else None
