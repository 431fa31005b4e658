"""The backward pass: one sweep that computes the weights again from the logsumexp (Dao 2023, arXiv:2307.08691).

The outer loop is over tiles of keys, whose gradients it carries; those of queries are added in place, always in the
same order, so that the result is the same at every run. Scores are transposed, [bk, R]: with logsumexp and
``delta`` at hand nothing is reduced over a tile, and all five products have the form that a CPU does best.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.layout import (
    add_transposed,
    empty,
    pack,
    pack_rows,
    put,
    take,
    take_rows,
    unpack,
    unpack_transposed,
    zeros,
)
from attnops.operations.flash.options import Options
from attnops.operations.flash.plan import Plan
from attnops.operations.flash.scores import (
    Arrays,
    allowed,
    change,
    dropout_factor,
    numbers_of,
    without_unseen,
)
from attnops.operations.flash.tile_bias import Leaves, learnt
from attnops.operations.flash.visits import Visits, for_row


class Gradients(NamedTuple):
    """Gradients, in their arrays' dtypes, or float32 of a part; of the bias, by leaf, none where none is wanted."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: Leaves


def backward(
    plan: Plan,
    wants_bias: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: Arrays,
    visits: Visits,
    logsumexp: jax.Array,
    delta: jax.Array,
    factor: jax.Array,
    d_out: jax.Array,
) -> Gradients:
    """The gradients of query, key, value and bias; O(T) temporaries.

    Args:
        plan: of the call.
        wants_bias: whether the bias has a gradient to be computed.
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        arrays: of the call.
        visits: by tiles of keys.
        logsumexp: [B, H, T].
        delta: [B, H, T], what each weight's gradient is measured against: ``(d_out · out − d_logsumexp) · factor``.
        factor: [B, H, T], what ``d_out`` is to be multiplied by.
        d_out: [B, T, H, Dv].
    """
    options = plan.options
    q, d_o = pack(query, plan.nq * plan.bq), pack(d_out, plan.nq * plan.bq)
    k, v = (pack(x, plan.nk * plan.bk) for x in (key, value))
    # A row that saw nothing, and the ragged end, have weights exp(score − inf) = 0.
    lse = pack_rows(plan, jnp.where(logsumexp == -jnp.inf, jnp.inf, logsumexp), fill=jnp.inf)
    delta, factor = (pack_rows(plan, x, fill=0.0) for x in (delta, factor))

    numbers = numbers_of(options, arrays)
    # Of part of a softmax they are added to others', and so not rounded.
    dtypes = [jnp.dtype(jnp.float32) if plan.is_partial else x.dtype for x in (query, key, value)]

    def row(i: Any, state: Gradients) -> Gradients:
        group, kv_tile = i // plan.nk, i % plan.nk
        k_ = take(plan, k, group, kv_tile, plan.bk, key.dtype)
        v_ = take(plan, v, group, kv_tile, plan.bk, value.dtype)
        # For the product that wants keys the other way round: transposed once, not for each tile of queries.
        k_transposed = k_.swapaxes(1, 2)  # [L, D, bk]

        def step(q_tile: Any, carry: Gradients, masked: bool) -> Gradients:
            where = plan.where(group, q_tile, kv_tile, transposed=True)
            # The scale goes where it went forward, so that the scores are the same to the last bit.
            q_ = numbers.fold_scale(take(plan, q, group, q_tile, plan.bq, query.dtype), plan.dtype)  # [L, R, D]
            d_o_ = take(plan, d_o, group, q_tile, plan.bq, d_out.dtype)  # [L, R, Dv]
            d_o_ = (d_o_ * take_rows(plan, factor, group, q_tile)[:, :, None]).astype(plan.dtype)
            k_seen, k_transposed_seen, v_seen = k_, k_transposed, v_
            counts = allowed(plan, arrays.mask, where, ragged_queries=True) if masked else None
            if counts is not None and options.has_fully_masked_tokens:
                q_ = without_unseen(q_, counts, axis=1)
                k_seen, v_seen = (without_unseen(x, counts, axis=2) for x in (k_, v_))
                k_transposed_seen = k_seen.swapaxes(1, 2)
            scores = numbers.scaled(plan.product(k_seen, q_, 2, 2))  # [L, bk, R]
            parts: Leaves = ()
            pull_back = None
            if options.changes_scores:
                parts = () if options.bias is None else options.bias.take(plan, arrays.bias, where)
                scores, pull_back = _change(plan, options, numbers.cap, wants_bias, scores, parts, where)
            if counts is not None:
                scores = jnp.where(counts, scores, -jnp.inf)
            weights = jnp.exp(scores - take_rows(plan, lse, group, q_tile)[:, None, :])
            drop = dropout_factor(plan, options, arrays.seed, where)
            d_v = carry.value + plan.product(drop(weights).astype(plan.dtype), d_o_, 2, 1)
            d_weights = drop(plan.product(v_seen, d_o_, 2, 2))
            d_scores = weights * (d_weights - take_rows(plan, delta, group, q_tile)[:, None, :])
            d_bias = carry.bias
            if pull_back is not None:
                d_scores, d_parts = pull_back(d_scores)
                if wants_bias and options.bias is not None:
                    d_bias = options.bias.put(plan, d_bias, d_parts, where)
            d_scores = d_scores.astype(plan.dtype)
            d_k = carry.key + plan.product(d_scores, q_, 2, 1)
            more = plan.product(k_transposed_seen, d_scores, 2, 1)  # [L, D, R]
            d_q = add_transposed(plan, carry.query, group, q_tile, more)
            return Gradients(d_q, d_k, d_v, d_bias)

        start = state._replace(
            key=zeros(query, (plan.lanes, plan.bk, plan.D)),
            value=zeros(query, (plan.lanes, plan.bk, plan.Dv)),
        )
        done = for_row(visits, plan.map_of(group), kv_tile, step, start)
        return done._replace(
            key=put(plan, state.key, group, kv_tile, plan.bk, numbers.scaled(done.key), dtypes[1]),
            value=put(plan, state.value, group, kv_tile, plan.bk, done.value, dtypes[2]),
        )

    start = Gradients(
        # Added to many times, so in float32 and as products come; keys' and values' are complete when they are put.
        zeros(query, (plan.groups, plan.nq, plan.lanes, plan.D, plan.R)),
        empty(k, plan.K, plan.D, dtypes[1]),
        empty(v, plan.K, plan.Dv, dtypes[2]),
        jax.tree.map(lambda leaf: zeros(query, leaf.shape), learnt(arrays.bias)) if wants_bias else (),
    )
    done = lax.fori_loop(0, plan.groups * plan.nk, row, start)
    return Gradients(
        (unpack_transposed(plan, done.query) * numbers.scale).astype(dtypes[0]),
        unpack(done.key, plan.S, dtypes[1]),
        unpack(done.value, plan.S, dtypes[2]),
        jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), done.bias, learnt(arrays.bias)) if wants_bias else (),
    )


def _change(
    plan: Plan, options: Options, cap: Any, wants_bias: bool, scores: jax.Array, parts: Leaves, where: Any
) -> tuple[jax.Array, Any]:
    """Soft cap and bias, and how gradients come back through them: to the scores and to the bias's parts."""

    def changed(scores: jax.Array, inexact: Leaves) -> jax.Array:
        given = tuple(part if x is None else x for x, part in zip(inexact, parts, strict=True))
        return change(plan, options, cap, scores, given, where)

    if wants_bias:
        return jax.vjp(changed, scores, learnt(parts))
    found, pull_back = jax.vjp(lambda s: change(plan, options, cap, s, parts, where), scores)
    return found, lambda d: (*pull_back(d), ())
