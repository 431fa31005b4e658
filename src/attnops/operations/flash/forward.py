"""The forward pass: online softmax over the active tiles of keys of a tile of queries (Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.operands import (
    NativeArrays,
    empty,
    load,
    numbers_of,
    pack,
    store,
    store_rows,
    unpack,
    unpack_rows,
    zeros,
)
from attnops.operations.flash.plan import Index, NativePlan, quotient_and_remainder
from attnops.operations.flash.tile import allowed, apply_cap_and_bias, dropout, zero_masked_tokens
from attnops.operations.flash.tile_schedule import NativeTileSchedule, for_active_tiles
from attnops.sharding.placing import reshaped


class KeyValue(NamedTuple):
    """A tile of keys and values, in the dtype of products' operands.

    Attributes:
        key: [P, bk, D], or a tuple of arrays [P, bk, d] with its features in order, which are not concatenated.
        value: [P, bk, Dv], or a tuple of arrays [P, bk, d] with its features in order.
        key_scale: the factor that keys still lack, float32, broadcasts to [P, bk]; None for 1.
        value_scale: the factor that values still lack, float32, broadcasts to [P, bk]; None for 1.
    """

    key: jax.Array | tuple[jax.Array, ...]
    value: jax.Array | tuple[jax.Array, ...]
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


# From the index of a group of problems and the index of a tile to the tile of keys and values.
LoadKeyValue: TypeAlias = Callable[[Index, Index], KeyValue]


def from_arrays(plan: NativePlan, key: jax.Array, value: jax.Array) -> LoadKeyValue:
    """Tiles of keys [B, S, K, D] and values [B, S, K, Dv]."""
    k, v = (pack(x, plan.nk * plan.bk) for x in (key, value))

    def load_key_value(group: Index, kv_tile: Index) -> KeyValue:
        return KeyValue(*(load(plan, x, group, kv_tile, plan.bk, d) for x, d in ((k, key.dtype), (v, value.dtype))))

    return load_key_value


class _Softmax(NamedTuple):
    """The state of online softmax, the loop's carry; XLA's CPU backend is fastest with this order of fields.

    Attributes:
        acc: [P, R, Dv], the sum of exp(score − m) · value.
        m: [P, R], the largest score so far; −inf where there is none.
        l: [P, R], the sum of exp(score − m).
    """

    acc: jax.Array
    m: jax.Array
    l: jax.Array


def forward(
    plan: NativePlan, query: jax.Array, load_key_value: LoadKeyValue, arrays: NativeArrays,
    schedule: NativeTileSchedule, of_rows: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The output [B, T, H, Dv]; the logsumexp, its rounding error and, with ``plan.max_logits``, the largest scores,
    [B, H, T] float32.

    The output has the query's dtype; float32 for a partial softmax. O(T) temporaries. The rounding error is returned
    because with scores near −1e38 (a large negative bias used as a mask), float32 rounding loses log(l), which the
    backward pass needs.

    Args:
        plan: the plan of the call.
        query: [B, T, H, D].
        load_key_value: loads a tile of keys and values.
        arrays: the arrays of the call's options.
        schedule: the active tiles, by tiles of queries.
        of_rows: whether rows are packed and each tile of keys belongs to one row: a value that is not finite then
            reaches no query of another row.
    """
    scoring = plan.scoring
    out_dtype = jnp.dtype(jnp.float32) if plan.is_partial else query.dtype
    q = pack(query, plan.nq * plan.bq)
    sinks = None if arrays.sinks is None else _sinks_of_rows(plan, arrays.sinks)
    # Without cap and bias, the scale's residual is applied inside the exponential: one product less per score.
    numbers = numbers_of(scoring, arrays)
    score_unit = 1.0 if scoring.has_cap_or_bias or numbers.scale_residual is None else numbers.scale_residual

    def row(i: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group, q_tile = quotient_and_remainder(i, plan.nq)
        q_ = numbers.fold_scale(load(plan, q, group, q_tile, plan.bq, query.dtype), plan.dtype)  # [P, R, D]

        def step(kv_tile: Index, carry: _Softmax, masked: bool) -> _Softmax:
            index = plan.tile_index(group, q_tile, kv_tile, transposed=False)
            *parts, key_scale, value_scale = load_key_value(group, kv_tile)
            k_, v_ = (x if isinstance(x, tuple) else (x,) for x in parts)
            visible = allowed(plan, arrays.mask, index, ragged_queries=False) if masked else None
            if visible is not None and scoring.has_fully_masked_tokens:
                k_, v_ = (tuple(zero_masked_tokens(x, visible, axis=1) for x in xs) for xs in (k_, v_))
                if value_scale is not None:  # it may be NaN for a slot without a token
                    value_scale = jnp.where(visible.any(axis=1), value_scale, 0.0)
            queries = jnp.split(q_, [*itertools.accumulate(x.shape[-1] for x in k_[:-1])], axis=-1)
            scores = functools.reduce(operator.add, map(plan.scores, queries, k_))  # [P, R, bk]
            if key_scale is not None:
                scores = scores * key_scale[..., None, :]
            if scoring.has_cap_or_bias:
                slices = () if scoring.bias is None else scoring.bias.load(plan, arrays.bias, index)
                scores = apply_cap_and_bias(plan, numbers.cap, numbers.scaled(scores), slices, index)
            if visible is not None:
                scores = jnp.where(visible, scores, -jnp.inf)
            m = jnp.maximum(carry.m, scores.max(-1))
            base = _finite(m)
            alpha = jnp.exp(score_unit * (carry.m - base))
            weights = jnp.exp(score_unit * (scores - base[..., None]))
            l = carry.l * alpha + weights.sum(-1)
            weights = dropout(scoring, arrays.seed, index)(weights)
            if value_scale is not None:
                weights = weights * value_scale[..., None, :]
            new = jnp.concatenate([plan.product(weights.astype(plan.dtype), x, 2, 1) for x in v_], axis=-1)
            if of_rows and visible is not None:
                new = jnp.where(visible.any(axis=-1, keepdims=True), new, 0.0)
            acc = carry.acc * alpha[..., None] + new
            return _Softmax(acc, m, l)

        none = zeros(query, (plan.problems_per_tile, plan.R))
        start = _Softmax(zeros(query, (plan.problems_per_tile, plan.R, plan.Dv)), none - jnp.inf, none)
        acc, m, l = for_active_tiles(schedule, plan.map_index(group), q_tile, step, start)
        m = score_unit * m
        out, *statistics = finish(m, l, acc, None if sinks is None else sinks[group])
        if plan.max_logits:
            statistics.append(largest(m, l))
        return (
            store(plan, state[0], group, q_tile, plan.bq, out, out_dtype),
            *(store_rows(plan, x, group, q_tile, new) for x, new in zip(state[1:], statistics, strict=True)),
        )

    rows = zeros(query, (plan.B * plan.K, plan.nq, plan.R))
    state = empty(q, plan.H, plan.Dv, out_dtype), *[rows] * (2 + plan.max_logits)
    out, *statistics = lax.fori_loop(0, plan.groups * plan.nq, row, state)
    return unpack(out, plan.T, out_dtype), *(unpack_rows(plan, x) for x in statistics)


def _finite(m: jax.Array) -> jax.Array:
    """``m``, and 0 where it is −inf: exp(−inf − 0) is 0, where exp(−inf + inf) is NaN."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def largest(m: jax.Array, l: jax.Array) -> jax.Array:
    """The largest scores ``m``; NaN where ``l`` is: with a score that is NaN or +inf."""
    return jnp.where(jnp.isnan(l), jnp.nan, m)


def finish(
    m: jax.Array, l: jax.Array, acc: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divide by the denominator, sinks included; fully masked rows give 0 and −inf.

    Args:
        m: [P, R], in natural units.
        l: [P, R].
        acc: [P, R, Dv].
        sink: [P, R]; None for none.

    Returns:
        Output [P, R, Dv], logsumexp and its rounding error [P, R].
    """
    sees_any = l != 0  # NaN too
    if sink is not None:
        new_m = jnp.maximum(m, sink)
        alpha = jnp.exp(m - _finite(new_m))
        l = l * alpha + jnp.exp(sink - _finite(new_m))
        acc, m = acc * alpha[..., None], new_m
    l = jnp.where(sees_any, l, 1.0)
    out = jnp.where(sees_any[..., None], (1 / l)[..., None] * acc, 0.0)
    log_l = jnp.log(l)
    lse = m + log_l
    return out, jnp.where(sees_any, lse, -jnp.inf), jnp.where(sees_any, m - lse + log_l, 0.0)


def _sinks_of_rows(plan: NativePlan, sinks: jax.Array) -> jax.Array:
    """[H] to [groups, P, R]."""
    rows = jnp.repeat(reshaped(sinks, plan.K, plan.G), plan.bq, axis=1)
    return reshaped(jnp.tile(rows, (plan.B, 1)), plan.groups, plan.problems_per_tile, plan.R)
