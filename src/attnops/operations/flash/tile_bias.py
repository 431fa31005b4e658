"""Biases tile by tile: what a tile needs of one, how its scores change, and where the gradient goes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias, RelativeBias
from attnops.operations.flash.plan import Plan, Where

# Among gradients, None stands for a leaf that has none.
Leaves: TypeAlias = tuple[Any, ...]


def learnt(leaves: Leaves) -> Leaves:
    """The leaves that have a gradient, None for the others."""
    return tuple(leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in leaves)


class TileBias(abc.ABC):
    """A bias as flash works with it. Static and hashable; its arrays, the leaves, are passed beside it."""

    @abc.abstractmethod
    def take(self, plan: Plan, leaves: Leaves, where: Where) -> Leaves:
        """The parts of the leaves that a tile needs."""

    @abc.abstractmethod
    def apply(self, plan: Plan, scores: jax.Array, parts: Leaves, where: Where) -> jax.Array:
        """The scores of a tile with the bias; differentiated with respect to scores and parts."""

    @abc.abstractmethod
    def put(self, plan: Plan, gradients: Leaves, parts: Leaves, where: Where) -> Leaves:
        """The gradients of the leaves with the gradients of a tile's parts added."""


@dataclasses.dataclass(frozen=True)
class ArrayTiles(TileBias):
    """An array that broadcasts to [B, H, T, S], laid out as [batch · kv heads, G, T, S], each 1 or all.

    Attributes:
        batch: 1 or B.
        heads: 1 or K.
        by_q: whether it differs by query, T > 1.
        by_kv: whether it differs by key, S > 1.
    """

    batch: int
    heads: int
    by_q: bool
    by_kv: bool

    def take(self, plan: Plan, leaves: Leaves, where: Where) -> Leaves:
        start, sizes = self._window(plan, leaves[0], where)
        return (lax.dynamic_slice(leaves[0], start, sizes),)

    def put(self, plan: Plan, gradients: Leaves, parts: Leaves, where: Where) -> Leaves:
        start, sizes = self._window(plan, gradients[0], where)
        here = lax.dynamic_slice(gradients[0], start, sizes)
        return (lax.dynamic_update_slice(gradients[0], here + parts[0], start),)

    def apply(self, plan: Plan, scores: jax.Array, parts: Leaves, where: Where) -> jax.Array:
        part = parts[0].astype(jnp.float32)  # [L or 1, G or 1, bq or 1, bk or 1]
        part = jnp.broadcast_to(part, (part.shape[0], plan.G, plan.bq, part.shape[3]))
        part = part.reshape(part.shape[0], plan.R, part.shape[3])
        return scores + (part.swapaxes(1, 2) if where.transposed else part)

    def _window(self, plan: Plan, leaf: jax.Array, where: Where) -> tuple[list[jax.Array], list[int]]:
        first = where.group * plan.lanes
        b, k = first // plan.K, first % plan.K
        lane = (b if self.batch != 1 else 0) * self.heads + (k if self.heads > 1 else 0)
        lanes = plan.lanes if self.heads > 1 else 1
        q, rows = (where.q_tile * plan.bq, plan.bq) if self.by_q else (0, 1)
        kv, columns = (where.kv_tile * plan.bk, plan.bk) if self.by_kv else (0, 1)
        return plan.indices(lane, 0, q, kv), [lanes, leaf.shape[1], rows, columns]


@dataclasses.dataclass(frozen=True)
class DistanceTiles(TileBias):
    """A bias by head and distance: a table [H, T + S − 1 and padding] of which a tile needs a stretch of each head.

    The stretch becomes a tile by copying alone: repeated with a period one longer than the tile is wide, each row
    starts one further back.
    """

    def take(self, plan: Plan, leaves: Leaves, where: Where) -> Leaves:
        size = (plan.H, plan.bq + plan.bk)
        return (lax.dynamic_slice(leaves[0], self._start(plan, where), size),)

    def put(self, plan: Plan, gradients: Leaves, parts: Leaves, where: Where) -> Leaves:
        start = self._start(plan, where)
        here = lax.dynamic_slice(gradients[0], start, parts[0].shape)
        return (lax.dynamic_update_slice(gradients[0], here + parts[0], start),)

    def apply(self, plan: Plan, scores: jax.Array, parts: Leaves, where: Where) -> jax.Array:
        k = (where.group * plan.lanes + jnp.arange(plan.lanes)) % plan.K
        stretch = parts[0].reshape(plan.K, plan.G, -1)[k]  # [L, G, bq + bk], distance −(bq − 1) first
        tile = _toeplitz(stretch, plan.bq, plan.bk).reshape(plan.lanes, plan.R, plan.bk)
        return scores + (tile.swapaxes(1, 2) if where.transposed else tile)

    def _start(self, plan: Plan, where: Where) -> list[jax.Array]:
        # The tile's least kv − q, counted from −(nq · bq − 1).
        least = where.kv_tile * plan.bk - (where.q_tile * plan.bq + plan.bq - 1)
        return plan.indices(0, least + plan.nq * plan.bq - 1)


@dataclasses.dataclass(frozen=True)
class ScoreTiles(TileBias):
    """A bias that is a function of scores and indices. Its leaves are taken whole for each tile.

    Those that are no floats, such as ids, are constants: their gradient is None.

    Attributes:
        tree: what the leaves are the leaves of: a bound `Bias`.
    """

    tree: Any

    def take(self, plan: Plan, leaves: Leaves, where: Where) -> Leaves:
        return leaves

    def put(self, plan: Plan, gradients: Leaves, parts: Leaves, where: Where) -> Leaves:
        return tuple(
            None if total is None else total + part for total, part in zip(gradients, parts, strict=True)
        )  # fmt: skip

    def apply(self, plan: Plan, scores: jax.Array, parts: Leaves, where: Where) -> jax.Array:
        bias: Bias = jax.tree.unflatten(self.tree, parts)
        # Beyond the ragged end the indices are those of the last query and key, so that none is out of range.
        q, kv = jnp.minimum(where.q, plan.T - 1), jnp.minimum(where.kv, plan.S - 1)
        return bias.apply(scores, where.b, where.h, q, kv)


def bias_tiles(plan: Plan, bias: jax.Array | Bias) -> TileBias:
    """How a bound bias is taken tile by tile."""
    if isinstance(bias, RelativeBias):
        return DistanceTiles()
    if isinstance(bias, Bias):
        return ScoreTiles(jax.tree.structure(bias))
    Bb, Hb, Tb, Sb = bias.shape
    return ArrayTiles(Bb, 1 if Hb == 1 else plan.K, by_q=Tb > 1, by_kv=Sb > 1)


def bias_leaves(plan: Plan, bias: jax.Array | Bias) -> Leaves:
    """The arrays of a bound bias, as `TileBias.take` slices them. Differentiable."""
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
    return (x.reshape(Bb * heads, inner, *x.shape[2:]),)


def _toeplitz(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """[..., rows + columns] to [..., rows, columns]: element (i, j) is number ``j − i + rows − 1``."""
    *lead, n = x.shape
    # Begin at row 0, column 0; what is left of it comes last, where rows further down find it.
    x = jnp.roll(x, -(rows - 1), axis=-1)
    tiled = jnp.broadcast_to(x[..., None, :], (*lead, rows, n)).reshape(*lead, rows * n)
    return tiled[..., : rows * (n - 1)].reshape(*lead, rows, n - 1)[..., :columns]
