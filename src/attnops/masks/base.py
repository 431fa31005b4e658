"""Mask: what every mask can do."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.program import Program

if TYPE_CHECKING:
    from attnops.masks.structure import MaskStructure, Split
    from attnops.masks.tiles import Coverage, Grid, TileCoverage


class Mask(abc.ABC):
    """Which query sees which key, without a T × S array.

    Masks combine with ``&``, ``|`` and ``~``. They are pytrees: a field that holds an array is a leaf, any other field
    is static, so that a mask passes through `jax.jit` and its siblings. One whose arrays are all numpy's, or that has
    none, is known when tracing; then its tiles are too.

    Queries and keys are numbered from 0. A mask that speaks of positions takes query i to stand at position
    ``i + offset`` among the keys, where ``offset`` is ``S - T`` unless the mask states one, so that the last query
    stands at the last key; `at` gives tokens any other positions.
    """

    # numpy's operators then leave `array & mask` to the mask.
    __array_ufunc__ = None

    # By field that may hold an array, once bound: what its dimensions are, letters of "bhts", each of that size or 1;
    # so a part of a call can have its own part of them. None: it asks about b and h in some other way.
    axes: ClassVar[Mapping[str, str] | None] = None
    # The fields among them whose numbers stay what they are in `as_data`.
    fixed: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, lambda static, leaves: _unflatten(cls, static, leaves))

    @abc.abstractmethod
    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        """Whether query ``q`` of head ``h`` in batch ``b`` sees key ``kv``: elementwise over indices that broadcast.

        Usable inside a kernel. The mask must be bound, see `bind`.
        """

    @abc.abstractmethod
    def tiles(self, grid: Grid) -> TileCoverage:
        """What is known of each tile of a grid, by interval arithmetic, O(1) a tile. The mask must be bound."""

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
        """This bound mask with its numbers as arrays, so that other numbers are the same pytree of other data.

        For `allowed` alone: what such a mask says of tiles is not known when tracing.
        """
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                changes[field.name] = value.as_data()
            elif type(value) is int and field.name in (self.axes or {}) and field.name not in self.fixed:
                changes[field.name] = np.int32(value)
        return _changed(self, changes) if changes else self

    def at(self, q_positions: Any = None, kv_positions: Any = None) -> Mask:
        """This mask for tokens that stand at other positions than their index: packed, shifted or permuted ones.

        What speaks of positions (causal, window, chunk, prefix, lengths, `MaskFn`) reads them; what speaks of tokens
        (segments, padding, dense arrays) is left as it is. Positions that an earlier `at` gave stay where this one
        gives none.

        Args:
            q_positions: integers [T] or [B, T]. None leaves queries where they stand without: at ``i + offset`` by the
                mask's own offset, ``S - T`` unless it states one; at ``i`` for `Lengths` and `MaskFn`, which have none.
            kv_positions: integers [S] or [B, S]; None for ``j``.

        Raises:
            ValueError: the mask states an offset, and ``q_positions`` say otherwise.
        """
        return self

    def kinds(self) -> frozenset[str]:
        """The primitives and operators that this mask is made of, such as ``{"Causal", "&", "Segments"}``."""
        return frozenset({type(self).__name__})

    def has_fully_masked_tokens(self, T: int, S: int) -> bool:
        """Whether there may be tokens that nobody sees, or that see nothing; they may hold anything, NaN too.

        False is certain. The mask must be bound.
        """
        return not (T == S and self.sees_itself())

    def sees_itself(self) -> bool:
        """Whether it is certain, when tracing, that each query i sees key i. The mask must be bound."""
        return False

    def bands(self) -> Iterator[tuple[Any, Any]]:
        """The parts of this mask that depend on ``q - kv`` alone, as the (lowest, highest) that they allow."""
        return iter(())

    def dense(self, B: int, H: int, T: int, S: int) -> jax.Array:
        """The mask as booleans that broadcast to [B, H, T, S]. O(T · S) memory."""
        indices = (
            jnp.arange(size).reshape([-1 if axis == own else 1 for axis in range(4)])
            for own, size in enumerate((B, H, T, S))
        )
        return jnp.asarray(self.bind(B, H, T, S).allowed(*indices))

    def coverage(self, q_range: tuple[int, int], kv_range: tuple[int, int]) -> Coverage | np.ndarray[Any, Any] | Any:
        """Whether the tile of queries ``q_range`` and keys ``kv_range`` (stop excluded) is EMPTY, PARTIAL or FULL.

        EMPTY and FULL are certain; PARTIAL may be either where interval arithmetic can't tell. The mask must be bound.

        Returns:
            A `Coverage`; an array of them, [B, H], for a mask that differs by batch or head or is traced.
        """
        from attnops.masks.tiles import one_tile

        return one_tile(self, q_range, kv_range)

    def describe(self) -> dict[str, Any]:
        """What a request says of this mask: fields of `attnops.dispatch.request.AttentionRequest`."""
        return {"mask": repr(self), "mask_kinds": self.kinds(), "mask_shape": None}

    def structure(self, T: int, S: int) -> MaskStructure:
        """What is known of this mask when tracing: its band, whether it has segments, what else. It must be bound."""
        from attnops.masks.structure import structure

        return structure(self, T, S)

    def split(self) -> Split:
        """This mask as ``(band, segments, rest)``, whose conjunction it is. It must be bound.

        For kernels that take some of them as numbers and arrays of their own::

            band, segments, rest = mask.split()
            low, high = band.low, band.high  # (0, None) is causal
            ids = None if segments is None else (segments.q_ids, segments.kv_ids)
            bias = None if rest is None else jnp.where(rest.dense(B, H, T, S), 0, -jnp.inf)

        Bands are intersected under ``&``; those under ``|`` and ``~`` are found where the result is a band again. What
        is traced, or differs by batch or head, is in the rest.
        """
        from attnops.masks.structure import split

        return split(self)

    def show(self, T: int, S: int | None = None, *, b: int = 0, h: int = 0) -> str:
        """A picture in text, a row a query: ``█`` sees the key, ``·`` does not.

        Args:
            T: queries.
            S: keys; None for T.
            b: which of the batch.
            h: which head.
        """
        from attnops.masks.picture import picture

        return picture(self, T, T if S is None else S, b, h)

    def __str__(self) -> str:
        from attnops.masks.picture import small_picture

        return f"{self!r}\n{small_picture(self)}"

    def __and__(self, other: Any) -> Mask:
        from attnops.masks.algebra import And, as_mask

        return And(self, as_mask(other))

    def __or__(self, other: Any) -> Mask:
        from attnops.masks.algebra import Or, as_mask

        return Or(self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        from attnops.masks.algebra import And, as_mask

        return And(as_mask(other), self)

    def __ror__(self, other: Any) -> Mask:
        from attnops.masks.algebra import Or, as_mask

        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        from attnops.masks.algebra import Not

        return Not(self)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same expression over equal arrays; traced arrays are equal only to themselves."""
        if type(self) is not type(other):
            return NotImplemented
        (leaves, tree), (others, other_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        same: bool = tree == other_tree  # type: ignore[operator]
        return same and all(map(_equal, leaves, others))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self!r} is ambiguous; combine masks with &, | and ~, not with and, or and not")


def _equal(a: Any, b: Any) -> bool:
    if a is b or any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        return a is b
    return np.array_equal(a, b)


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str, Program)) or callable(value)


def _flatten(mask: Mask) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
    leaves, static = [], []
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if _is_static(value):
            static.append((field.name, value))
        else:
            leaves.append(value)
    return leaves, tuple(static)


def _changed(mask: Mask, changes: Mapping[str, Any]) -> Mask:
    # Not through __init__, which may want a number.
    found: Mask = object.__new__(type(mask))
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        object.__setattr__(found, field.name, changes.get(field.name, getattr(mask, field.name)))
    return found


def _unflatten(cls: type[Mask], static: tuple[tuple[str, Any], ...], leaves: Any) -> Mask:
    # Not through __init__: JAX unflattens with placeholders that no check would accept.
    mask = object.__new__(cls)
    fixed = dict(static)
    remaining = iter(leaves)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        object.__setattr__(mask, field.name, fixed[field.name] if field.name in fixed else next(remaining))
    return mask
