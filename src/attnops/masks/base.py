"""Mask: what every mask can do; and the masks that its operators make."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks.checks import check_boolean, check_broadcastable
from attnops.masks.coverage import Coverage, CoverageBounds, Grid, tight_bounds
from attnops.masks.picture import picture, small_picture, text
from attnops.programs.pytree import equal_leaves, register, replaced
from attnops.typing import Array, BoolArray, Index, Leaf, NumpyArray

if TYPE_CHECKING:
    from attnops.masks.structure import MaskStructure, Split
    from attnops.masks.tokens import Segments


class Mask(abc.ABC):
    """Which query sees which key, without a T × S array.

    Masks combine with ``&``, ``|`` and ``~``. They are pytrees: a field that holds an int, a text or a function is
    static, any other is a leaf, so that a mask can be an argument of `jax.jit` and other transformations. A mask
    without arrays, or with numpy's only, is known when tracing, and so is the coverage of its tiles.

    Queries and keys are numbered from 0. For a mask of positions, query i is at position ``i + offset`` among the keys,
    where ``offset`` is ``S - T`` unless the mask has its own, so that the last query is at the last key; `at` gives
    tokens any other positions.
    """

    # numpy's operators then leave `array & mask` to the mask.
    __array_ufunc__ = None

    # For each field that may hold an array: its dimensions once bound, as letters of "bhts", each of that size or 1. A
    # shard of the call slices the arrays by them. None: the mask depends on b and h in some other way.
    axes: ClassVar[Mapping[str, str] | None] = None
    # The fields of ``axes`` whose numbers `as_data` leaves static.
    fixed: ClassVar[frozenset[str]] = frozenset()
    # For each field that holds a mask, the dimensions that its arrays share with the call; all for a missing field.
    inner_axes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Whether it only occurs within bound masks, so that `attnops.Limits` can't name it.
    is_internal: ClassVar[bool] = False
    # Whether `segments` gives the same mask as segment ids.
    has_segments: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls)

    @abc.abstractmethod
    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """Whether query ``q`` of head ``h`` in batch ``b`` sees key ``kv``: elementwise over indices that broadcast.

        Usable inside a kernel. The mask must be bound, see `bind`.
        """

    @abc.abstractmethod
    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        """What is certain about each tile of a grid, by interval arithmetic, O(1) per tile. The mask must be bound."""

    @abc.abstractmethod
    def __repr__(self) -> str:
        """The expression that makes this mask, arrays by dtype and shape."""

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        """This mask for scores of shape [B, H, T, S]: defaults that depend on the lengths are filled in.

        Raises:
            ValueError: an array of the mask does not fit.
        """
        return self

    def as_data(self) -> Mask:
        """This bound mask with its numbers as arrays, so that masks with other numbers are the same pytree structure.

        For `allowed` only: the coverage of such a mask's tiles is not known when tracing.
        """
        changes: dict[str, Leaf] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                changes[field.name] = value.as_data()
            elif type(value) is int and field.name in (self.axes or {}) and field.name not in self.fixed:
                changes[field.name] = np.int32(value)
        return replaced(self, changes) if changes else self

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        """This mask for tokens at positions other than their index: packed, shifted or permuted ones.

        Masks of positions (causal, window, chunk, prefix, lengths, ancestors, `MaskFn`) read them; masks of tokens
        (segments, padding, dense arrays) are unchanged. Where an argument is None, positions of an earlier `at` are
        kept.

        Args:
            q_positions: integers [T] or [B, T]. None leaves queries where they are: at ``i + offset`` by the mask's own
                offset, which defaults to ``S - T``; at ``i`` for `Lengths` and `MaskFn`, which have no offset.
                `Ancestors` reads only a row's first.
            kv_positions: integers [S] or [B, S]; None for ``j``.

        Raises:
            ValueError: the mask has an offset of its own, and ``q_positions`` are given too.
        """
        return self

    def kinds(self) -> frozenset[str]:
        """The primitives and operators that this mask is made of, such as ``{"Causal", "&", "Segments"}``."""
        return frozenset({type(self).__name__})

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        """Whether a query may see no key, or no query may see some key; such tokens may hold any value, even NaN.

        False is certain; True may be too cautious. The mask must be bound.
        """
        return not (T == S and self.sees_itself())

    def sees_itself(self) -> bool:
        """Whether it is certain, when tracing, that each query i sees key i. The mask must be bound."""
        return False

    def bands(self) -> Iterator[tuple[Index, Index]]:
        """The parts of this mask that depend on ``q - kv`` alone, as the (lowest, highest) that they allow."""
        return iter(())

    def segments(self) -> Segments:
        """The same mask as `Segments`, of a class with ``has_segments``. The mask must be bound."""
        raise NotImplementedError(f"{type(self).__name__} is not a mask of segments")

    def dense(self, B: int, H: int, T: int, S: int) -> jax.Array:
        """The mask as booleans that broadcast to [B, H, T, S]. O(T · S) memory."""
        indices = (
            jnp.arange(size).reshape([-1 if axis == dim else 1 for axis in range(4)])
            for dim, size in enumerate((B, H, T, S))
        )
        return jnp.asarray(self.bind(B, H, T, S).allowed(*indices))

    def coverage(self, q_range: tuple[int, int], kv_range: tuple[int, int]) -> Coverage | NumpyArray | Array:
        """Whether the tile of queries ``q_range`` and keys ``kv_range`` (stop excluded) is EMPTY, PARTIAL or FULL.

        EMPTY and FULL are certain; PARTIAL may be either where interval arithmetic can't tell. The mask must be bound.

        Returns:
            A `Coverage`; an int8 array of them, [B or 1, H or 1], for a mask that varies by batch or head or is traced.

        Raises:
            ValueError: a range is empty, or begins below 0.
        """
        for name, (start, stop) in (("q_range", q_range), ("kv_range", kv_range)):
            if not 0 <= start < stop:
                raise ValueError(f"{name}=({start}, {stop}) must hold at least one index, stop excluded, none below 0")
        (q, q_stop), (kv, kv_stop) = q_range, kv_range
        codes = tight_bounds(self, Grid.make([q], q_stop - q, q_stop, [kv], kv_stop - kv, kv_stop)).codes()
        if isinstance(codes, jax.Array) or codes.size > 1:
            return codes[:, :, 0, 0]
        return Coverage(int(codes.reshape(())))

    def describe(self) -> dict[str, Any]:
        """The fields of an `attnops.dispatch.request.AttentionRequest` that describe this mask."""
        return {"mask": repr(self), "mask_kinds": self.kinds(), "mask_shape": None}

    def structure(self, T: int, S: int) -> MaskStructure:
        """What is known of this mask when tracing: its band, whether it has segments, the rest. It must be bound."""
        # Imported here, in `split` too, since that module imports this one and its subclasses.
        from attnops.masks.structure import structure

        return structure(self, T, S)

    def split(self) -> Split:
        """This mask as ``(band, segments, rest)``, whose conjunction it is. It must be bound.

        For kernels that have a band and segment ids as numbers and arrays of their own::

            band, segments, rest = mask.split()
            low, high = band.low, band.high  # (0, None) is causal
            ids = None if segments is None else (segments.q_ids, segments.kv_ids)
            bias = None if rest is None else jnp.where(rest.dense(B, H, T, S), 0, -jnp.inf)

        Bands are intersected under ``&``, and merged under ``|`` and ``~`` if the result is a band. A band that is
        traced, or varies by batch or head, is in the rest.
        """
        from attnops.masks.structure import split

        return split(self)

    def show(self, T: int, S: int | None = None, *, b: int = 0, h: int = 0) -> str:
        """A picture in text, one row per query: ``█`` sees the key, ``·`` does not.

        Args:
            T: queries.
            S: keys; None for T.
            b: index of the batch.
            h: index of the head.
        """
        return picture(self, T, T if S is None else S, b, h)

    def __str__(self) -> str:
        return f"{self!r}\n{small_picture(self)}"

    def __and__(self, other: object) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: object) -> Mask:
        return Or(self, _as_mask(other))

    def __rand__(self, other: object) -> Mask:
        return And(_as_mask(other), self)

    def __ror__(self, other: object) -> Mask:
        return Or(_as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same expression over equal arrays; traced arrays are equal only to themselves."""
        if type(self) is not type(other):
            return NotImplemented
        (leaves, tree), (others, other_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        same: bool = tree == other_tree  # type: ignore[operator]
        return same and all(map(equal_leaves, leaves, others))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self!r} is ambiguous; combine masks with &, | and ~, not with and, or and not")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean array, True where a query may attend. The only mask of O(T · S) memory.

    Attributes:
        array: boolean, 4-D, broadcasts to [B, H, T, S].
    """

    array: Leaf

    axes: ClassVar = {"array": "bhts"}

    def __post_init__(self) -> None:
        if not hasattr(self.array, "shape"):
            object.__setattr__(self, "array", np.asarray(self.array))

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        check_broadcastable("Dense's array", tuple(self.array.shape), (B, H, T, S), "add axes of size 1")
        check_boolean("Dense's array", self.array)
        return self

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        index = (i if size > 1 else 0 for i, size in zip((b, h, q, kv), self.array.shape, strict=True))
        return jnp.asarray(self.array)[tuple(index)] & (q == q) & (kv == kv)

    def dense(self, B: int, H: int, T: int, S: int) -> jax.Array:
        return jnp.asarray(self.array)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
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
        return CoverageBounds(some, every)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"mask_shape": tuple(self.array.shape)}

    def __repr__(self) -> str:
        return f"Dense({text(self.array)})"


def _as_mask(value: Leaf) -> Mask:
    """A mask unchanged; a boolean array of rank 4 as `Dense`. Raises a `TypeError` for anything else."""
    if isinstance(value, Mask):
        return value
    if getattr(value, "ndim", None) == 4 and value.dtype == np.bool_:
        return Dense(value)
    raise TypeError(f"a mask combines with masks and with boolean arrays of rank 4, not with {type(value).__name__}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    """Two masks combined.

    Attributes:
        left: the left operand.
        right: the right operand.
    """

    left: Mask
    right: Mask

    axes: ClassVar = {}
    symbol = ""

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return dataclasses.replace(self, left=self.left.bind(B, H, T, S), right=self.right.bind(B, H, T, S))

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        positions = q_positions, kv_positions
        return dataclasses.replace(self, left=self.left.at(*positions), right=self.right.at(*positions))

    def kinds(self) -> frozenset[str]:
        return self.left.kinds() | self.right.kinds() | {self.symbol}

    def bands(self) -> Iterator[tuple[Index, Index]]:
        yield from self.left.bands()
        yield from self.right.bands()

    def __repr__(self) -> str:
        sides = (f"({x!r})" if isinstance(x, _Pair) and x.symbol != self.symbol else repr(x)
                 for x in (self.left, self.right))  # fmt: skip
        return f" {self.symbol} ".join(sides)


class And(_Pair):
    """A key is seen where both masks allow it."""

    symbol = "&"

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return self.left.allowed(b, h, q, kv) & self.right.allowed(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return self.left.coverage_bounds(grid) & self.right.coverage_bounds(grid)

    def sees_itself(self) -> bool:
        return self.left.sees_itself() and self.right.sees_itself()


class Or(_Pair):
    """A key is seen where either mask allows it."""

    symbol = "|"

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return self.left.allowed(b, h, q, kv) | self.right.allowed(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return self.left.coverage_bounds(grid) | self.right.coverage_bounds(grid)

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        return (
            self.left.has_fully_masked_tokens(T, S)
            and self.right.has_fully_masked_tokens(T, S)
            and super().has_fully_masked_tokens(T, S)
        )

    def sees_itself(self) -> bool:
        return self.left.sees_itself() or self.right.sees_itself()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """A key is seen where the mask does not allow it."""

    mask: Mask

    axes: ClassVar = {}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return type(self)(self.mask.bind(B, H, T, S))

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        return Not(self.mask.at(q_positions, kv_positions))

    def kinds(self) -> frozenset[str]:
        return self.mask.kinds() | {"~"}

    def bands(self) -> Iterator[tuple[Index, Index]]:
        return self.mask.bands()

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return np.True_ ^ self.mask.allowed(b, h, q, kv)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        return ~self.mask.coverage_bounds(grid)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Pair) else f"~{self.mask!r}"
