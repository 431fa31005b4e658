"""The primitives that masks are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from attnops.masks.algebra import At, take, text, token_array
from attnops.masks.base import Mask
from attnops.masks.tiles import Grid, TileCoverage

# Further than any two tokens are apart, and small enough that sums of a few of them fit 32 bits.
_FAR = 1 << 29


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every query sees every key."""

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q == q) & (kv == kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        every = np.ones(np.broadcast_shapes(np.shape(grid.q_first), np.shape(grid.kv_first)), bool)
        return TileCoverage(every, every)

    def hides_tokens(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "Full()"


class _Tokens(Mask):
    """A mask of what tokens are; lists become numpy arrays."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, (list, tuple)):
                object.__setattr__(self, field.name, np.asarray(value))


class _Positional(Mask):
    """A mask of positions: query i stands at ``i + offset``, key j at ``j``."""

    offset: Any

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        values: dict[str, Any] = {"offset": S - T if self.offset is None else self.offset}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = values.get(field.name, getattr(self, field.name))
            values[field.name] = _number(f"{type(self).__name__}'s {field.name}", value, B, H)
        return type(self)(**values)

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return At(self, q_positions, kv_positions)

    def without_offset(self) -> Self:
        return dataclasses.replace(self, offset=0)  # type: ignore[type-var]

    def hides_tokens(self) -> bool:
        return False

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        given = [text(value) for name, value in fields if name != "offset"]
        if self.offset is not None:
            given.append(f"offset={text(self.offset)}")
        return f"{type(self).__name__}({', '.join(given)})"


def _number(name: str, value: Any, B: int, H: int) -> Any:
    """An int, or an integer array [B or 1, H or 1]."""
    if value is None or isinstance(value, int):
        return value
    if not hasattr(value, "shape") or np.dtype(value.dtype).kind not in "iu":
        raise ValueError(f"{name}={value!r} must be an int, or an integer array of shape [B or 1, H or 1]")
    if value.shape == ():
        return int(value) if isinstance(value, (np.ndarray, np.generic)) else value
    if len(value.shape) != 2 or any(size not in (1, full) for size, full in zip(value.shape, (B, H), strict=True)):
        raise ValueError(
            f"{name} has shape {value.shape}, but must be a number or have shape [B or 1, H or 1]=[{B}, {H}]; write "
            f"one a batch as x[:, None], one a head as x[None]"
        )
    return value


def _pick(value: Any, b: Any, h: Any) -> Any:
    """``value[b, h]`` of a number or an array [B or 1, H or 1]."""
    if getattr(value, "ndim", 0) == 0:
        return value
    value = jnp.asarray(value)
    return value[b if value.shape[0] > 1 else 0, h if value.shape[1] > 1 else 0]


def _spread(value: Any) -> Any:
    """A number or an array [B or 1, H or 1] beside tiles [B, H, tiles of q, tiles of kv]."""
    return value if getattr(value, "ndim", 0) == 0 else value[:, :, None, None]


class _Band(_Positional):
    """A mask of ``q - kv`` alone: between two numbers, both included."""

    def _limits(self) -> tuple[Any, Any]:
        """The lowest and the highest ``q + offset - kv`` that is seen, before the offset; None where there is none."""
        raise NotImplementedError

    def _band(self, value: Callable[[Any], Any]) -> tuple[Any, Any]:
        low, high = self._limits()
        offset = value(self.offset)
        return -_FAR if low is None else value(low) - offset, _FAR if high is None else value(high) - offset

    def bands(self) -> Iterator[tuple[Any, Any]]:
        yield self._band(_spread)

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        low, high = self._band(lambda value: _pick(value, b, h))
        limits = self._limits()
        seen: Any = np.True_
        if limits[0] is not None:
            seen = q - kv >= low
        if limits[1] is not None:
            seen = seen & (q - kv <= high)
        return seen | (kv != kv) if seen is np.True_ else seen

    def tiles(self, grid: Grid) -> TileCoverage:
        low, high = self._band(_spread)
        lowest, highest = grid.difference()
        return TileCoverage((highest >= low) & (lowest <= high), (lowest >= low) & (highest <= high))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(_Band):
    """No query sees a key that comes after it: key j is seen by query i when ``j <= i + offset``.

    ::

        Causal(), T = S = 4     Causal(), T = 2, S = 4    Causal(offset=0), T = 2, S = 4
        █ · · ·                 █ █ █ ·                   █ · · ·
        █ █ · ·                 █ █ █ █                   █ █ · ·
        █ █ █ ·
        █ █ █ █

    Attributes:
        offset: the position of query 0 among the keys; an int, or an integer array [B or 1, H or 1].
            None aligns at the end: the last query sees the last key, whatever T and S.
    """

    offset: Any = None

    def _limits(self) -> tuple[Any, Any]:
        return 0, None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(_Band):
    """Each query sees the keys around it: key j when ``i − left <= j <= i + right``, i being the query's position.

    A model whose config says ``sliding_window=4096`` sees itself and 4,095 before: ``SlidingWindow(4095, 0)``.

    ::

        SlidingWindow(1, 0)     SlidingWindow(1, 1)
        █ · · ·                 █ █ · ·
        █ █ · ·                 █ █ █ ·
        · █ █ ·                 · █ █ █
        · · █ █                 · · █ █

    Attributes:
        left: keys before, an int >= 0 or an integer array [B or 1, H or 1]; None for all.
        right: keys after, likewise.
        offset: see `Causal`.
    """

    left: Any
    right: Any
    offset: Any = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"SlidingWindow's {name}={value} must be at least 0, or None for all")

    def _limits(self) -> tuple[Any, Any]:
        return None if self.right is None else -self.right, self.left


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunked(_Positional):
    """Positions are cut into chunks, and each query sees the keys of its own: ``i // size == j // size``.

    ::

        Chunked(2)
        █ █ · ·
        █ █ · ·
        · · █ █
        · · █ █

    Attributes:
        size: positions a chunk, an int >= 1 or an integer array [B or 1, H or 1].
        offset: see `Causal`.
    """

    size: Any
    offset: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.size, int) and self.size < 1:
            raise ValueError(f"Chunked's size={self.size} must be at least 1")

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        size, offset = _pick(self.size, b, h), _pick(self.offset, b, h)
        return (q + offset) // size == kv // size

    def tiles(self, grid: Grid) -> TileCoverage:
        size, offset = _spread(self.size), _spread(self.offset)
        q_first, q_last = (grid.q_first + offset) // size, (grid.q_last + offset) // size
        return _same(q_first, q_last, grid.kv_first // size, grid.kv_last // size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(_Positional):
    """A prefix that every query sees, and causal after it: ``j < length`` or ``j <= i + offset``.

    ::

        PrefixLM(2)
        █ █ · ·
        █ █ · ·
        █ █ █ ·
        █ █ █ █

    Attributes:
        length: keys of the prefix, an int or an integer array [B or 1, H or 1].
        offset: see `Causal`.
    """

    length: Any
    offset: Any = None

    def bands(self) -> Iterator[tuple[Any, Any]]:
        return self._causal().bands()

    def _causal(self) -> Causal:
        return Causal(self.offset)

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < _pick(self.length, b, h)) | self._causal().allowed(b, h, q, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return _below(grid.kv_first, grid.kv_last, _spread(self.length)) | self._causal().tiles(grid)


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
    """

    q_ids: Any
    kv_ids: Any = None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, length: int) -> Segments:
        """From cumulative lengths, [0, n₁, n₁ + n₂, …]: what follows the last is a segment of its own, of padding.

        Args:
            cu_seqlens: integers [documents + 1], not decreasing.
            length: T = S.
        """
        xp = np if isinstance(cu_seqlens, (np.ndarray, list, tuple)) else jnp
        return cls(xp.searchsorted(xp.asarray(cu_seqlens), xp.arange(length), side="right"))

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        if self.kv_ids is None and T != S:
            raise ValueError(f"Segments has one array of ids, but T={T} and S={S} differ: give Segments(q_ids, kv_ids)")
        q_ids = token_array("Segments' q_ids", self.q_ids, B, T)
        kv_ids = q_ids if self.kv_ids is None else token_array("Segments' kv_ids", self.kv_ids, B, S)
        return type(self)(q_ids, kv_ids)

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return take(self.q_ids, b, q) == take(self.kv_ids, b, kv)

    def tiles(self, grid: Grid) -> TileCoverage:
        return _same(*grid.q_extent(self.q_ids), *grid.kv_extent(self.kv_ids))

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

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        given = []
        for name in ("kv_lengths", "q_lengths"):
            value = getattr(self, name)
            if value is not None and value.shape != (B,):
                raise ValueError(f"Lengths' {name} has shape {value.shape}, but must have shape [B]=({B},)")
            given.append(value)
        return type(self)(*given)

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return At(self, q_positions, kv_positions)

    def without_offset(self) -> Self:
        return self

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = kv < jnp.asarray(self.kv_lengths)[b]
        return seen & (q == q) if self.q_lengths is None else seen & (q < jnp.asarray(self.q_lengths)[b])

    def tiles(self, grid: Grid) -> TileCoverage:
        keys = _below(grid.kv_first, grid.kv_last, self.kv_lengths[:, None, None, None])
        if self.q_lengths is None:
            return keys
        return keys & _below(grid.q_first, grid.q_last, self.q_lengths[:, None, None, None])

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

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        values = token_array("KeyPadding's is_token", self.is_token, B, S)
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

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        from attnops.binding import check_broadcastable

        check_broadcastable("Dense's array", tuple(self.array.shape), (B, H, T, S), "add axes of size 1")
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskFn(Mask):
    """A mask that a function computes. Nothing is known of its tiles, so every one is PARTIAL.

    Combine it with what is known, ``Causal() & MaskFn(fn)``, and the tiles that are empty by that are skipped.

    Attributes:
        fn: ``fn(b, h, q, kv, *args)`` gives a boolean, elementwise in jnp over integer arrays that broadcast.
            q and kv are indices, or positions where `at` gives them.
        args: arrays that the function needs; they pass through `jax.jit`, where arrays that it closes over can't.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        return At(self, q_positions, kv_positions)

    def without_offset(self) -> Self:
        return self

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = jnp.asarray(self.fn(b, h, q, kv, *self.args))
        if seen.dtype != np.bool_:
            raise ValueError(f"{self!r} gave dtype {seen.dtype}, but must give booleans")
        return seen

    def tiles(self, grid: Grid) -> TileCoverage:
        shape = np.broadcast_shapes(np.shape(grid.q_first), np.shape(grid.kv_first))
        return TileCoverage(np.ones(shape, bool), np.zeros(shape, bool))

    def __repr__(self) -> str:
        return f"MaskFn({getattr(self.fn, '__name__', self.fn)})"


def _same(q_first: Any, q_last: Any, kv_first: Any, kv_last: Any) -> TileCoverage:
    """Pairs of equal numbers, where queries have all those between two, and so have keys."""
    some = (q_first <= kv_last) & (kv_first <= q_last)
    return TileCoverage(some, (q_first == q_last) & (kv_first == kv_last) & (q_first == kv_first))


def _below(first: Any, last: Any, limit: Any) -> TileCoverage:
    """Numbers from ``first`` to ``last`` that are below a limit."""
    return TileCoverage(first < limit, last < limit)
