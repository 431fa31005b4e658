"""The forward pass: online softmax over the tiles of keys that a tile of queries visits (Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.layout import empty, pack, put, put_rows, take, unpack, unpack_rows, zeros
from attnops.operations.flash.plan import Plan
from attnops.operations.flash.scores import Arrays, allowed, change, dropout_factor, numbers_of, without_unseen
from attnops.operations.flash.visits import Visits, for_row


class _Softmax(NamedTuple):
    """What the online softmax carries from tile to tile: [L, R, Dv], [L, R] and [L, R].

    Attributes:
        accumulated: the sum of weights times values, relative to exp(top).
        top: the largest score so far; −inf where there is none.
        total: the sum of weights, likewise.
    """

    accumulated: jax.Array
    top: jax.Array
    total: jax.Array


def forward(
    plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, visits: Visits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output [B, T, H, Dv]; the logsumexp and its rounding error, [B, H, T] float32.

    The output has the query's dtype; float32 for a partial softmax. O(T) temporaries. With scores near −1e38 (a large
    negative bias used as a mask), float32 rounding loses log(l), which the backward pass needs: the rounding error.
    """
    options = plan.options
    out_dtype = jnp.dtype(jnp.float32) if plan.is_partial else query.dtype
    q = pack(query, plan.nq * plan.bq)
    k, v = (pack(x, plan.nk * plan.bk) for x in (key, value))
    sinks = None if arrays.sinks is None else _sinks_of_rows(plan, arrays.sinks)
    # Scores stay in units of the rest of the scale where nothing but softmax reads them: one product less a score.
    numbers = numbers_of(options, arrays)
    unit = 1.0 if options.changes_scores or numbers.scale_residual is None else numbers.scale_residual

    def row(i: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        group, q_tile = i // plan.nq, i % plan.nq
        q_ = numbers.fold_scale(take(plan, q, group, q_tile, plan.bq, query.dtype), plan.dtype)  # [L, R, D]

        def step(kv_tile: Any, carry: _Softmax, masked: bool) -> _Softmax:
            accumulated, top, total = carry
            where = plan.where(group, q_tile, kv_tile, transposed=False)
            k_ = take(plan, k, group, kv_tile, plan.bk, key.dtype)
            v_ = take(plan, v, group, kv_tile, plan.bk, value.dtype)
            counts = allowed(plan, arrays.mask, where, ragged_queries=False) if masked else None
            if counts is not None and options.has_fully_masked_tokens:
                k_, v_ = (without_unseen(x, counts, axis=1) for x in (k_, v_))
            scores = plan.product(q_, k_, 2, 2)  # [L, R, bk]
            if options.changes_scores:
                parts = () if options.bias is None else options.bias.take(plan, arrays.bias, where)
                scores = change(plan, options, numbers.cap, numbers.scaled(scores), parts, where)
            if counts is not None:
                scores = jnp.where(counts, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            origin = _finite(new_top)
            fade = jnp.exp(unit * (top - origin))
            weights = jnp.exp(unit * (scores - origin[..., None]))
            total = total * fade + weights.sum(-1)
            weights = dropout_factor(plan, options, arrays.seed, where)(weights)
            accumulated = accumulated * fade[..., None] + plan.product(weights.astype(plan.dtype), v_, 2, 1)
            return _Softmax(accumulated, new_top, total)

        none = zeros(query, (plan.lanes, plan.R))
        start = _Softmax(zeros(query, (plan.lanes, plan.R, plan.Dv)), none - jnp.inf, none)
        accumulated, top, total = for_row(visits, plan.map_of(group), q_tile, step, start)
        out, *rows = _finish(accumulated, unit * top, total, None if sinks is None else sinks[group])
        outs, logsumexps, losses = state
        return (
            put(plan, outs, group, q_tile, plan.bq, out, out_dtype),
            put_rows(plan, logsumexps, group, q_tile, rows[0]),
            put_rows(plan, losses, group, q_tile, rows[1]),
        )

    rows = zeros(query, (plan.B * plan.K, plan.nq, plan.R))
    state = empty(q, plan.H, plan.Dv, out_dtype), rows, rows
    out, logsumexp, loss = lax.fori_loop(0, plan.groups * plan.nq, row, state)
    return unpack(out, plan.T, out_dtype), unpack_rows(plan, logsumexp), unpack_rows(plan, loss)


def _finite(top: jax.Array) -> jax.Array:
    """A maximum that scores can be measured against: exp(−inf − 0) is 0, where exp(−inf + inf) is NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _finish(
    accumulated: jax.Array, top: jax.Array, total: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divide by the denominator, to which the sink belongs; rows that saw nothing give 0 and −inf.

    Returns:
        Output, logsumexp, and what must be added to the rounded logsumexp.
    """
    saw_any = total != 0  # NaN too
    if sink is not None:
        new_top = jnp.maximum(top, sink)
        fade = jnp.exp(top - _finite(new_top))
        total = total * fade + jnp.exp(sink - _finite(new_top))
        accumulated, top = accumulated * fade[..., None], new_top
    denominator = jnp.where(saw_any, total, 1.0)
    out = jnp.where(saw_any[..., None], (1 / denominator)[..., None] * accumulated, 0.0)
    rest = jnp.log(denominator)
    logsumexp = top + rest
    return out, jnp.where(saw_any, logsumexp, -jnp.inf), jnp.where(saw_any, top - logsumexp + rest, 0.0)


def _sinks_of_rows(plan: Plan, sinks: jax.Array) -> jax.Array:
    """[H] to [groups, L, R]."""
    rows = jnp.repeat(sinks.reshape(plan.K, plan.G), plan.bq, axis=1)
    return jnp.tile(rows, (plan.B, 1)).reshape(plan.groups, plan.lanes, plan.R)
