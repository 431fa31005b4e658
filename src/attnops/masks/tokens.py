"""Masks of tokens: segments, lengths and padding."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax.numpy as jnp
import numpy as np

from attnops.masks.at import at, take, token_array
from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid, below_bounds, equal_bounds
from attnops.masks.integers import as_limits, check_integers, ids_as_int32, is_known, numpy_of
from attnops.masks.picture import text
from attnops.typing import Array, BoolArray, Index, Leaf


class _Tokens(Mask):
    """A mask of tokens; lists and numbers become numpy arrays."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and not hasattr(value, "shape"):
                object.__setattr__(self, field.name, np.asarray(value))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(_Tokens):
    """Tokens see only tokens of the same segment: documents that are packed into one sequence.

    ::

        Segments([0, 0, 1, 1])
        █ █ · ·
        █ █ · ·
        · · █ █
        · · █ █

    Attributes:
        q_ids: the segment of each query, integers [T], [1, T] or [B, T].
        kv_ids: the segment of each key, integers [S], [1, S] or [B, S]; None for ``q_ids``, where T = S.

    Ids are compared by value, whatever their dtypes. Ids that int32 does not hold are renumbered when the mask is
    bound, O(n log n); traced ids of dtypes that can't be compared, such as uint32 with int32, are refused.
    """

    q_ids: Leaf
    kv_ids: Leaf = None

    axes: ClassVar = {"q_ids": "bt", "kv_ids": "bs"}
    has_segments: ClassVar = True

    def segments(self) -> Segments:
        return self

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Leaf, length: int) -> Segments:
        """From cumulative lengths, [0, n₁, n₁ + n₂, …]; tokens after the last are one more segment, of padding.

        Args:
            cu_seqlens: integers [documents + 1], not decreasing, the first 0 and the last at most ``length``. Traced
                values are not checked.
            length: T = S.

        Raises:
            ValueError: they are not integers of that shape, or not such lengths.
        """
        ends = cumulative_lengths("cu_seqlens", cu_seqlens, length)
        xp = numpy_of(ends)
        return cls(xp.searchsorted(ends, xp.arange(length, dtype=np.int32), side="right"))

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        if self.kv_ids is None and T != S:
            raise ValueError(f"Segments has one array of ids, but T={T} and S={S} differ: give Segments(q_ids, kv_ids)")
        names = ("Segments' q_ids", "Segments' kv_ids")
        if self.kv_ids is None or (self.kv_ids is self.q_ids and T == S):
            (ids,) = ids_as_int32(names[:1], (token_array(names[0], self.q_ids, B, T),))
            return type(self)(ids, ids)
        q_ids, kv_ids = token_array(names[0], self.q_ids, B, T), token_array(names[1], self.kv_ids, B, S)
        return type(self)(*ids_as_int32(names, (q_ids, kv_ids)))

    def sees_itself(self) -> bool:
        # With one array of ids each token is in its own segment.
        return self.kv_ids is None or self.kv_ids is self.q_ids

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return take(self.q_ids, b, q) == take(self.kv_ids, b, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return equal_bounds(*grid.q_extent(self.q_ids), *grid.kv_extent(self.kv_ids))

    def __repr__(self) -> str:
        ids = text(self.q_ids) if self.kv_ids is None else f"{text(self.q_ids)}, {text(self.kv_ids)}"
        return f"Segments({ids})"


def cumulative_lengths(name: str, values: Leaf, length: int) -> Array:
    """Cumulative lengths of documents, int32 [documents + 1]; traced values are not checked.

    Raises:
        ValueError: they are not integers of that shape; or known, and do not rise from 0 to ``length`` at most.
    """
    ends = np.asarray(values) if isinstance(values, (np.ndarray, list, tuple)) else jnp.asarray(values)
    if ends.ndim != 1 or not ends.size:
        raise ValueError(
            f"{name} has shape {ends.shape}, but must have shape [documents + 1]; for a batch, give Segments "
            f"the ids [B, T]"
        )
    check_integers(name, ends)
    if is_known(ends):
        known = np.asarray(ends).astype(np.int64)
        falls = np.diff(known) < 0
        if known[0] != 0 or falls.any() or known[-1] > length:
            first = 0 if known[0] != 0 else int(falls.argmax()) if falls.any() else known.size - 1
            shown = f"={known.tolist()}" if known.size <= 9 else f"[{first}:{first + 2}]={known[first:][:2].tolist()}"
            raise ValueError(
                f"{name}{shown} must begin with 0, not decrease, and end at length={length} or before; give the sums "
                f"of the documents' lengths"
            )
    return as_limits(name, ends)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(_Tokens):
    """Sequences of different lengths, padded at the end: key j is seen where ``j < kv_lengths[b]``.

    Attributes:
        kv_lengths: integers [B].
        q_lengths: if given, integers [B]; query i sees nothing unless ``i < q_lengths[b]``.
    """

    kv_lengths: Leaf
    q_lengths: Leaf = None

    axes: ClassVar = {"kv_lengths": "b", "q_lengths": "b"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        given = []
        for name in ("kv_lengths", "q_lengths"):
            value = getattr(self, name)
            if value is not None and value.shape != (B,):
                raise ValueError(f"Lengths' {name} has shape {value.shape}, but must have shape [B]=({B},)")
            given.append(None if value is None else as_limits(f"Lengths' {name}", value))
        return type(self)(*given)

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        return at(self, q_positions, kv_positions)

    def with_offset(self, offset: Leaf) -> Self:
        return self

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        seen = kv < jnp.asarray(self.kv_lengths)[b]
        return seen & (q == q) if self.q_lengths is None else seen & (q < jnp.asarray(self.q_lengths)[b])

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        keys = below_bounds(grid.kv_first, grid.kv_last, self.kv_lengths[:, None, None, None])
        if self.q_lengths is None:
            return keys
        return keys & below_bounds(grid.q_first, grid.q_last, self.q_lengths[:, None, None, None])

    def __repr__(self) -> str:
        lengths = [text(x) for x in (self.kv_lengths, self.q_lengths) if x is not None]
        return f"Lengths({', '.join(lengths)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(_Tokens):
    """No query sees a key that is padding.

    Attributes:
        is_token: [B, S] or [S], True or nonzero for a token, False or 0 for padding: the ``attention_mask`` that
            Hugging Face tokenizers return.
    """

    is_token: Leaf

    axes: ClassVar = {"is_token": "bs"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        values = token_array("KeyPadding's is_token", self.is_token, B, S)
        if np.dtype(values.dtype).kind not in "iub":
            raise ValueError(
                f"KeyPadding's is_token has dtype {values.dtype}, but must be boolean or integers, 0 for padding; give "
                f"an additive mask [B, S] as bias=mask[:, None, None, :]"
            )
        return type(self)(values if values.dtype == np.bool_ else values != 0)

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return take(self.is_token, b, kv) & (q == q)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        every, some = grid.kv_extent(self.is_token)
        return CoverageBounds(some, every)

    def __repr__(self) -> str:
        return f"KeyPadding({text(self.is_token)})"
