"""The scores of one tile: scale, soft cap, bias and mask, and what of queries, keys and values takes no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dropout import dropout_keep, dropout_rows
from attnops.masks.base import Mask
from attnops.operations.flash.options import Numbers, Options
from attnops.operations.flash.plan import Plan, Where
from attnops.operations.flash.tile_bias import Leaves


class Arrays(NamedTuple):
    """What a call is given beside query, key and value; None for what it has not.

    Attributes:
        mask: the bound mask.
        bias: the leaves of the tile bias.
        sinks: [1, H] float32.
        seed: of dropout, see `attnops.dropout.dropout_seed`.
        numbers: the numbers, where they are data.
    """

    mask: Mask | None = None
    bias: Leaves = ()
    sinks: jax.Array | None = None
    seed: jax.Array | None = None
    numbers: Numbers | None = None


def numbers_of(options: Options, arrays: Arrays) -> Numbers:
    """The numbers of a call."""
    found = arrays.numbers if options.numbers is None else options.numbers
    assert found is not None
    return found


def change(plan: Plan, options: Options, cap: Any, scores: jax.Array, parts: Leaves, where: Where) -> jax.Array:
    """Soft cap and bias. Scores come in units of the whole scale."""
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if options.bias is not None:
        scores = options.bias.apply(plan, scores, parts, where)
    return scores


def allowed(plan: Plan, mask: Mask | None, where: Where, ragged_queries: bool) -> jax.Array | None:
    """Which scores of a tile count, booleans that broadcast to it; None for all.

    Keys beyond the ragged end never do. Queries beyond it do unless ``ragged_queries``: forward they harm nobody.
    """
    counts: Any = None
    if mask is not None:
        # Beyond the ragged end the indices are those of the last query and key, so that none is out of range.
        counts = mask.allowed(where.b, where.h, jnp.minimum(where.q, plan.T - 1), jnp.minimum(where.kv, plan.S - 1))
    for is_ragged, inside in (
        (plan.S % plan.bk, lambda: where.kv < plan.S),
        (ragged_queries and plan.T % plan.bq, lambda: where.q < plan.T),
    ):
        if is_ragged:
            counts = inside() if counts is None else counts & inside()
    return None if counts is None else jnp.asarray(counts)


def without_unseen(x: jax.Array, counts: jax.Array, axis: int) -> jax.Array:
    """``x`` [L, rows, d] with 0 for the tokens that nobody of the tile sees; ``axis`` is the other tokens'.

    A weight of 0 times whatever such a token holds, NaN for one, must be 0.
    """
    seen = counts.any(axis=axis)
    return jnp.where(seen[..., None], x, jnp.zeros((), x.dtype))


def dropout_factor(
    plan: Plan, options: Options, seed: jax.Array | None, where: Where
) -> Callable[[jax.Array], jax.Array]:
    """What dropout does to the weights of a tile."""
    if seed is None:
        return lambda weights: weights
    # Once a row; the barrier keeps it out of the loop over a tile's elements.
    rows = lax.optimization_barrier(dropout_rows(seed, where.b, where.h, where.q))
    keep = dropout_keep(rows, where.kv, options.dropout_prob, options.dropout_step)
    return lambda weights: jnp.where(keep, weights * (1 / (1 - options.dropout_prob)), 0.0)
