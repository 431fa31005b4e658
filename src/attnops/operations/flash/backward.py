"""The backward pass: one sweep that recomputes the weights from the logsumexp (Dao 2023, arXiv:2307.08691).

The outer loop is over tiles of keys, whose gradients it carries. Gradients of queries are added in place, always in the
same order, so that the result is the same at every run. Scores are transposed, [bk, R]: with the logsumexp and
``delta`` known, nothing is reduced over a tile, and all five products have the form that is fastest on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from attnops.kernels.calls import jvp_of
from attnops.operations.flash.operands import (
    NativeArrays,
    add_transposed,
    empty,
    load,
    load_rows,
    numbers_of,
    pack,
    pack_rows,
    store,
    unpack,
    unpack_transposed,
    zeros,
)
from attnops.operations.flash.plan import Index, NativePlan, NativeTileIndex, quotient_and_remainder
from attnops.operations.flash.scoring import Numbers
from attnops.operations.flash.tile import allowed, cap_and_bias_vjp, dropout, zero_masked_tokens
from attnops.operations.flash.tile_bias import Leaves, inexact_leaves
from attnops.operations.flash.tile_schedule import NativeTileSchedule, for_active_tiles
from attnops.typing import Leaf, PyTree


class NativeInputs(NamedTuple):
    """The arrays of the backward pass.

    Attributes:
        q: [B, T, H, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        d_out: [B, T, H, Dv].
        lse: [B, H, T].
        delta: [B, H, T], ``(d_out · out − d_lse) · factor``: a score's gradient is ``weight · (d_weight − delta)``.
        factor: [B, H, T], by which ``d_out`` is multiplied.
    """

    q: Leaf
    k: Leaf
    v: Leaf
    d_out: Leaf
    lse: Leaf
    delta: Leaf
    factor: Leaf


class Gradients(NamedTuple):
    """Gradients in their arrays' dtypes, or float32 for a partial softmax; empty for a bias without gradients."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: Leaves


class _Keys(NamedTuple):
    """A tile of keys and values: [P, bk, D], [P, D, bk] and [P, bk, Dv]."""

    k: jax.Array
    k_transposed: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """What is the same for all tiles.

    Attributes:
        plan: the plan of the call.
        wants_bias: whether the gradient of the bias is computed.
        inputs: the inputs, laid out in tiles by `pack`.
        dtypes: the dtypes of the inputs before they were packed.
        arrays: the other arrays of the call.
        numbers: the numbers of the call.
        zeroed: whether masked scores are 0 for cap and bias: elsewhere a function may have no finite derivative.
    """

    plan: NativePlan
    wants_bias: bool
    inputs: NativeInputs
    dtypes: NativeInputs
    arrays: NativeArrays
    numbers: Numbers
    zeroed: bool = False

    def load_keys(self, group: Index, kv_tile: Index) -> _Keys:
        plan = self.plan
        k = load(plan, self.inputs.k, group, kv_tile, plan.bk, self.dtypes.k)
        v = load(plan, self.inputs.v, group, kv_tile, plan.bk, self.dtypes.v)
        # Transposed once for the gradients of all tiles of queries.
        return _Keys(k, k.swapaxes(1, 2), v)

    def add_tile(self, keys: _Keys, index: NativeTileIndex, state: Gradients, masked: bool) -> Gradients:
        """``state`` plus the gradients of a tile of scores; ``state`` has the key and value gradients of one tile."""
        plan, scoring, group, q_tile = self.plan, self.plan.scoring, index.group, index.q_tile
        # The scale is multiplied in as in the forward pass, so that the scores are the same to the last bit.
        q = load(plan, self.inputs.q, group, q_tile, plan.bq, self.dtypes.q)
        q = self.numbers.fold_scale(q, plan.dtype)  # [P, R, D]
        d_out = load(plan, self.inputs.d_out, group, q_tile, plan.bq, self.dtypes.d_out)  # [P, R, Dv]
        d_out = (d_out * load_rows(plan, self.inputs.factor, group, q_tile)[:, :, None]).astype(plan.dtype)
        visible = allowed(plan, self.arrays.mask, index, ragged_queries=True) if masked else None
        if visible is not None and scoring.has_fully_masked_tokens:
            q = zero_masked_tokens(q, visible, axis=1)
            k, v = (zero_masked_tokens(x, visible, axis=2) for x in (keys.k, keys.v))
            keys = _Keys(k, k.swapaxes(1, 2), v)
        scores = self.numbers.scaled(plan.product(keys.k, q, 2, 2))  # [P, bk, R]
        pull_back = None
        if scoring.has_cap_or_bias:
            scores = jnp.where(visible, scores, 0.0) if visible is not None and self.zeroed else scores
            slices = () if scoring.bias is None else scoring.bias.load(plan, self.arrays.bias, index)
            scores, pull_back = cap_and_bias_vjp(plan, self.numbers.cap, self.wants_bias, scores, slices, index)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        weights = jnp.exp(scores - load_rows(plan, self.inputs.lse, group, q_tile)[:, None, :])
        drop = dropout(scoring, self.arrays.seed, index)
        d_v = state.value + plan.product(drop(weights).astype(plan.dtype), d_out, 2, 1)
        d_weights = drop(plan.product(keys.v, d_out, 2, 2))
        d_scores = weights * (d_weights - load_rows(plan, self.inputs.delta, group, q_tile)[:, None, :])
        d_bias = state.bias
        if pull_back is not None:
            d_scores, d_slices = pull_back(d_scores)
            if visible is not None:  # elsewhere the product may be 0, where a derivative may be infinite
                d_scores = jnp.where(visible, d_scores, 0.0)
            if self.wants_bias and scoring.bias is not None:
                d_bias = scoring.bias.add_gradients(plan, d_bias, d_slices, index)
        d_scores = d_scores.astype(plan.dtype)
        d_k = state.key + plan.product(d_scores, q, 2, 1)
        d_q = plan.product(keys.k_transposed, d_scores, 2, 1)  # [P, D, R]
        return Gradients(add_transposed(plan, state.query, group, q_tile, d_q), d_k, d_v, d_bias)


def backward(
    plan: NativePlan, wants_bias: bool, inputs: NativeInputs, arrays: NativeArrays, schedule: NativeTileSchedule,
    tangents: list[Leaf] | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of query, key, value and bias; O(T) temporaries.

    Args:
        plan: the plan of the call.
        wants_bias: whether the gradient of the bias is computed.
        inputs: query, key and value, the cotangent of the output, and the statistics of the forward pass.
        arrays: the other arrays of the call.
        schedule: the active tiles, by tiles of keys.
        tangents: of the inputs and of the bias's arrays, None for zero: the tangents of the gradients are returned.
    """
    numbers = numbers_of(plan.scoring, arrays)
    sweep = _Sweep(plan, wants_bias, _pack(plan, inputs), NativeInputs(*(x.dtype for x in inputs)), arrays, numbers)
    add_tile = sweep.add_tile if tangents is None else _add_tangents(sweep, inputs, tangents)
    # The gradients of a partial softmax are added to others: they are not rounded.
    dtypes = [jnp.dtype(jnp.float32) if plan.is_partial else x.dtype for x in inputs[:3]]

    def row(i: Index, state: Gradients) -> Gradients:
        group, kv_tile = quotient_and_remainder(i, plan.nk)
        keys = sweep.load_keys(group, kv_tile)

        def step(q_tile: Index, carry: Gradients, masked: bool) -> Gradients:
            index = plan.tile_index(group, q_tile, kv_tile, transposed=True)
            return add_tile(keys, index, carry, masked)

        start = state._replace(
            key=zeros(inputs.q, (plan.problems_per_tile, plan.bk, plan.D)),
            value=zeros(inputs.q, (plan.problems_per_tile, plan.bk, plan.Dv)),
        )
        done = for_active_tiles(schedule, plan.map_index(group), kv_tile, step, start)
        return done._replace(
            key=store(plan, state.key, group, kv_tile, plan.bk, numbers.scaled(done.key), dtypes[1]),
            value=store(plan, state.value, group, kv_tile, plan.bk, done.value, dtypes[2]),
        )

    leaves = inexact_leaves(arrays.bias) if wants_bias else ()
    start = Gradients(
        # Many tiles add to a query's gradient: float32, laid out as products. Key and value gradients are stored once.
        zeros(inputs.q, (plan.groups, plan.nq, plan.problems_per_tile, plan.D, plan.R)),
        empty(sweep.inputs.k, plan.K, plan.D, dtypes[1]),
        empty(sweep.inputs.v, plan.K, plan.Dv, dtypes[2]),
        jax.tree.map(lambda leaf: zeros(inputs.q, leaf.shape), leaves),
    )
    done = lax.fori_loop(0, plan.groups * plan.nk, row, start)
    return Gradients(
        (unpack_transposed(plan, done.query) * numbers.scale).astype(dtypes[0]),
        unpack(done.key, plan.S, dtypes[1]),
        unpack(done.value, plan.S, dtypes[2]),
        jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), done.bias, leaves),
    )


def _add_tangents(sweep: _Sweep, inputs: NativeInputs, tangents: list[Leaf]) -> Callable[..., Gradients]:
    """`_Sweep.add_tile` for the tangents of gradients; the gradients themselves are not computed."""
    plan, arrays, n = sweep.plan, sweep.arrays, len(inputs)
    packed = jvp_of(lambda *x: _pack(plan, NativeInputs(*x)), inputs, tangents[:n])
    tangents = [None if t is None else x for t, x in zip(tangents, [*packed, *tangents[n:]], strict=True)]

    def add_tile(keys: _Keys, index: NativeTileIndex, state: Gradients, masked: bool) -> Gradients:
        def added(state: Gradients, *given: jax.Array) -> Gradients:
            inputs, bias = NativeInputs(*given[:n]), given[n:]
            one = dataclasses.replace(sweep, inputs=inputs, arrays=arrays._replace(bias=bias), zeroed=True)
            return one.add_tile(one.load_keys(index.group, index.kv_tile), index, state, masked)

        # Gradients are added to the state, so that the tangent of its sum with a tile's is the sum of their tangents.
        result: Gradients = jvp_of(added, [state, *sweep.inputs, *arrays.bias], [state, *tangents])
        return result

    return add_tile


def _pack(plan: NativePlan, inputs: NativeInputs) -> NativeInputs:
    # A fully masked row, and the ragged end, have weights exp(score − inf) = 0.
    lse = jnp.where(inputs.lse == -jnp.inf, jnp.inf, inputs.lse)
    return NativeInputs(
        q=pack(inputs.q, plan.nq * plan.bq),
        k=pack(inputs.k, plan.nk * plan.bk),
        v=pack(inputs.v, plan.nk * plan.bk),
        d_out=pack(inputs.d_out, plan.nq * plan.bq),
        lse=pack_rows(plan, lse, fill=jnp.inf),
        delta=pack_rows(plan, inputs.delta, fill=0.0),
        factor=pack_rows(plan, inputs.factor, fill=0.0),
    )


# `backward`, which JAX differentiates in forward mode.
with_tangents: Final = jax.custom_jvp(backward, nondiff_argnums=(0, 1))


@functools.partial(with_tangents.defjvp, symbolic_zeros=True)
def _(plan: NativePlan, wants_bias: bool, given: PyTree, tangents: PyTree) -> tuple[Gradients, Gradients]:
    inputs, arrays, schedule, _ = given
    moving = [None if isinstance(t, SymbolicZero) else t for t in (*tangents[0], *tangents[1].bias)]
    # 16-bit floats would be packed as integers, which have no tangents.
    n, wide = len(inputs), NativeInputs(*(x.astype(jnp.float32) for x in inputs))
    moving[:n] = [None if t is None else t.astype(jnp.float32) for t in moving[:n]]
    out, d = backward(plan, wants_bias, *given), backward(plan, wants_bias, wide, arrays, schedule, moving)
    return out, jax.tree.map(lambda d, x: d.astype(x.dtype), d, out)
