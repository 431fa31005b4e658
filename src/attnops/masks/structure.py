"""A mask as a band, segments and a rest, for wrappers of kernels that have parameters for these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple, Self, TypeAlias

import jax
import numpy as np

from attnops.masks.base import And, Mask, Not, Or
from attnops.masks.integers import LARGEST
from attnops.masks.positions import Full, _Band
from attnops.masks.tokens import Segments
from attnops.typing import Leaf

# The lowest and the highest ``i - j`` at which query i sees key j, both included; None where there is no limit. Nothing
# is seen where the lowest is above the highest.
Limits: TypeAlias = tuple[int | None, int | None]

_EVERYTHING: Final[Limits] = (None, None)
_NOTHING: Final[Limits] = (0, -1)


@dataclasses.dataclass(frozen=True)
class MaskStructure:
    """What is known of a mask when tracing. Static and hashable; the field ``mask_structure`` of a request.

    The mask is ``band & segments & rest``, where any may be absent. The defaults describe a call without a mask.

    Attributes:
        band: the (lowest, highest) ``i - j`` at which query i sees key j, both included, None where there is no limit:
            (0, None) is causal, (0, 4095) causal with a window of 4,096 keys, (None, None) no band. i and j are
            indices, with the mask's offset accounted for, and a limit that no pair of the call reaches is None.
        segments: whether tokens see only tokens of their own segment.
        rest: the kinds of all other masks, such as ``{"KeyPadding"}`` or ``{"|", "Causal", "Dense"}``, and windows
            that are traced, or vary by batch or head. Empty for none.
        by_batch: whether it may vary by batch.
        by_head: whether it may vary by head.
        static: whether it is known when tracing: it has no JAX array.
        may_have_fully_masked_tokens: whether a query may see no key, or no query may see some key; such tokens may hold
            any value, even NaN. False is certain.
    """

    band: Limits = _EVERYTHING
    segments: bool = False
    rest: frozenset[str] = frozenset()
    by_batch: bool = False
    by_head: bool = False
    static: bool = True
    may_have_fully_masked_tokens: bool = False

    @property
    def is_band(self) -> bool:
        """Whether the mask is its band and nothing else; so is a call without a mask."""
        return not self.segments and not self.rest

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.is_band and self.band == _EVERYTHING

    @property
    def is_causal(self) -> bool:
        """Whether it is plain causal: query i sees the keys j <= i."""
        return self.is_band and self.band == (0, None)


class Split(NamedTuple):
    """A mask as a conjunction, ``band & segments & rest``, made by `Mask.split`.

    Attributes:
        band: the mask of ``i - j`` alone; ``Band(None, None)`` where there is none.
        segments: the segments; None for none.
        rest: the conjunction of all other masks; None for none.
    """

    band: Band
    segments: Segments | None
    rest: Mask | None

    def join(self) -> Mask:
        """The mask again: ``band & segments & rest``."""
        joined: Mask = self.band
        for part in (self.segments, self.rest):
            joined = joined if part is None else joined & part
        return joined


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Band(_Band):
    """Query i sees key j where ``low <= i - j <= high``, i and j being indices. What `Mask.split` gives.

    ::

        Band(0, None)     Band(-1, 1)
        █ · · ·           █ █ · ·
        █ █ · ·           █ █ █ ·
        █ █ █ ·           · █ █ █
        █ █ █ █           · · █ █

    Attributes:
        low: an int; None for no limit.
        high: an int; None for no limit.
    """

    low: int | None
    high: int | None

    offset: ClassVar = None  # type: ignore[misc]  # none of its own

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"Band's {name}={value!r} must be an int, or None for no limit")

    @property
    def limits(self) -> Limits:
        """(low, high)."""
        return self.low, self.high

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return self

    def with_offset(self, offset: Leaf) -> Self:
        """This mask: it has no offset."""
        return self

    def _bound_offset(self) -> Leaf:
        return 0

    def _limits(self) -> Limits:
        # `LARGEST` stands for no limit, but no distance is that large: such a band is empty.
        low, high = self.limits
        return None if low is None else min(low, LARGEST - 1), None if high is None else max(high, 1 - LARGEST)

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        # Nothing is fully masked if every query has a key within the band, and every key a query.
        low = -(S - 1) if self.low is None else self.low
        high = T - 1 if self.high is None else self.high
        return not (low <= high and low <= min(0, T - S) and high >= max(0, T - S))


def split(mask: Mask) -> Split:
    """See `Mask.split`."""
    band, segments, rest = _split(mask)
    return Split(Band(*band), None if segments is None else segments.segments(), rest)


def _split(mask: Mask) -> tuple[Limits, Mask | None, Mask | None]:
    """The band, a mask with ``has_segments``, and the conjunction of all others."""
    band: Limits = _EVERYTHING
    segments: Mask | None = None
    rest: Mask | None = None
    for part in _conjuncts(mask):
        limits = _limits(part)
        if limits is not None:
            band = _intersection(band, limits)
        elif part.has_segments and segments is None:
            segments = part
        else:
            rest = part if rest is None else rest & part
    return band, segments, rest


def structure(mask: Mask, T: int, S: int) -> MaskStructure:
    """See `Mask.structure`."""
    band, segments, rest = _split(mask)
    varies = _varies_by(mask)
    return MaskStructure(
        band=_within(band, T, S),
        segments=segments is not None,
        rest=frozenset() if rest is None else rest.kinds(),
        by_batch="b" in varies,
        by_head="h" in varies,
        static=not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask)),
        may_have_fully_masked_tokens=mask.has_fully_masked_tokens(T, S),
    )


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    """The masks whose conjunction is this mask."""
    match mask:
        case And(left=left, right=right):
            yield from _conjuncts(left)
            yield from _conjuncts(right)
        case Not(mask=Not(mask=inner)):
            yield from _conjuncts(inner)
        case Not(mask=Or(left=left, right=right)):
            yield from _conjuncts(Not(left))
            yield from _conjuncts(Not(right))
        case _:
            yield mask


def _limits(mask: Mask) -> Limits | None:
    """The limits of a mask that is a band, known when tracing and equal for all batches and heads; else None."""
    match mask:
        case Full():
            return _EVERYTHING
        case _Band():
            low, high = mask._limits()
            offset = mask._bound_offset()
            if not all(x is None or isinstance(x, (int, np.integer)) for x in (low, high, offset)):
                return None
            return None if low is None else int(low - offset), None if high is None else int(high - offset)
        case And(left=left, right=right):
            a, b = _limits(left), _limits(right)
            return None if a is None or b is None else _intersection(a, b)
        case Or(left=left, right=right):
            a, b = _limits(left), _limits(right)
            return None if a is None or b is None else _union(a, b)
        case Not(mask=inner):
            limits = _limits(inner)
            return None if limits is None else _complement(limits)
        case _:
            return None


def _is_empty(band: Limits) -> bool:
    low, high = band
    return low is not None and high is not None and low > high


def _intersection(a: Limits, b: Limits) -> Limits:
    lows, highs = ([x for x in pair if x is not None] for pair in zip(a, b, strict=True))
    return max(lows, default=None), min(highs, default=None)


def _union(a: Limits, b: Limits) -> Limits | None:
    """The union of two bands; None if it is not a band, since there is a gap between them."""
    if _is_empty(a) or _is_empty(b):
        return b if _is_empty(a) else a
    for (_, high), (low, _) in ((a, b), (b, a)):
        if high is not None and low is not None and high + 1 < low:
            return None
    low = None if None in (a[0], b[0]) else min(a[0], b[0])  # type: ignore[type-var]
    high = None if None in (a[1], b[1]) else max(a[1], b[1])  # type: ignore[type-var]
    return low, high


def _complement(band: Limits) -> Limits | None:
    """The complement of a band; None if it is not a band, since it lies on both sides."""
    low, high = band
    if _is_empty(band):
        return _EVERYTHING
    if low is None and high is None:
        return _NOTHING
    if low is not None and high is not None:
        return None
    return (None, low - 1) if low is not None else (high + 1, None)  # type: ignore[operator]


def _within(band: Limits, T: int, S: int) -> Limits:
    """The band without the limits that no pair of T queries and S keys reaches."""
    low, high = band
    if not all(isinstance(n, int) for n in (T, S)):  # symbolic
        return band
    return None if low is not None and low <= 1 - S else low, None if high is not None and high >= T - 1 else high


def _varies_by(mask: Mask) -> frozenset[str]:
    """Whether a mask may vary by batch ("b") and by head ("h"). A mask without `Mask.axes` may vary by both."""
    if mask.axes is None:
        return frozenset("bh")
    varies: set[str] = set()
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if isinstance(value, Mask):
            varies |= _varies_by(value) & frozenset(mask.inner_axes.get(field.name, "bh"))
        elif hasattr(value, "shape"):
            letters = mask.axes.get(field.name, "bh")
            varies |= {letter for letter, size in zip(letters, value.shape, strict=False) if size != 1}
    return frozenset(varies) & frozenset("bh")
