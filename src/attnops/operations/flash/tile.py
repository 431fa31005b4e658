"""The scores of one tile: scale, soft cap, bias, mask and dropout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dropout import dropout_keep, dropout_rows
from attnops.masks.base import Mask
from attnops.operations.flash.plan import NativePlan, NativeTileIndex
from attnops.operations.flash.scoring import NativeScoring
from attnops.operations.flash.tile_bias import Leaves, inexact_leaves
from attnops.typing import BoolArray, Leaf


def apply_cap_and_bias(
    plan: NativePlan, cap: Leaf, scores: jax.Array, slices: Leaves, index: NativeTileIndex
) -> jax.Array:
    """Scores with soft cap and bias.

    Args:
        plan: the plan of the call.
        cap: the soft cap; None for none.
        scores: [P, R, bk], or transposed [P, bk, R], float32, multiplied by the full scale.
        slices: the slices of the bias's leaves that the tile needs.
        index: the indices of the tile.
    """
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if plan.scoring.bias is not None:
        scores = plan.scoring.bias.apply(plan, scores, slices, index)
    return scores


def cap_and_bias_vjp(
    plan: NativePlan, cap: Leaf, wants_bias: bool, scores: jax.Array, slices: Leaves, index: NativeTileIndex
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, Leaves]]]:
    """`apply_cap_and_bias`, and its pullback to the scores and to the bias's slices."""

    def changed(scores: jax.Array, inexact: Leaves) -> jax.Array:
        given = tuple(x if d is None else d for d, x in zip(inexact, slices, strict=True))
        return apply_cap_and_bias(plan, cap, scores, given, index)

    if wants_bias:
        return jax.vjp(changed, scores, inexact_leaves(slices))
    value, pull_back = jax.vjp(lambda s: apply_cap_and_bias(plan, cap, s, slices, index), scores)
    return value, lambda d: (*pull_back(d), ())


def allowed(plan: NativePlan, mask: Mask | None, index: NativeTileIndex, ragged_queries: bool) -> jax.Array | None:
    """Which scores of a tile are not masked: booleans that broadcast to it; None for all.

    Args:
        plan: the plan of the call.
        mask: bound; None for none.
        index: the indices of the tile.
        ragged_queries: whether queries beyond T, in a ragged last tile, are masked; the forward pass ignores them.
            Keys beyond S are always masked, as are those that overlap the tile before.
    """
    visible: BoolArray | None = None
    if mask is not None:
        # Beyond the ragged end indices are clamped to the last query and key, so that none is out of range.
        visible = mask.allowed(index.b, index.h, jnp.minimum(index.q, plan.T - 1), jnp.minimum(index.kv, plan.S - 1))
    for is_ragged, inside in (
        (plan.S % plan.bk, lambda: index.kv >= index.kv_tile * plan.bk if plan.overlaps else index.kv < plan.S),
        (ragged_queries and plan.T % plan.bq, lambda: index.q < plan.T),
    ):
        if is_ragged:
            visible = inside() if visible is None else visible & inside()
    return None if visible is None else jnp.asarray(visible)


def zero_masked_tokens(x: jax.Array, visible: jax.Array, axis: int) -> jax.Array:
    """``x`` [P, rows, d] with 0 for tokens that are fully masked in the tile.

    Such tokens may hold NaN, and 0 · NaN is NaN.

    Args:
        x: a tile of queries, keys or values.
        visible: where a query sees a key, bool [P, bq, bk].
        axis: the axis of the other tokens in ``visible``.
    """
    return jnp.where(visible.any(axis=axis)[..., None], x, jnp.zeros((), x.dtype))


def dropout(scoring: NativeScoring, seed: jax.Array | None, index: NativeTileIndex) -> Callable[[jax.Array], jax.Array]:
    """The function that applies dropout to the weights of a tile; without a seed it returns them as they are."""
    if seed is None:
        return lambda weights: weights
    # Computed once per row; the barrier keeps it out of the loop over a tile's elements.
    rows = lax.optimization_barrier(dropout_rows(seed, index.b, index.h, index.q))
    keep = dropout_keep(rows, index.kv, scoring.dropout_prob, scoring.dropout_step)
    return lambda weights: jnp.where(keep, weights * (1 / (1 - scoring.dropout_prob)), 0.0)
