"""Masks and biases as functions of scores, and the arrays that go with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from attnops.biases import Bias, function_of
from attnops.kernels.elementwise import ARGUMENTS, AXES, Elementwise, split_program
from attnops.masks.base import Dense, Mask
from attnops.masks.chosen import Blocks
from attnops.masks.functions import MaskFn
from attnops.programs.functions import INDEX, SCORE, Bound
from attnops.programs.tracing import CALLS, WITH_DERIVATIVES, trace
from attnops.typing import Aval, BoolArray, Index, Leaf, PyTree

if TYPE_CHECKING:
    from attnops.masks import CoverageBounds, Grid


class MaskParts(NamedTuple):
    """A bound mask split for kernels.

    Attributes:
        function: the mask as a function.
        leaves: the argument of `Elementwise.compute`.
        dense: the mask's arrays of T × S elements, [B or 1, H or 1, T, S] booleans, whose tiles are arguments of
            `Elementwise.apply`; then its `attnops.masks.Blocks`, except those with one block of queries or of keys.
    """

    function: Elementwise
    leaves: list[Leaf]
    dense: list[Leaf]


class BiasParts(NamedTuple):
    """A bound bias split for kernels.

    Attributes:
        function: the bias as a function.
        leaves: the argument of `Elementwise.compute`.
    """

    function: Elementwise
    leaves: list[Leaf]


def of_mask(mask: Mask, by_row: bool = False) -> MaskParts:
    """A bound mask split for kernels. Traces it, unless an equal one was traced.

    Args:
        mask: bound.
        by_row: whether integers per key that depend only on values per sequence are computed on a tile, for kernels
            whose tiles each belong to one sequence.
    """
    leaves, tree = jax.tree.flatten(mask, is_leaf=_is_tiled)
    tiled = tuple(type(leaf) if _is_tiled(leaf) else None for leaf in leaves)
    plain = [leaf for leaf, kind in zip(leaves, tiled, strict=True) if kind is None]
    arrays = [leaf.array for leaf, kind in zip(leaves, tiled, strict=True) if kind is Dense]
    arrays += [leaf for leaf, kind in zip(leaves, tiled, strict=True) if kind is Blocks]

    avals = _avals(plain)
    wide = jax.dtypes.canonicalize_dtype(np.int64)
    kept = _kept_mask(tree, tiled, avals, wide, by_row) if _is_structural(mask) else None
    if kept is not None:
        return MaskParts(kept, plain, arrays)
    split, constants = _trace_mask(tree, tiled, avals, by_row)
    return MaskParts(split, [*plain, *constants], arrays)


def _trace_mask(
    tree: PyTreeDef, tiled: tuple[type | None, ...], avals: tuple[Aval, ...], by_row: bool
) -> tuple[Elementwise, list[Leaf]]:
    """A mask as a function, and the arrays that it closes over."""
    n, n_dense = len(avals), tiled.count(Dense)

    def function(b: Index, h: Index, q: Index, kv: Index, *arrays: Leaf) -> PyTree:
        plain, dense, chosen = (iter(x) for x in (arrays[:n], arrays[n : n + n_dense], arrays[n + n_dense :]))
        leaves = [next(plain) if kind is None else _Given(next(dense if kind is Dense else chosen)) for kind in tiled]
        return jax.tree.unflatten(tree, leaves).allowed(b, h, q, kv)

    scores = [jax.ShapeDtypeStruct((), jnp.bool_)] * (len(tiled) - tiled.count(None))
    traced = trace(function, [*(INDEX,) * 4, *avals, *scores], CALLS | WITH_DERIVATIVES)
    leaves = [*avals, *_avals(traced.constants)]
    return split_program(traced.program, AXES, leaves, len(scores), by_row), traced.constants


@functools.lru_cache(maxsize=512)
def _kept_mask(
    tree: PyTreeDef, tiled: tuple[type | None, ...], avals: tuple[Aval, ...], wide: Aval, by_row: bool
) -> Elementwise | None:
    """A mask that its structure determines; None if it closes over arrays. ``wide`` is JAX's widest integer dtype."""
    split, constants = _trace_mask(tree, tiled, avals, by_row)
    return None if constants else split


def _is_structural(mask: Mask) -> bool:
    """Whether masks of one pytree structure compute the same function: True if all are the core's classes."""
    is_of_core = type(mask).__module__.startswith("attnops.") and not isinstance(mask, MaskFn)
    return is_of_core and all(_is_structural(x) for x in vars(mask).values() if isinstance(x, Mask))


def of_bias(bias: Bias, by_row: bool = False) -> BiasParts:
    """A bound bias split for kernels; ``by_row`` as in `of_mask`.

    Traces it, unless it is a traced `attnops.biases.ScoreFn`.
    """
    function = function_of(bias)
    if isinstance(function, Bound):
        return BiasParts(split_program(function.program, ARGUMENTS, _avals(function.data), 0, by_row), [*function.data])
    leaves, tree = jax.tree.flatten(bias)
    traced = trace(
        lambda scores, b, h, q, kv, *arrays: jax.tree.unflatten(tree, arrays).apply(scores, b, h, q, kv),
        [SCORE, *(INDEX,) * 4, *_avals(leaves)], CALLS,
    )  # fmt: skip
    every = [*leaves, *traced.constants]
    return BiasParts(split_program(traced.program, ARGUMENTS, _avals(every), 0, by_row), every)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Given(Mask):
    """A placeholder for a dense array or for blocks: their value at one score."""

    seen: BoolArray

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return self.seen

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        raise NotImplementedError

    def __repr__(self) -> str:
        return "Dense"


def _is_tiled(leaf: Leaf) -> bool:
    if not isinstance(leaf, (Dense, Blocks)):
        return False
    return min((leaf.array if isinstance(leaf, Dense) else leaf.chosen).shape[2:]) > 1


def _avals(leaves: Sequence[Leaf]) -> tuple[Aval, ...]:
    return tuple(jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
