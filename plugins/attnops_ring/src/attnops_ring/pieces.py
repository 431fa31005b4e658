"""A stretch of queries and one of keys: what masks, biases and dropout are for them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from attnops.biases import Bias
from attnops.dropout import ShiftedKey
from attnops.masks import And, At, Causal, CoverageBounds, Full, Grid, KeyPadding, Mask, Not, Or, Shifted, SlidingWindow


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Tokens of one device that follow one another in the sequence, but for the stride.

    Attributes:
        first: where it begins in the sequence, an integer array [].
        size: how many tokens.
        stride: how far apart they stand.
        length: of the sequence; tokens beyond it are padding.
    """

    first: Any
    size: int
    stride: int
    length: int

    @property
    def positions(self) -> Any:
        """Where each stands in the sequence, padding included, int32 [size]."""
        return self.first + jnp.arange(self.size, dtype=jnp.int32) * self.stride

    @property
    def index(self) -> Any:
        """`positions`, where padding stands at the last token."""
        return jnp.minimum(self.positions, self.length - 1)


def piece_of_mask(mask: Mask | None, q: Stretch, kv: Stretch, is_padded: bool, queries_are_padded: bool) -> Mask | None:
    """A bound mask for a stretch of queries and one of keys.

    Args:
        mask: of the whole call.
        q: the queries.
        kv: the keys.
        is_padded: whether there may be keys beyond the last, which are hidden.
        queries_are_padded: whether there may be queries beyond the last, which must see nothing that no other sees.
    """
    found = None if mask is None else _piece(mask, q, kv, may_shift=not queries_are_padded)
    if not is_padded:
        return found
    inside = KeyPadding((kv.positions < kv.length)[None])
    return inside if found is None else And(found, inside)


def _piece(mask: Mask, q: Stretch, kv: Stretch, may_shift: bool) -> Mask:
    """The stretches' part; ``may_shift`` says that an offset may stand for positions, beyond the last query too."""
    if isinstance(mask, (And, Or)):
        return type(mask)(_piece(mask.left, q, kv, may_shift), _piece(mask.right, q, kv, may_shift))
    if isinstance(mask, Not):
        return Not(_piece(mask.mask, q, kv, may_shift))
    if isinstance(mask, Shifted):
        return dataclasses.replace(mask, mask=_piece(mask.mask, q, kv, may_shift))
    if isinstance(mask, Full):
        return mask
    if isinstance(mask, At):
        found = _piece(mask.mask, q, kv, may_shift=False)
        if not isinstance(found, At):
            return Asked(mask, q.index[None], kv.index[None])
        given = (_tokens(x, by, 1) for x, by in ((mask.q_positions, q), (mask.kv_positions, kv)))
        at = (own if x is None else x for x, own in zip(given, (found.q_positions, found.kv_positions), strict=True))
        return At(found.mask, *at)
    axes = mask.axes
    offset: Any = getattr(mask, "offset", 0)
    if axes is None or (getattr(offset, "ndim", 0) == 2 and offset.shape[1] > 1):
        # Of a function nothing is known; and a token has one position, not one a head.
        return Asked(mask, q.index[None], kv.index[None])
    if may_shift and isinstance(mask, (Causal, SlidingWindow)) and q.stride == kv.stride == 1:
        # Of a difference of positions alone: where the stretches begin says all.
        return mask.with_offset(offset + q.first - kv.first)
    if any(set(letters) & {"t", "s"} for letters in axes.values()):
        changes = {}
        for name, letters in axes.items():
            x = getattr(mask, name)
            for letter, by in (("t", q), ("s", kv)):
                if x is not None and letter in letters:
                    x = _tokens(x, by, letters.index(letter))
            changes[name] = x
        return dataclasses.replace(mask, **changes)  # type: ignore[type-var]
    at_zero = mask.with_offset(0) if hasattr(mask, "with_offset") else mask
    return At(at_zero, q.index[None] + offset, kv.index[None])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Asked(Mask):
    """A mask of which nothing is known but what it says of two tokens; every tile is PARTIAL.

    Attributes:
        mask: of the whole call.
        q_index: the queries, [1, t].
        kv_index: the keys, [1, s].
    """

    mask: Mask
    q_index: Any
    kv_index: Any

    axes: ClassVar = {"q_index": "bt", "kv_index": "bs"}

    def kinds(self) -> frozenset[str]:
        """See `Mask.kinds`."""
        return self.mask.kinds()

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        """See `Mask.allowed`."""
        return self.mask.allowed(b, h, jnp.asarray(self.q_index)[0, q], jnp.asarray(self.kv_index)[0, kv])

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        """See `Mask.coverage_bounds`."""
        like = (grid.q_first == grid.q_first) & (grid.kv_first == grid.kv_first)
        return CoverageBounds(like, ~like)

    def __repr__(self) -> str:
        return repr(self.mask)


@dataclasses.dataclass(frozen=True, eq=False)
class PieceOfBias(Bias):
    """A bound bias for a stretch of queries and one of keys.

    Attributes:
        bias: of the whole call.
        q_index: the queries, [t].
        kv_index: the keys, [s].
    """

    bias: Bias
    q_index: Any
    kv_index: Any

    static: ClassVar[tuple[str, ...]] = ()

    def apply(self, scores: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        """See `Bias.apply`."""
        return self.bias.apply(scores, b, h, jnp.asarray(self.q_index)[q], jnp.asarray(self.kv_index)[kv])

    def __repr__(self) -> str:
        return repr(self.bias)


def piece_of_bias(bias: Any, q: Stretch, kv: Stretch) -> Any:
    """A bound bias, or an array [B or 1, H or 1, T or 1, S or 1], for a stretch of queries and one of keys."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        return PieceOfBias(bias, q.index, kv.index)
    return _tokens(_tokens(bias, q, 2), kv, 3)


def piece_of_key(key: ShiftedKey | None, q: Stretch, kv: Stretch) -> ShiftedKey | None:
    """A dropout key for a stretch of queries and one of keys."""
    if key is None:
        return None
    return dataclasses.replace(
        key, i=key.i + q.first, j=key.j + kv.first, i_step=key.i_step * q.stride, j_step=key.j_step * kv.stride
    )  # fmt: skip


def sees_any(mask: Mask | None, t: int, s: int) -> Any:
    """Whether any of ``t`` queries may see any of ``s`` keys; a boolean [], or Python's True. False is certain."""
    if mask is None:
        return True
    return jnp.asarray(mask.coverage_bounds(Grid.make([0], t, t, [0], s, s)).some).any()


def _tokens(x: Any, stretch: Stretch, axis: int) -> Any:
    """The tokens of an array along an axis; one that has one for all of several stays."""
    if x is None or (x.shape[axis] == 1 and stretch.length > 1):
        return x
    return jnp.take(jnp.asarray(x), stretch.index, axis=axis)
