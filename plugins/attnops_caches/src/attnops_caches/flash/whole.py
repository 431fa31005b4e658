"""Attention of a few queries over every slot of a float32 cache at once, if most slots are seen.

XLA's CPU backend copies each tile that a loop slices before a product reads it; a product over a whole array reads it
where it lies, at about twice the rate, but also reads the slots that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.forward import finish, largest
from attnops.operations.flash.operands import NativeArrays, numbers_of, zeros
from attnops.operations.flash.plan import NativePlan
from attnops.operations.flash.tile_schedule import NativeTileSchedule
from attnops_caches.store import Store
from attnops_caches.tiles import StoreLoader

# Those of `attnops.operations.flash.forward.forward`.
Results = tuple[jax.Array, ...]

# The share of tiles that must be active: below, a loop over active tiles is faster.
_LEAST_ACTIVE: Final = 0.75


def serves(plan: NativePlan, loader: StoreLoader) -> bool:
    """Whether `attend` can compute a call over a store; static."""
    store, layout = loader.store, loader.store.layout
    is_plain = layout.stored_dtype == plan.dtype == jnp.float32 and layout.content == "separate" and store.layer is None
    scores_are_few = plan.nq == 1 and 2 * plan.R <= plan.D
    # A symbolic B has no product with K that a reshape accepts.
    is_known = isinstance(plan.B, int)
    return loader.table is None and is_plain and scores_are_few and plan.scoring.bias is None and is_known


def attend_or(
    plan: NativePlan,
    query: jax.Array,
    store: Store,
    arrays: NativeArrays,
    schedule: NativeTileSchedule,
    in_tiles: Callable[[], Results],
) -> Results:
    """`attend` where most tiles are active and its output is finite, else what ``in_tiles`` computes.

    Slots that nothing sees may hold NaN, and 0 · NaN is NaN; ``in_tiles`` leaves those out.
    """
    active = (schedule.stop - schedule.start).sum()
    is_dense = active >= _LEAST_ACTIVE * schedule.stop.shape[0] * plan.nk
    return if_finite(plan, query, is_dense, lambda: attend(plan, query, store, arrays), in_tiles)


def if_finite(
    plan: NativePlan,
    query: jax.Array,
    applies: jax.Array,
    results: Callable[[], Results],
    in_tiles: Callable[[], Results],
) -> Results:
    """``results()`` where it ``applies``, bool [], and its output is finite; else ``in_tiles()``."""

    def skip() -> Results:
        nan = zeros(query, (plan.B, plan.T, plan.H, plan.Dv)) + jnp.nan
        rows = zeros(query, (plan.B, plan.H, plan.T))
        return nan.astype(query.dtype), *[rows] * (2 + plan.max_logits)

    found = lax.cond(applies, results, skip)
    return lax.cond(jnp.isfinite(found[0]).all(), lambda: found, in_tiles)


def attend(plan: NativePlan, query: jax.Array, store: Store, arrays: NativeArrays) -> Results:
    """Attention over all slots, by two products; see `attnops.operations.flash.forward.forward`.

    Memory: scores and weights of all slots, 8 · B · H · T · S bytes; since 2 · R <= D, at most the bytes of the keys.
    """
    B, T, H, K, G, D = plan.B, plan.T, plan.H, plan.K, plan.G, plan.D
    assert store.value is not None
    numbers = numbers_of(plan.scoring, arrays)
    q = numbers.fold_scale(query, plan.dtype).reshape(B, T, K, G, D).transpose(0, 2, 4, 3, 1)
    q = q.reshape(B * K, D, G * T)
    k, v = (x.reshape(B * K, plan.S, x.shape[-1]) for x in (store.key, store.value))
    scores = plan.scores_of_keys(k, q)  # [B · K, R, S]
    scores = scores.reshape(B, K, G, T, plan.S)
    if numbers.cap is not None:
        scores = numbers.cap * jnp.tanh(scores / numbers.cap)
    if arrays.mask is not None:
        allowed = arrays.mask.dense(B, H, T, plan.S)
        heads = (1, 1) if allowed.shape[1] == 1 else (K, G)
        allowed = allowed.reshape(allowed.shape[0], *heads, *allowed.shape[2:])
        scores = jnp.where(allowed, scores, -jnp.inf)
    scores = scores.reshape(B * K, G * T, plan.S)
    m = scores.max(-1)
    weights = jnp.exp(scores - jnp.where(m == -jnp.inf, 0.0, m)[..., None])
    l = weights.sum(-1)
    acc = plan.product(weights, v, 2, 1)  # [B · K, R, Dv]
    sinks = None if arrays.sinks is None else jnp.tile(jnp.repeat(arrays.sinks.reshape(K, G), T, axis=1), (B, 1))
    out, *rows = finish(m, l, acc, sinks)
    if plan.max_logits:
        rows.append(largest(m, l))
    out = out.reshape(B, K, G, T, plan.Dv).transpose(0, 3, 1, 2, 4).reshape(B, T, H, plan.Dv)
    return out.astype(query.dtype), *(x.reshape(B, H, T) for x in rows)
