"""Biases tile by tile: the slices that a tile needs, their effect on its scores, and their gradients."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias, RelativeBias
from attnops.operations.flash.plan import NativePlan, NativeTileIndex, quotient_and_remainder
from attnops.sharding.placing import reshaped

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

# In gradients, None for a leaf without one.
Leaves: TypeAlias = tuple[Any, ...]


def inexact_leaves(leaves: Leaves) -> Leaves:
    """The floating-point leaves, which have a gradient; None for the others."""
    return tuple(leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in leaves)


class TileBias(abc.ABC):
    """A bias, applied tile by tile. Static and hashable; its arrays, the leaves, are arguments of each method."""

    @abc.abstractmethod
    def load(self, plan: NativePlan, leaves: Leaves, index: NativeTileIndex) -> Leaves:
        """The slices of the leaves that a tile needs."""

    @abc.abstractmethod
    def apply(self, plan: NativePlan, scores: jax.Array, slices: Leaves, index: NativeTileIndex) -> jax.Array:
        """The scores of a tile with the bias; differentiable with respect to scores and slices."""

    @abc.abstractmethod
    def add_gradients(self, plan: NativePlan, gradients: Leaves, slices: Leaves, index: NativeTileIndex) -> Leaves:
        """``gradients`` of the leaves, plus the gradients of a tile's slices."""


class _SlicedBias(TileBias):
    """A bias with one array; a tile needs a slice of it."""

    @abc.abstractmethod
    def _slice(self, plan: NativePlan, leaf: jax.Array, index: NativeTileIndex) -> tuple[list[jax.Array], list[int]]:
        """Start and sizes of a tile's slice."""

    def load(self, plan: NativePlan, leaves: Leaves, index: NativeTileIndex) -> Leaves:
        return (lax.dynamic_slice(leaves[0], *self._slice(plan, leaves[0], index)),)

    def add_gradients(self, plan: NativePlan, gradients: Leaves, slices: Leaves, index: NativeTileIndex) -> Leaves:
        start, sizes = self._slice(plan, gradients[0], index)
        current = lax.dynamic_slice(gradients[0], start, sizes)
        return (lax.dynamic_update_slice(gradients[0], current + slices[0], start),)


@dataclasses.dataclass(frozen=True)
class ArrayTiles(_SlicedBias):
    """An array that broadcasts to [B, H, T, S], laid out as [batch · kv heads, G, T, S], each 1 or all.

    Attributes:
        batch: 1 or B.
        heads: 1 or K.
        by_q: whether it varies by query, T > 1.
        by_kv: whether it varies by key, S > 1.
    """

    batch: int
    heads: int
    by_q: bool
    by_kv: bool

    def apply(self, plan: NativePlan, scores: jax.Array, slices: Leaves, index: NativeTileIndex) -> jax.Array:
        bias = slices[0].astype(jnp.float32)  # [P or 1, G or 1, bq or 1, bk or 1]
        bias = jnp.broadcast_to(bias, (bias.shape[0], plan.G, plan.bq, bias.shape[3]))
        bias = reshaped(bias, bias.shape[0], plan.R, bias.shape[3])
        return scores + (bias.swapaxes(1, 2) if index.transposed else bias)

    def _slice(self, plan: NativePlan, leaf: jax.Array, index: NativeTileIndex) -> tuple[list[jax.Array], list[int]]:
        first = index.group * plan.problems_per_tile
        b, k = quotient_and_remainder(first, plan.K)
        problem = (b if self.batch != 1 else 0) * self.heads + (k if self.heads > 1 else 0)
        problems = plan.problems_per_tile if self.heads > 1 else 1
        q, rows = (index.q_tile * plan.bq, plan.bq) if self.by_q else (0, 1)
        kv, columns = (index.kv_tile * plan.bk, plan.bk) if self.by_kv else (0, 1)
        return plan.indices(problem, 0, q, kv), [problems, leaf.shape[1], rows, columns]


@dataclasses.dataclass(frozen=True)
class DistanceTiles(_SlicedBias):
    """A bias by head and distance: a table [H, T + S − 1 and padding]; a tile needs a slice [H, bq + bk] of it.

    The tile is a Toeplitz matrix of the slice, made by copying without a gather (`_toeplitz`).
    """

    def apply(self, plan: NativePlan, scores: jax.Array, slices: Leaves, index: NativeTileIndex) -> jax.Array:
        k = (index.group * plan.problems_per_tile + jnp.arange(plan.problems_per_tile)) % plan.K
        distances = reshaped(slices[0], plan.K, plan.G, -1)[k]  # [P, G, bq + bk], distance −(bq − 1) first
        tile = reshaped(_toeplitz(distances, plan.bq, plan.bk), plan.problems_per_tile, plan.R, plan.bk)
        return scores + (tile.swapaxes(1, 2) if index.transposed else tile)

    def _slice(self, plan: NativePlan, leaf: jax.Array, index: NativeTileIndex) -> tuple[list[jax.Array], list[int]]:
        # The tile's least kv − q, counted from −(nq · bq − 1).
        least = index.kv_tile * plan.bk - (index.q_tile * plan.bq + plan.bq - 1)
        return plan.indices(0, least + plan.nq * plan.bq - 1), [plan.H, plan.bq + plan.bk]


@dataclasses.dataclass(frozen=True)
class ScoreTiles(TileBias):
    """A bias that is a function of scores and indices; each tile needs all of its leaves.

    Leaves that are not floating-point, such as ids, are constants: their gradient is None.

    Attributes:
        tree: the structure of the bound `Bias` that has the leaves.
    """

    tree: PyTreeDef

    def load(self, plan: NativePlan, leaves: Leaves, index: NativeTileIndex) -> Leaves:
        return leaves

    def add_gradients(self, plan: NativePlan, gradients: Leaves, slices: Leaves, index: NativeTileIndex) -> Leaves:
        return tuple(
            None if d is None else d + more.astype(d.dtype) for d, more in zip(gradients, slices, strict=True)
        )  # fmt: skip

    def apply(self, plan: NativePlan, scores: jax.Array, slices: Leaves, index: NativeTileIndex) -> jax.Array:
        bias: Bias = jax.tree.unflatten(self.tree, slices)
        # Beyond the ragged end indices are clamped to the last query and key, so that none is out of range.
        q, kv = jnp.minimum(index.q, plan.T - 1), jnp.minimum(index.kv, plan.S - 1)
        return bias.apply(scores, index.b, index.h, q, kv)


def bias_tiles(plan: NativePlan, bias: jax.Array | Bias) -> TileBias:
    """How a bound bias is applied tile by tile."""
    if isinstance(bias, RelativeBias):
        return DistanceTiles()
    if isinstance(bias, Bias):
        return ScoreTiles(jax.tree.structure(bias))
    Bb, Hb, Tb, Sb = bias.shape
    return ArrayTiles(Bb, 1 if Hb == 1 else plan.K, by_q=Tb > 1, by_kv=Sb > 1)


def bias_leaves(plan: NativePlan, bias: jax.Array | Bias) -> Leaves:
    """The arrays of a bound bias, as `TileBias.load` slices them. Differentiable."""
    if isinstance(bias, RelativeBias):
        by_distance = bias.by_distance(plan.H, plan.T, plan.S)
        before, after = plan.nq * plan.bq - plan.T, plan.nk * plan.bk - plan.S + 1
        return (jnp.pad(by_distance, ((0, 0), (before, after))),)
    if isinstance(bias, Bias):
        return tuple(map(jnp.asarray, jax.tree.leaves(bias)))
    Bb, Hb, Tb, Sb = bias.shape
    heads, inner = (1, 1) if Hb == 1 else (plan.K, plan.G)
    x = jnp.pad(
        bias,
        ((0, 0), (0, 0), (0, (plan.nq * plan.bq - plan.T) * (Tb > 1)), (0, (plan.nk * plan.bk - plan.S) * (Sb > 1))),
    )
    return (reshaped(x, Bb * heads, inner, *x.shape[2:]),)


def _toeplitz(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """[..., rows + columns] to [..., rows, columns]: element (i, j) is ``x[j − i + rows − 1]``.

    ``x`` of n elements is repeated and split into rows of n − 1, so that each row starts one element further back.
    """
    *lead, n = x.shape
    # Row 0, column 0 first; the elements before it come last, where the rows below read them.
    x = jnp.roll(x, -(rows - 1), axis=-1)
    tiled = reshaped(jnp.broadcast_to(x[..., None, :], (*lead, rows, n)), *lead, rows * n)
    return reshaped(tiled[..., : rows * (n - 1)], *lead, rows, n - 1)[..., :columns]
