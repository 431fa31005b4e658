"""Masks, biases and dropout keys of the whole sequence, sliced for a chunk of queries and a chunk of keys."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from attnops.biases import Bias
from attnops.dropout import ShiftedKey
from attnops.masks import (
    And,
    At,
    Blocks,
    Causal,
    CoverageBounds,
    Full,
    Grid,
    KeyPadding,
    Mask,
    Not,
    Or,
    Shifted,
    SlidingWindow,
)

if TYPE_CHECKING:
    import jax

    from attnops.typing import Array, BoolArray, Index, Leaf, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of one device that are consecutive in the sequence, or ``stride`` apart.

    Attributes:
        first: the position of its first token, an integer array [].
        size: the number of tokens.
        stride: the difference between consecutive positions.
        length: the length of the sequence; tokens beyond it are padding.
    """

    first: Index
    size: int
    stride: int
    length: int

    @property
    def positions(self) -> Array:
        """The position of each token in the sequence, padding included, int32 [size]."""
        return self.first + jnp.arange(self.size, dtype=jnp.int32) * self.stride

    @property
    def index(self) -> Array:
        """`positions`, with padding clamped to the last token, int32 [size]."""
        return jnp.minimum(self.positions, self.length - 1)


def slice_mask(mask: Mask | None, q: Chunk, kv: Chunk, is_padded: bool, queries_are_padded: bool) -> Mask | None:
    """A bound mask of the whole sequence, sliced for a chunk of queries and a chunk of keys.

    Args:
        mask: bound to scores [B, H, T, S].
        q: the queries' chunk.
        kv: the keys' chunk.
        is_padded: whether the keys may include padding, which is masked.
        queries_are_padded: whether the queries may include padding, which must not see keys that no real query sees.
    """
    sliced = None if mask is None else _slice(mask, q, kv, may_shift=not queries_are_padded)
    if not is_padded:
        return sliced
    inside = KeyPadding((kv.positions < kv.length)[None])
    return inside if sliced is None else And(sliced, inside)


def _slice(mask: Mask, q: Chunk, kv: Chunk, may_shift: bool) -> Mask:
    """`slice_mask` without padding; ``may_shift`` allows an offset instead of explicit, clamped positions."""
    if isinstance(mask, (And, Or)):
        return type(mask)(_slice(mask.left, q, kv, may_shift), _slice(mask.right, q, kv, may_shift))
    if isinstance(mask, Not):
        return Not(_slice(mask.mask, q, kv, may_shift))
    if isinstance(mask, Shifted):
        return dataclasses.replace(mask, mask=_slice(mask.mask, q, kv, may_shift))
    if isinstance(mask, Full):
        return mask
    if isinstance(mask, At):
        inner = _slice(mask.mask, q, kv, may_shift=False)
        if not isinstance(inner, At):
            return IndexedMask(mask, q.index[None], kv.index[None])
        given = (_tokens(x, by, 1) for x, by in ((mask.q_positions, q), (mask.kv_positions, kv)))
        defaults = inner.q_positions, inner.kv_positions
        return At(inner.mask, *(default if x is None else x for x, default in zip(given, defaults, strict=True)))
    if isinstance(mask, Blocks):
        return _slice_blocks(mask, q, kv)
    axes = mask.axes
    offset: Leaf = getattr(mask, "offset", 0)
    if axes is None or (getattr(offset, "ndim", 0) == 2 and offset.shape[1] > 1):
        # A function can only be evaluated pair by pair; an offset per head can't be added to positions per token.
        return IndexedMask(mask, q.index[None], kv.index[None])
    if may_shift and isinstance(mask, (Causal, SlidingWindow)) and q.stride == kv.stride == 1:
        # The mask depends only on differences of positions, so that the chunks' first positions suffice.
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


def _slice_blocks(mask: Blocks, q: Chunk, kv: Chunk) -> Blocks:
    """Chosen blocks, in a block size that divides the mask's block size and the chunk; one token in striped order."""
    chosen, sizes = jnp.asarray(mask.chosen), []
    for axis, block, chunk in ((2, mask.q_block, q), (3, mask.kv_block, kv)):
        size = math.gcd(block, chunk.size) if chunk.stride == 1 else 1
        chosen = jnp.take(chosen, chunk.index[::size] // block, axis=axis)
        sizes.append(size)
    return Blocks(chosen, *sizes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexedMask(Mask):
    """A mask evaluated at given indices of the whole sequence; every tile is PARTIAL.

    Attributes:
        mask: bound to scores [B, H, T, S].
        q_index: indices of the queries, [1, t].
        kv_index: indices of the keys, [1, s].
    """

    mask: Mask
    q_index: Array
    kv_index: Array

    axes: ClassVar = {"q_index": "bt", "kv_index": "bs"}

    def kinds(self) -> frozenset[str]:
        """The kinds of the mask of the whole sequence."""
        return self.mask.kinds()

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """Whether query ``q`` sees key ``kv``, both counted in their chunks."""
        return self.mask.allowed(b, h, jnp.asarray(self.q_index)[0, q], jnp.asarray(self.kv_index)[0, kv])

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        """Bounds by which every tile is PARTIAL."""
        true = (grid.q_first == grid.q_first) & (grid.kv_first == grid.kv_first)
        return CoverageBounds(true, ~true)

    def __repr__(self) -> str:
        return repr(self.mask)


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedBias(Bias):
    """A bound bias evaluated at given indices of the whole sequence.

    Attributes:
        bias: bound to scores [B, H, T, S].
        q_index: indices of the queries, [t].
        kv_index: indices of the keys, [s].
    """

    bias: Bias
    q_index: Array
    kv_index: Array

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        """The scores of query ``q`` and key ``kv``, both counted in their chunks, with the bias."""
        return self.bias.apply(scores, b, h, jnp.asarray(self.q_index)[q], jnp.asarray(self.kv_index)[kv])

    def __repr__(self) -> str:
        return repr(self.bias)


def slice_bias(bias: PyTree, q: Chunk, kv: Chunk) -> PyTree:
    """A bound bias, or an array [B or 1, H or 1, T or 1, S or 1], sliced for a chunk of queries and a chunk of keys."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        return IndexedBias(bias, q.index, kv.index)
    return _tokens(_tokens(bias, q, 2), kv, 3)


def slice_dropout_key(key: ShiftedKey | None, q: Chunk, kv: Chunk) -> ShiftedKey | None:
    """A dropout key for a chunk of queries and a chunk of keys."""
    if key is None:
        return None
    return dataclasses.replace(
        key, i=key.i + q.first, j=key.j + kv.first, i_step=key.i_step * q.stride, j_step=key.j_step * kv.stride
    )  # fmt: skip


def sees_any(mask: Mask | None, t: int, s: int) -> BoolArray:
    """Whether some of ``t`` queries may see some of ``s`` keys: a boolean array [], or True. Only False is certain."""
    if mask is None:
        return True
    return jnp.asarray(mask.coverage_bounds(Grid.make([0], t, t, [0], s, s)).some).any()


def _tokens(x: Leaf, chunk: Chunk, axis: int) -> Leaf:
    """A chunk's tokens of an array along an axis; an array of size 1 along it is broadcast, and does not change."""
    if x is None or (x.shape[axis] == 1 and chunk.length > 1):
        return x
    return jnp.take(jnp.asarray(x), chunk.index, axis=axis)
