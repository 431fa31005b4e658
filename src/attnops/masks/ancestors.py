"""Masks of drafted tokens: a tree of them after the committed ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Self

import jax.numpy as jnp
import numpy as np

from attnops.masks.at import at, take, token_array
from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid
from attnops.masks.integers import LARGEST, as_limits, is_known, minus, numpy_of
from attnops.masks.picture import text
from attnops.masks.positions import _number
from attnops.programs.pytree import replaced
from attnops.typing import Array, BoolArray, Index, Leaf

# Doublings for a symbolic number of tokens: they reach the ancestor 2³¹ levels up.
_MOST_STEPS: Final = 31


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Ancestors(Mask):
    """A tree of drafted tokens, for speculative decoding: each sees its ancestors, itself and all committed tokens.

    The queries are the drafted tokens, and are the last T of the keys: key ``j + offset`` is drafted token j. Keys
    before the drafted ones are committed, and every query sees them; no query sees keys after them.

    ::

        Ancestors([-1, 0, 0, 1]), T = S = 4     the same, T = 4, S = 6
        █ · · ·                                 █ █ █ · · ·
        █ █ · ·                                 █ █ █ █ · ·
        █ · █ ·                                 █ █ █ · █ ·
        █ █ · █                                 █ █ █ █ · █

    Attributes:
        parents: the index among the drafted tokens of each one's parent, integers [T], [1, T] or [B, T]: −1 for a root,
            whose parent is the last committed token; else below the token's own index. Pad rows with fewer drafts at
            the end with −1: no other token sees padding, and the outputs of padding are meaningless.
        offset: the position of drafted token 0 among the keys, an int or an integer array [B or 1, 1]. None is
            ``S - T``.

    Traced parents are not checked: parents outside this range are clamped to it.

    A position here is the order in which tokens were appended, with a number for each drafted token: `Mask.at` reads
    only the first of a row's ``q_positions``, which is the row's offset. Rotary embeddings need another position for a
    drafted token, the last committed token's plus its depth in the tree: apply them before the call. Windows and
    biases that are combined with this mask use the order too.

    It needs O(T²) memory when bound, and O(T + S) in the call.
    """

    parents: Leaf
    offset: Leaf = None

    axes: ClassVar = {"parents": "bt", "offset": "bh"}

    def __post_init__(self) -> None:
        if not hasattr(self.parents, "shape"):
            object.__setattr__(self, "parents", np.asarray(self.parents))

    def bind(self, B: int, H: int, T: int, S: int) -> Mask:  # type: ignore[override]
        """See `Mask.bind`.

        Raises:
            ValueError: an array does not fit; or a known parent does not come before its child.
        """
        return self.bind_at(B, H, T, S, None, None)

    def bind_at(self, B: int, H: int, T: int, S: int, q: Array | None, kv: Array | None) -> Mask:
        """`bind` with positions, int32 [B or 1, T] and [B or 1, S]; None for the indices."""
        parents = _checked(token_array("Ancestors' parents", self.parents, B, T), T)
        offset = self._number(B, H, T, S) if q is None else q[:, :1]
        first, last = _intervals(parents, T)
        positions = np.arange(S, dtype=np.int32) if isinstance(S, int) else jnp.arange(S, dtype=np.int32)
        low, high = _key_bounds(first, last, minus(positions[None] if kv is None else kv, offset), T)
        placed = q is not None or kv is not None
        expression = at(self if q is None else self.with_offset(None), q, kv) if placed else self
        bound = _Intervals(repr(expression), placed, first, low, high)
        if type(offset) is int and kv is None:
            object.__setattr__(bound, "known_offset", offset)
        return bound

    def _number(self, B: int, H: int, T: int, S: int) -> Leaf:
        offset = _number("Ancestors' offset", S - T if self.offset is None else self.offset, B, H)
        if getattr(offset, "ndim", 0) == 2 and offset.shape[1] > 1:
            raise ValueError(
                f"Ancestors' offset has shape {offset.shape}, but must be a number or have shape [B or 1, 1]=[{B}, 1]: "
                f"all heads have the same drafted tokens"
            )
        return offset

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        """See `Mask.at`. Only the first of a row's ``q_positions`` is read, the position of its drafted token 0."""
        return at(self, q_positions, kv_positions)

    def with_offset(self, offset: Leaf) -> Ancestors:
        """This mask with the drafted tokens at another offset."""
        return dataclasses.replace(self, offset=offset)

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """See `Mask.allowed`."""
        raise ValueError(f"{self!r} is not bound; call mask.bind(B, H, T, S)")

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        """See `Mask.coverage_bounds`."""
        raise ValueError(f"{self!r} is not bound; call mask.bind(B, H, T, S)")

    def __repr__(self) -> str:
        offset = "" if self.offset is None else f", offset={text(self.offset)}"
        return f"Ancestors({text(self.parents)}{offset})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Intervals(Mask):
    """A bound `Ancestors`: query i sees key j where ``low[j] <= order[i] <= high[j]``.

    A depth-first walk of the tree, parents before their children, numbers the tokens, so that the numbers of a token
    and its descendants are an interval.

    Attributes:
        expression: the mask that was bound.
        placed: whether the mask had positions.
        order: the number of each query, int32 [B or 1, T].
        low: the least number that sees a key, int32 [B or 1, S].
        high: the greatest number that sees a key, int32 [B or 1, S].
        known_offset: the offset, where it is an int and keys have no positions.
    """

    expression: str
    placed: bool
    order: Array
    low: Array
    high: Array
    # `dataclasses.replace` does not copy it: it does not hold for a slice of the tokens.
    known_offset: int | None = dataclasses.field(default=None, init=False)

    axes: ClassVar = {"order": "bt", "low": "bs", "high": "bs"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        for name, length in (("order", T), ("low", S), ("high", S)):
            token_array(f"{self!r}'s {name}", getattr(self, name), B, length)
        return self

    def as_data(self) -> Mask:
        return replaced(self, {"known_offset": None, "expression": "Ancestors"})

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        if q_positions is kv_positions is None:
            return self
        raise ValueError(f"{self!r} is bound already; give it positions with mask.at(...) before mask.bind(...)")

    def kinds(self) -> frozenset[str]:
        return frozenset({"Ancestors", "at"} if self.placed else {"Ancestors"})

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        order = take(self.order, b, q)
        return (take(self.low, b, kv) <= order) & (order <= take(self.high, b, kv))

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        least, most = grid.q_extent(self.order)
        (low, last_low), (first_high, high) = grid.kv_extent(self.low), grid.kv_extent(self.high)
        return CoverageBounds((low <= most) & (least <= high), (last_low <= least) & (most <= first_high))

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        # Nothing is fully masked if there is a committed token or each query is a key, and no key follows the drafts.
        offset = self.known_offset
        return offset is None or not (offset >= S - T and (offset >= 1 or S >= T))

    def sees_itself(self) -> bool:
        # Key i is drafted token i, or committed.
        return self.known_offset is not None and (self.known_offset == 0 or self.known_offset >= self.order.shape[1])

    def __repr__(self) -> str:
        return self.expression


def _checked(parents: Leaf, T: int) -> Array:
    """Parents [B or 1, T] as int32 between −1 and the token before.

    Raises:
        ValueError: they are not integers, or known and outside that range.
    """
    values = as_limits("Ancestors' parents", parents)
    xp = numpy_of(values)
    index = xp.arange(T, dtype=np.int32)
    if is_known(parents):
        wrong = np.argwhere((np.asarray(values) < -1) | (np.asarray(values) >= np.asarray(index)))
        if len(wrong):
            b, i = wrong[0]
            raise ValueError(
                f"Ancestors' parents[{b}, {i}]={np.asarray(parents)[b, i]} must be at least -1, for a root, and below "
                f"its own index {i}, since a token is drafted after its parent; sort the tokens by depth"
            )
    return xp.clip(values, np.int32(-1), index - 1)


def _intervals(parents: Array, T: int) -> tuple[Array, Array]:
    """The number of each token in a walk of the tree, and the greatest of its descendants', int32 [B or 1, T]."""
    xp = numpy_of(parents)
    index = xp.arange(T, dtype=np.int32)
    # seen[i, j]: j is i, or one of the nearest 2ᵏ − 1 ancestors of i; up is the one that is 2ᵏ above it.
    seen, up = xp.broadcast_to(index[:, None] == index, (parents.shape[0], T, T)), parents
    for _ in range(T.bit_length() if isinstance(T, int) else _MOST_STEPS):
        above = xp.maximum(up, 0)
        seen = seen | ((up >= 0)[..., None] & xp.take_along_axis(seen, above[..., None], axis=1))
        up = xp.where(up >= 0, xp.take_along_axis(up, above, axis=1), -1)
    size = seen.sum(axis=1, dtype=np.int32)
    # Between a parent and its child come the parent's earlier children, each with its descendants.
    is_earlier = (parents[:, :, None] == parents[:, None, :]) & (index < index[:, None])
    step = xp.where(is_earlier, size[:, None, :], 0).sum(axis=2, dtype=np.int32) + 1
    order = xp.where(seen, step[:, None, :], 0).sum(axis=2, dtype=np.int32) - 1
    return order, order + size - 1


def _key_bounds(first: Array, last: Array, index: Array, T: int) -> tuple[Array, Array]:
    """The least and the greatest number that see a key, [B or 1, S], from the index of its drafted token.

    The index is negative for a committed token, which all see, and T or above after the drafts, where none does.
    """
    xp = numpy_of(first, index)
    slot = xp.clip(index, 0, T)
    after = xp.ones((first.shape[0], 1), np.int32)
    low = xp.take_along_axis(xp.concatenate([first, after * LARGEST], axis=1), slot, axis=1)
    high = xp.take_along_axis(xp.concatenate([last, after * -1], axis=1), slot, axis=1)
    return xp.where(index < 0, np.int32(-1), low), xp.where(index < 0, np.int32(LARGEST), high)
