"""Masks of what tokens are: segments, lengths, padding, and plain arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from attnops.masks.algebra import at, take, text, token_array
from attnops.masks.base import Mask
from attnops.masks.integers import as_limits, check_integers, ids_as_int32, is_known, less
from attnops.masks.tiles import Grid, TileCoverage, below, same_number


class _Tokens(Mask):
    """A mask of what tokens are; lists and numbers become numpy arrays."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and not hasattr(value, "shape"):
                object.__setattr__(self, field.name, np.asarray(value))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(_Tokens):
    """Tokens see those of their own segment: documents that are packed into one sequence.

    ::

        Segments([0, 0, 1, 1])
        █ █ · ·
        █ █ · ·
        · · █ █
        · · █ █

    Attributes:
        q_ids: the segment of each query, integers [T], [1, T] or [B, T].
        kv_ids: the segment of each key, integers [S], [1, S] or [B, S]; None for ``q_ids``, where T = S.

    Ids are compared by value, whatever their dtypes. Those that int32 does not hold are renumbered when the mask is
    bound, O(n log n); traced ones of dtypes that can't be compared, such as uint32 with int32, are refused.
    """

    q_ids: Any
    kv_ids: Any = None

    axes: ClassVar = {"q_ids": "bt", "kv_ids": "bs"}

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, length: int) -> Segments:
        """From cumulative lengths, [0, n₁, n₁ + n₂, …]: what follows the last is a segment of its own, of padding.

        Args:
            cu_seqlens: integers [documents + 1], not decreasing, the first 0 and the last at most ``length``. Traced
                ones are taken at their word.
            length: T = S.

        Raises:
            ValueError: they are not.
        """
        xp = np if isinstance(cu_seqlens, (np.ndarray, list, tuple)) else jnp
        ends = xp.asarray(cu_seqlens)
        if ends.ndim != 1:
            raise ValueError(
                f"cu_seqlens has shape {ends.shape}, but must have shape [documents + 1]; for a batch, give Segments "
                f"the ids [B, T]"
            )
        check_integers("cu_seqlens", ends)
        if is_known(ends) and ends.size:
            known = np.asarray(ends).astype(np.int64)
            if known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > length:
                raise ValueError(
                    f"cu_seqlens={known.tolist() if known.size <= 9 else text(ends)} must begin with 0, not decrease, "
                    f"and end at length={length} or before; give the sums of the documents' lengths"
                )
        return cls(xp.searchsorted(as_limits("cu_seqlens", ends), xp.arange(length, dtype=np.int32), side="right"))

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
        # Of one array of ids each token is in a segment with itself.
        return self.kv_ids is None or self.kv_ids is self.q_ids

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return take(self.q_ids, b, q) == take(self.kv_ids, b, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return same_number(*grid.q_extent(self.q_ids), *grid.kv_extent(self.kv_ids))

    def __repr__(self) -> str:
        ids = text(self.q_ids) if self.kv_ids is None else f"{text(self.q_ids)}, {text(self.kv_ids)}"
        return f"Segments({ids})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(_Tokens):
    """Sequences of different lengths, padded at the end: key j is seen when ``j < kv_lengths[b]``.

    Attributes:
        kv_lengths: integers [B].
        q_lengths: if given, integers [B]; query i sees nothing unless ``i < q_lengths[b]``.
    """

    kv_lengths: Any
    q_lengths: Any = None

    axes: ClassVar = {"kv_lengths": "b", "q_lengths": "b"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        given = []
        for name in ("kv_lengths", "q_lengths"):
            value = getattr(self, name)
            if value is not None and value.shape != (B,):
                raise ValueError(f"Lengths' {name} has shape {value.shape}, but must have shape [B]=({B},)")
            given.append(None if value is None else as_limits(f"Lengths' {name}", value))
        return type(self)(*given)

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return at(self, q_positions, kv_positions)

    def with_offset(self, offset: Any) -> Self:
        return self

    def position_unit(self) -> int | None:
        """What all positions may be moved by multiples of, so that the mask means the same; None for nothing."""
        return 1 if all(x is None or is_known(x) for x in (self.kv_lengths, self.q_lengths)) else None

    def moved(self, by: int) -> Self:
        """The same mask for positions that are less by a number."""
        return type(self)(*(None if x is None else less(x, by) for x in (self.kv_lengths, self.q_lengths)))

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = kv < jnp.asarray(self.kv_lengths)[b]
        return seen & (q == q) if self.q_lengths is None else seen & (q < jnp.asarray(self.q_lengths)[b])

    def tiles(self, grid: Grid) -> TileCoverage:
        keys = below(grid.kv_first, grid.kv_last, self.kv_lengths[:, None, None, None])
        if self.q_lengths is None:
            return keys
        return keys & below(grid.q_first, grid.q_last, self.q_lengths[:, None, None, None])

    def __repr__(self) -> str:
        lengths = [text(x) for x in (self.kv_lengths, self.q_lengths) if x is not None]
        return f"Lengths({', '.join(lengths)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(_Tokens):
    """Keys that are padding are seen by nobody.

    Attributes:
        is_token: [B, S] or [S], True or nonzero for a token, False or 0 for padding: the ``attention_mask`` that
            Hugging Face tokenizers return.
    """

    is_token: Any

    axes: ClassVar = {"is_token": "bs"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        values = token_array("KeyPadding's is_token", self.is_token, B, S)
        if np.dtype(values.dtype).kind not in "iub":
            raise ValueError(
                f"KeyPadding's is_token has dtype {values.dtype}, but must be boolean or integers, 0 for padding; give "
                f"an additive mask [B, S] as bias=mask[:, None, None, :]"
            )
        return type(self)(values if values.dtype == np.bool_ else values != 0)

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return take(self.is_token, b, kv) & (q == q)

    def tiles(self, grid: Grid) -> TileCoverage:
        every, some = grid.kv_extent(self.is_token)
        return TileCoverage(some, every)

    def __repr__(self) -> str:
        return f"KeyPadding({text(self.is_token)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(_Tokens):
    """A boolean array, True where a query may attend. The only mask of O(T · S) memory.

    Attributes:
        array: boolean, 4-D, broadcasts to [B, H, T, S].
    """

    array: Any

    axes: ClassVar = {"array": "bhts"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        from attnops.masks.checks import check_boolean, check_broadcastable

        check_broadcastable("Dense's array", tuple(self.array.shape), (B, H, T, S), "add axes of size 1")
        check_boolean("Dense's array", self.array)
        return self

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        index = (i if size > 1 else 0 for i, size in zip((b, h, q, kv), self.array.shape, strict=True))
        return jnp.asarray(self.array)[tuple(index)] & (q == q) & (kv == kv)

    def dense(self, B: int, H: int, T: int, S: int) -> Any:
        return jnp.asarray(self.array)

    def tiles(self, grid: Grid) -> TileCoverage:
        xp = np if isinstance(self.array, np.ndarray) else jnp
        some = every = self.array
        for axis, first, last in ((2, grid.q_first, grid.q_last), (3, grid.kv_first, grid.kv_last)):
            if self.array.shape[axis] == 1:
                continue
            starts, stops = np.asarray(first).reshape(-1), np.asarray(last).reshape(-1)
            block = int((stops - starts).max()) + 1
            index = np.minimum(starts[:, None] + np.arange(block), stops[:, None])
            # [..., tiles, block] in place of the axis, then reduced.
            some = xp.take(some, index, axis=axis).any(axis=axis + 1)
            every = xp.take(every, index, axis=axis).all(axis=axis + 1)
        return TileCoverage(some, every)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"mask_shape": tuple(self.array.shape)}

    def __repr__(self) -> str:
        return f"Dense({text(self.array)})"
