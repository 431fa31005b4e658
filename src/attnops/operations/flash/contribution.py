"""The sum over the keys at a given logsumexp, which JAX differentiates: derivatives that no kernel computes.

A loop over tiles of queries holds one over tiles of keys. Both are checkpointed, so that reverse mode, too, needs
O(T + S) memory. EMPTY tiles are not computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels.flash import FlashCall, Operands, PlainBackend
from attnops.masks.coverage import Coverage
from attnops.operations.flash.backend import NativeFlash, call_once, coverage_of
from attnops.operations.flash.operands import NativeArrays, numbers_of, pack_rows, zeros
from attnops.operations.flash.plan import NativePlan
from attnops.operations.flash.tile import allowed, apply_cap_and_bias, dropout, zero_masked_tokens
from attnops.sharding.placing import reshaped
from attnops.softmax import Contribution
from attnops.typing import Leaf


class PlainFlash(NativeFlash, PlainBackend):
    """Native `flash` for all derivatives other than reverse mode; its gradients have tangents."""

    def contribution(self, call: FlashCall, lse: jax.Array, lse_residual: jax.Array) -> Contribution:
        """See `PlainBackend.contribution`; query, key, value, the bias's arrays and ``lse`` are differentiable."""
        call = self.fit(call.replace(is_partial=True, max_logits=False))
        plan = self.plan(call)
        operands = Operands(call.query, call.key, call.value, self.arrays(plan, call), coverage_of(call, plan))
        if plan.scoring.holds_function:
            result: Contribution = call_once(functools.partial(_contribution, plan), (operands, lse, lse_residual))
            return result
        return _compiled(plan, operands, lse, lse_residual)


def _contribution(plan: NativePlan, operands: Operands, lse: jax.Array, lse_residual: jax.Array) -> Contribution:
    arrays: NativeArrays = operands.arrays
    coverage = reshaped(jnp.asarray(operands.schedule), -1, plan.nq, plan.nk)
    is_ragged = bool(plan.T % plan.bq or plan.S % plan.bk)
    numbers = numbers_of(plan.scoring, arrays)
    # A fully masked row, and the ragged end, have weights exp(score − inf) = 0.
    lse = _rows(plan, jnp.where(lse == -jnp.inf, jnp.inf, lse), fill=jnp.inf)
    factor = _rows(plan, jnp.exp(-lse_residual), fill=0.0)
    q = _tiles(plan, operands.query, plan.nq, plan.bq)
    k, v = (_tiles(plan, x, plan.nk, plan.bk) for x in (operands.key, operands.value))

    @jax.checkpoint
    def tile(
        q: jax.Array, lse: jax.Array, k: jax.Array, v: jax.Array, bias: Leaf, at: tuple[Leaf, Leaf, Leaf]
    ) -> Contribution:
        index = plan.tile_index(*at, transposed=False)
        visible = None
        if arrays.mask is not None or is_ragged:
            visible = allowed(plan, arrays.mask, index, ragged_queries=True)
        if visible is not None and plan.scoring.has_fully_masked_tokens:
            q = zero_masked_tokens(q, visible, axis=2)
            k, v = (zero_masked_tokens(x, visible, axis=1) for x in (k, v))
        scores = numbers.scaled(plan.product(numbers.fold_scale(q, plan.dtype), k, 2, 2))
        if visible is not None and plan.scoring.has_cap_or_bias:  # elsewhere a function may have no finite derivative
            scores = jnp.where(visible, scores, 0.0)
        slices = () if plan.scoring.bias is None else plan.scoring.bias.load(plan, bias, index)
        scores = apply_cap_and_bias(plan, numbers.cap, scores, slices, index)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        weights = jnp.exp(scores - lse[..., None])
        dropped = dropout(plan.scoring, arrays.seed, index)(weights)
        return Contribution(plan.product(dropped.astype(plan.dtype), v, 2, 1), weights.sum(-1))

    @jax.checkpoint
    def row(q: jax.Array, lse: jax.Array, k: jax.Array, v: jax.Array, bias: Leaf, at: Leaf) -> Contribution:
        group, q_tile, covers = at

        def step(state: Contribution, given: Leaf) -> tuple[Contribution, None]:
            k, v, cover, kv_tile = given

            def of_tile() -> Contribution:
                return tile(q, lse, k, v, bias, (group, q_tile, kv_tile))

            new = lax.cond(cover != Coverage.EMPTY, of_tile, lambda: start)
            return Contribution(state.out + new.out, state.weight + new.weight), None

        start = Contribution(zeros(q, (*lse.shape, plan.Dv)), zeros(q, lse.shape))
        return lax.scan(step, start, (k, v, covers, jnp.arange(plan.nk)))[0]

    def rows(carry: None, given: Leaf) -> tuple[None, Contribution]:
        q, lse, k, v, group = given

        def one(carry: None, given: Leaf) -> tuple[None, Contribution]:
            q, lse, q_tile, covers = given
            return None, row(q, lse, k, v, arrays.bias, (group, q_tile, covers))

        return None, lax.scan(one, None, (q, lse, jnp.arange(plan.nq), coverage[plan.map_index(group)]))[1]

    out, weight = lax.scan(rows, None, (q, lse, k, v, jnp.arange(plan.groups)))[1]
    out, weight = _from_rows(plan, out * factor[..., None]), _from_rows(plan, (weight * factor)[..., None])
    return Contribution(out, weight[..., 0].swapaxes(1, 2))


_compiled = jax.jit(_contribution, static_argnums=0)


def _tiles(plan: NativePlan, x: jax.Array, tiles: int, size: int) -> jax.Array:
    """[B, length, heads, d] to [groups, tiles, P, rows, d], zeros at the ragged end; a kv head's query heads are rows
    of one tile.
    """
    B, length, heads, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, tiles * size - length), (0, 0), (0, 0)))
    x = reshaped(x, B, tiles, size, plan.K, heads // plan.K, d).transpose(0, 3, 1, 4, 2, 5)
    x = reshaped(x, plan.groups, plan.problems_per_tile, tiles, heads // plan.K * size, d)
    return x.swapaxes(1, 2).astype(plan.dtype)


def _rows(plan: NativePlan, x: jax.Array, fill: float) -> jax.Array:
    """[B, H, T] to [groups, nq, P, R], ``fill`` at the ragged end."""
    rows = pack_rows(plan, x, fill)
    return reshaped(rows, plan.groups, plan.problems_per_tile, plan.nq, plan.R).swapaxes(1, 2)


def _from_rows(plan: NativePlan, x: jax.Array) -> jax.Array:
    """[groups, nq, P, R, d] to [B, T, H, d]."""
    x = reshaped(x.swapaxes(1, 2), plan.B, plan.K, plan.nq, plan.G, plan.bq, x.shape[-1])
    x = x.transpose(0, 2, 4, 1, 3, 5)
    return reshaped(x, plan.B, plan.nq * plan.bq, plan.H, x.shape[-1])[:, : plan.T]
