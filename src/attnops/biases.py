"""Biases of the scores without T × S arrays: by distance, by bucket, by a function.

A bias acts on the scores after scale and soft cap, before the mask. An array that broadcasts to [B, H, T, S] is also a
bias, without any of these classes. Biased scores are finite or −inf; +inf or NaN makes only its own row NaN.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.functions import INDEX, SCORE, Bound, Opaque, as_data, bind_function, name_of
from attnops.programs.program import Program
from attnops.programs.pytree import register
from attnops.programs.tracing import CALLS
from attnops.typing import Array, Function, Index, Leaf, NumpyArray, PyTree

__all__ = [
    "ALiBi",
    "Bias",
    "RelativeBias",
    "RelativePosition",
    "ScoreFn",
    "ShiftedBias",
    "alibi_slopes",
]

# The arguments of a function of scores that precede ``args``: scores, b, h, q, kv.
_ARGUMENTS: Final = (SCORE, INDEX, INDEX, INDEX, INDEX)
# Leaves room in int32 for indices to be added.
_FARTHEST_OFFSET: Final = 2**31 - 1 - 2**27


class Bias(abc.ABC):
    """A change of the scores before the mask. A pytree: arrays and floats are leaves, and have gradients; a field that
    holds an int, a text or a function is static.

    Query i is at position ``i + offset`` among the keys; ``offset`` is ``S - T`` unless the bias has its own, an int
    or an integer array [], which may be traced.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls)

    # As `attnops.masks.Mask.axes`: letters of "bhts" for the dimensions of each array field; a dot is any other one.
    axes: ClassVar[Mapping[str, str] | None] = None

    @abc.abstractmethod
    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        """The scores with the bias, float32, elementwise over indices that broadcast with ``scores``.

        Usable inside a kernel. The bias must be bound, see `bind`.
        """

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        """This bias for scores of shape [B, H, T, S].

        Raises:
            ValueError: an array of the bias does not fit.
        """
        return self

    def as_data(self) -> Bias:
        """This bound bias with the numbers of its functions as arrays, so that other numbers need no new program."""
        return self

    def kind(self) -> str:
        """The value of ``bias_kind`` in an `attnops.dispatch.request.AttentionRequest`."""
        return type(self).__name__


class RelativeBias(Bias):
    """A bias that depends only on the head and on the signed distance from the query to the key."""

    offset: Leaf

    @abc.abstractmethod
    def at_distance(self, h: Index, distance: Array) -> jax.Array:
        """The bias of head ``h`` for keys at ``distance`` = key's position − query's; float32, elementwise."""

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        offset = S - T if self.offset is None else _offset(type(self).__name__, self.offset)
        return dataclasses.replace(self, offset=offset)  # type: ignore[type-var]

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        return scores + self.at_distance(h, kv - q - self.offset)

    def by_distance(self, H: int, T: int, S: int) -> jax.Array:
        """The bias by head and index difference, [H, T + S − 1]; element ``d + T − 1`` is for ``kv − q = d``."""
        distance = jnp.arange(-(T - 1), S) - (0 if self.offset is None else self.offset)
        return jnp.asarray(self.at_distance(jnp.arange(H)[:, None], distance[None, :]))


@dataclasses.dataclass(frozen=True, eq=False)
class ALiBi(RelativeBias):
    """Attention with linear biases: ``−slope · |distance|`` (Press et al. 2022, arXiv:2108.12409).

    Attributes:
        slopes: [H], floating; `alibi_slopes` gives the paper's.
        offset: the position of query 0 among the keys, an int or an integer array []; None for S − T.
    """

    slopes: Leaf
    offset: Leaf = None

    axes: ClassVar = {"slopes": "h"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        slopes = _array(self.slopes)
        _check_shape("ALiBi's slopes", slopes, (H,), "[H]")
        return dataclasses.replace(super().bind(B, H, T, S), slopes=slopes)

    def at_distance(self, h: Index, distance: Array) -> jax.Array:
        slopes = jnp.asarray(self.slopes, jnp.float32)
        return -slopes[h] * jnp.abs(distance).astype(jnp.float32)

    def __repr__(self) -> str:
        return "ALiBi"


def alibi_slopes(heads: int) -> NumpyArray:
    """The slopes of the ALiBi paper, float32 [heads]: powers of ``2 ** (-8 / n)``, n the largest power of two ≤ heads.

    If heads is not a power of two, the remaining slopes are every other slope for 2n heads, as in the authors' code.
    """
    n = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8 / n * np.arange(1, n + 1))
    others = 2.0 ** (-4 / n * np.arange(1, 2 * n + 1, 2))[: heads - n]
    return np.concatenate([first, others]).astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class RelativePosition(RelativeBias):
    """T5's learned bias by bucket of distance (Raffel et al. 2020, arXiv:1910.10683).

    Half the buckets hold exact distances, half grow logarithmically up to ``max_distance``; bidirectional splits them
    between keys behind and keys ahead. Equals ``T5Attention._relative_position_bucket`` of Hugging Face transformers.

    Attributes:
        table: [buckets, H], floating, learned.
        bidirectional: whether keys ahead have separate buckets; else they count as distance 0.
        max_distance: distances from this one on share a bucket.
        offset: the position of query 0 among the keys, an int or an integer array []; None for S − T.
    """

    table: Leaf
    bidirectional: bool = True
    max_distance: int = 128
    offset: Leaf = None

    axes: ClassVar = {"table": ".h"}

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        table = _array(self.table)
        if table.ndim != 2 or table.shape[1] != H:
            raise ValueError(f"RelativePosition's table has shape {table.shape}, but must be [buckets, H={H}]")
        exact = table.shape[0] // (4 if self.bidirectional else 2)
        if not 1 <= exact < self.max_distance:
            raise ValueError(
                f"RelativePosition's {table.shape[0]} buckets hold {exact} exact distances a direction, and "
                f"max_distance={self.max_distance}: there must be at least 1, and fewer than max_distance; "
                f"change the table or max_distance"
            )
        return dataclasses.replace(super().bind(B, H, T, S), table=table)

    def at_distance(self, h: Index, distance: Array) -> jax.Array:
        return jnp.asarray(self.table, jnp.float32)[self.bucket(distance), h]

    def bucket(self, distance: Array) -> Array:
        """The bucket of each distance, int32."""
        buckets = self.table.shape[0]
        first: Index = 0
        if self.bidirectional:
            buckets //= 2
            first = jnp.where(distance > 0, buckets, 0)
            behind = jnp.abs(distance)
        else:
            behind = jnp.maximum(-distance, 0)
        exact = buckets // 2
        # float32 throughout, as in the models trained with it; the maximum avoids log(0).
        ratio = jnp.log(jnp.maximum(behind, 1).astype(jnp.float32) / exact) / np.float32(
            np.log(self.max_distance / exact)
        )
        logarithmic = exact + (ratio * (buckets - exact)).astype(jnp.int32)
        return first + jnp.where(behind < exact, behind, jnp.minimum(logarithmic, buckets - 1))

    def __repr__(self) -> str:
        return "RelativePosition"


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFn(Bias):
    """Scores changed by a function, such as a bias by position or a scale by token.

    The function is traced on scalars at every call, and arrays that it closes over are read then: a later call, or
    another `jax.jit`, sees their values at that time. Functions with equal jaxprs share compiled programs. As an
    argument of `jax.jit` the function is static, and JAX treats bound methods of one object as equal whatever the
    object holds: give arrays that change as ``args``.

    Attributes:
        fn: ``fn(scores, b, h, q, kv, *args)`` gives the new scores, elementwise in jnp: float32 scores and integer
            indices that broadcast with them. It must be differentiable with respect to the scores and ``args``.
            It is evaluated for every pair of indices, including masked ones, and its value and derivatives must be
            finite for all: 0 times NaN is NaN. Write ``log1p(maximum(q - kv, 0))`` if a mask hides ``q < kv``.
            An index out of range is clamped, as JAX indexes arrays.
        args: arrays that the function uses, numpy's or JAX's. Floating ones have gradients, and so do traced arrays
            that the function closes over.
    """

    fn: Function
    args: tuple[PyTree, ...] = ()

    def bind(self, B: int, H: int, T: int, S: int) -> Bias:  # type: ignore[override]
        """See `Bias.bind`."""
        args = as_data(f"{self!r}'s args", self.args)
        bound = bind_function(self.fn, _ARGUMENTS, args, np.float32, CALLS)
        return ScoreFn(bound, args) if isinstance(bound, Opaque) else ScoreProgram(name_of(self.fn), *bound)

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        """See `Bias.apply`."""
        # numpy arrays can't be indexed with tracers.
        args = jax.tree.map(jnp.asarray, self.args)
        changed = jnp.asarray(self.fn(scores, b, h, q, kv, *args))
        if changed.dtype != scores.dtype or changed.shape != scores.shape:
            raise ValueError(
                f"{self!r} gave {changed.dtype} of shape {changed.shape}, but must give {scores.dtype} of the scores' "
                f"shape {scores.shape}"
            )
        return changed

    def __repr__(self) -> str:
        return f"ScoreFn({name_of(self.fn)})"


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreProgram(Bias):
    """A bound `ScoreFn`.

    Attributes:
        name: the function's name.
        program: its arguments are ``scores, b, h, q, kv`` and the data.
        data: the function's arguments ``args``, and the arrays that it closes over.
    """

    name: str
    program: Program
    data: tuple[Leaf, ...]

    def as_data(self) -> Bias:
        """See `Bias.as_data`."""
        program, numbers = self.program.without_literals()
        return ScoreProgram(self.name, program, (*self.data, *numbers))

    def kind(self) -> str:
        """See `Bias.kind`."""
        return "ScoreFn"

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        """See `Bias.apply`."""
        indices = (jnp.asarray(x, jnp.int32) for x in (b, h, q, kv))
        return jnp.broadcast_to(self.program.evaluate([scores, *indices], self.data), scores.shape)

    def __repr__(self) -> str:
        return f"ScoreFn({self.name})"


def function_of(bias: Bias) -> Bound | Opaque | None:
    """The function of a bound `ScoreFn`; None for any other bias."""
    if isinstance(bias, ScoreProgram):
        return Bound(bias.program, bias.data)
    return bias.fn if isinstance(bias, ScoreFn) and isinstance(bias.fn, Opaque) else None


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftedBias(Bias):
    """A bound bias, for a shard of the call that it is bound to.

    Attributes:
        bias: the bias of all batches and heads.
        b: the shard's first batch index, an integer array [].
        h: the shard's first query head, an integer array [].
    """

    bias: Bias
    b: Index
    h: Index

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        return self.bias.apply(scores, b + self.b, h + self.h, q, kv)

    def __repr__(self) -> str:
        return repr(self.bias)


def _offset(name: str, offset: Leaf) -> Leaf:
    """An int, or a traced integer array []."""
    is_int = isinstance(offset, int) and not isinstance(offset, bool)
    if is_int or (np.shape(offset) == () and np.dtype(getattr(offset, "dtype", float)).kind in "iu"):
        if not isinstance(offset, (int, np.ndarray, np.generic)):
            limits = np.iinfo(offset.dtype)
            low, high = max(-_FARTHEST_OFFSET, int(limits.min)), min(_FARTHEST_OFFSET, int(limits.max))
            return jnp.clip(offset, low, high).astype(jnp.int32)
        if abs(int(offset)) <= _FARTHEST_OFFSET:
            return int(offset)
        raise ValueError(
            f"{name}'s offset={offset} must be from -{_FARTHEST_OFFSET} to {_FARTHEST_OFFSET}, so that int32 holds "
            f"distances; count positions from the first token"
        )
    raise ValueError(f"{name}'s offset={offset!r} must be an int, or an integer array of shape []")


def _array(values: Leaf) -> Array:
    return values if hasattr(values, "shape") else np.asarray(values, np.float32)


def _check_shape(name: str, array: Leaf, shape: tuple[int, ...], letters: str) -> None:
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, but must have shape {letters}={shape}")
