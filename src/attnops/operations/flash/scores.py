"""The scores of one tile: scale, soft cap, bias and mask, and what of queries, keys and values takes no part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.dropout import dropout_keep, dropout_rows
from attnops.masks.base import Mask
from attnops.operations.flash.plan import Plan, Where
from attnops.operations.flash.tile_bias import Leaves, TileBias


class Numbers(NamedTuple):
    """The numbers of a call: Python's, or float32 arrays [] where other numbers must not make a new program.

    Attributes:
        scale: the softmax scale.
        folded: the part of it that is multiplied in before the product: all of it in float32, a power of two in 16
            bits, where any other would round.
        scale_residual: what is left of it, in [1, 2); None for 1.
        cap: the soft cap; None for none.
    """

    scale: Any
    folded: Any
    scale_residual: Any
    cap: Any

    @classmethod
    def make(cls, scale: float, cap: float | None, dtype: Any) -> Numbers:
        """Those of a call whose products take ``dtype``."""
        if dtype == jnp.float32:
            return cls(scale, scale, None, cap)
        folded = math.copysign(2.0 ** math.floor(math.log2(abs(scale))), scale) if scale else 0.0
        return cls(scale, folded, scale / folded if folded else 1.0, cap)

    def as_data(self) -> Numbers:
        """The same as arrays."""
        return jax.tree.map(np.float32, self)

    def fold_scale(self, x: jax.Array, dtype: Any) -> jax.Array:
        """A tile of queries with the folded part of the scale, in ``dtype``."""
        is_one = isinstance(self.folded, float) and self.folded == 1.0
        return x if is_one else (x.astype(jnp.float32) * self.folded).astype(dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """``x`` times what is left of the scale."""
        return x if self.scale_residual is None else x * self.scale_residual


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for, static.

    Attributes:
        numbers: the numbers; None where they are data, see `Arrays`.
        has_cap: whether there is a soft cap.
        bias: how the bias is taken tile by tile.
        dropout_prob: the probability of dropout.
        dropout_step: see `attnops.dropout.dropout_step`.
        hides_tokens: whether some tokens may be seen by nobody, and so hold anything, NaN too.
    """

    numbers: Numbers | None = None
    has_cap: bool = False
    bias: TileBias | None = None
    dropout_prob: float = 0.0
    dropout_step: int = 1
    hides_tokens: bool = False

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than a product and a scale."""
        return self.has_cap or self.bias is not None


class Arrays(NamedTuple):
    """What a call is given beside query, key and value; None for what it has not.

    Attributes:
        mask: the bound mask.
        bias: the leaves of the tile bias.
        sinks: [H] float32.
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
