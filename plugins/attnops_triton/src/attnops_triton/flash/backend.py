"""The Triton kernels as a backend of the flash skeleton."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dropout import dropout_step
from attnops.kernels import FlashBackend, FlashCall, Operands, Result, describe
from attnops_triton.flash.backward import Inputs, by_key, by_query, fused
from attnops_triton.flash.bias_gradient import array_gradient, table_gradient
from attnops_triton.flash.bits import is_translatable
from attnops_triton.flash.forward import forward
from attnops_triton.flash.operands import Arrays
from attnops_triton.flash.order import is_unordered
from attnops_triton.flash.plan import LN2, FlashPlan
from attnops_triton.flash.prepare import arrays, mask_of_scores, tile_schedules
from attnops_triton.flash.specialised import CallFacts, specialised_tiles, with_measured
from attnops_triton.flash.tile_schedule import TileSchedules
from attnops_triton.flash.tile_sizes import choose
from attnops_triton.language.compat import device_arch
from attnops_triton.targets import current

if TYPE_CHECKING:
    from attnops.typing import DType, Leaf, PyTree


class TritonFlash(FlashBackend):
    """The steps of `attnops.kernels.flash.attention` in Triton.

    The statistics of a softmax are ``m`` and ``log2_sum``, as `attnops_triton.flash.forward.forward` returns them. With
    them the weights of the backward pass equal those of the forward pass to the last bit.
    """

    def compute_dtype(self, call: FlashCall) -> DType:
        same = call.query.dtype == call.key.dtype == call.value.dtype
        return call.query.dtype if same else jnp.dtype(jnp.float32)

    def fit(self, call: FlashCall) -> FlashCall:
        fitted = super().fit(call)
        if not call.metadata.interpret:
            return fitted
        mask, bias = jax.tree.map(_widen, (call.mask, call.bias))
        return fitted.replace(mask=mask, bias=bias)

    def plan(self, call: FlashCall) -> FlashPlan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        dtype, metadata = call.query.dtype, call.metadata
        # A mask that has no translation to Triton is passed as bits, which are computed for PARTIAL tiles only.
        bit_mask = call.mask is not None and not is_translatable(call.mask)
        scoring = describe(
            (T, S), mask_of_scores(call.mask, T, S), call.bias, call.logits_soft_cap, call.dropout_prob,
            call.sinks is not None, dropout_step(call.dropout_key), bit_mask,
        )  # fmt: skip
        if call.mask is not None:
            fully_masked = call.mask.has_fully_masked_tokens(T, S)
            scoring = dataclasses.replace(scoring, has_fully_masked_tokens=fully_masked)
        arch = current() if metadata.interpret else current() or device_arch()
        mask_per_score = bit_mask or scoring.dense > 0 or scoring.chosen != ()
        facts = CallFacts(
            dtype.name, D, Dv, (T, S), mask_per_score=mask_per_score, bias=scoring.has_bias,
            dropout=bool(scoring.dropout_prob), may_be_fully_masked=scoring.has_fully_masked_tokens,
            is_partial=call.is_partial, sets_tile_sizes=(metadata.block_q, metadata.block_k) != (None, None),
            interpret=metadata.interpret,
        )  # fmt: skip
        measured = with_measured(specialised_tiles(arch, facts, scoring), facts)
        tiles = choose(
            arch,
            dtype.name,
            max(D, Dv),
            metadata.block_q,
            metadata.block_k,
            bit_mask or scoring.dense > 0 or scoring.array,
            measured,
            (T, S),
        )
        return FlashPlan(
            B=B, inner=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, forward=tiles[0], by_query=tiles[1], by_key=tiles[2],
            by_score=tiles[3], dtype=dtype.name, is_partial=call.is_partial, scale=call.scale,
            tf32=metadata.precision == lax.Precision.DEFAULT, scoring=scoring, bit_mask=bit_mask, arch=arch,
            interpret=metadata.interpret, unordered=is_unordered(), max_logits=call.max_logits,
        )  # fmt: skip

    def arrays(self, plan: FlashPlan, call: FlashCall) -> Arrays:
        return arrays(plan, call)

    def schedule(self, plan: FlashPlan, call: FlashCall) -> TileSchedules:
        return tile_schedules(plan, call.mask)

    def forward(self, plan: FlashPlan, operands: Operands) -> Result:
        query, key, value, arrays, schedules = operands
        out, m, log2_sum, *highest = forward(plan, query, key, value, arrays, schedules.forward)
        return out, (m, log2_sum), *(x * plan.score_unit for x in highest)

    def logsumexp(self, plan: FlashPlan, statistics: PyTree) -> tuple[jax.Array, jax.Array]:
        m, log2_sum = statistics
        m, log_sum = m * plan.score_unit, log2_sum * LN2
        lse = m + log_sum
        return lse, jnp.where(lse == -jnp.inf, 0.0, (m - lse) + log_sum)

    def statistics(self, plan: FlashPlan, lse: jax.Array, lse_residual: jax.Array) -> PyTree:
        m = lse * (1 / plan.score_unit)
        log2_sum = jnp.where(m == -jnp.inf, 0.0, ((lse - m * plan.score_unit) + lse_residual) * (1 / LN2))
        return m, log2_sum

    def gradients(
        self,
        plan: FlashPlan,
        wants_bias: bool,
        operands: Operands,
        statistics: PyTree,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        if plan.dtype != "float16":
            return _gradients(plan, wants_bias, operands, statistics, delta, d_out)
        # Gradients of scores may be below 6e-8, the smallest float16. So cotangents are scaled to about 1 by a power of
        # two, and the float32 gradients, which are linear in the cotangents, are scaled back.
        largest = jnp.abs(d_out.astype(jnp.float32)).max()
        scale = jnp.exp2(-jnp.floor(jnp.log2(jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0))))
        scaled = delta * scale, d_out.astype(jnp.float32) * scale
        dq, dk, dv, d_arrays = _gradients(plan, wants_bias, operands, statistics, *scaled)

        def unscale(d: Leaf, x: Leaf) -> Leaf:
            return None if d is None else (d / scale).astype(x.dtype)

        d_arrays = jax.tree.map(unscale, d_arrays, operands.arrays, is_leaf=lambda d: d is None)
        return dq / scale, dk / scale, dv / scale, d_arrays


def _gradients(
    plan: FlashPlan, wants_bias: bool, operands: Operands, statistics: PyTree, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
    query, key, value, arrays, schedules = operands
    m, log2_sum = statistics
    # With m = inf the weights of a fully masked query are exp(score − inf) = 0.
    m = jnp.where(m == -jnp.inf, jnp.inf, m)
    inputs = Inputs(query, key, value, d_out.astype(query.dtype), m, log2_sum, delta)
    axes = () if plan.scoring.bias is None or not wants_bias else plan.scoring.bias.values
    wanted = [i for i in range(len(axes)) if jnp.issubdtype(arrays.bias[i].dtype, jnp.floating)]
    per_key = tuple(i for i in wanted if "kv" in axes[i])
    per_query = tuple(i for i in wanted if "kv" not in axes[i])
    d_per_query: dict[int, jax.Array] = {}
    d_per_key: dict[int, jax.Array] = {}
    if plan.fuses_dq:
        dq, dk, dv = fused(plan, inputs, arrays, schedules.by_key)
    else:
        # Fix the choice: under `jax.vmap` the functions below change the plan's batch, on which `fuses_dq` depends.
        plan = dataclasses.replace(plan, unordered=False)
        dq, d_per_query = by_query(plan, inputs, arrays, schedules.by_query or schedules.forward, per_query)
        dk, dv, d_per_key = by_key(plan, inputs, arrays, schedules.by_key, per_key)
    d_arrays = Arrays(mask=None, dense=None, chosen=None, bias=None)  # type: ignore[arg-type]
    if wants_bias:
        d_values = d_per_query | d_per_key
        gradients: PyTree = (_sum_like(d_values[i], x) if i in d_values else None for i, x in enumerate(arrays.bias))
        d_arrays = d_arrays._replace(bias=tuple(gradients))
        if arrays.table is not None:
            d_arrays = d_arrays._replace(table=table_gradient(plan, inputs, arrays, schedules.by_score))
        if arrays.array is not None:
            d_array = array_gradient(plan, inputs, arrays, schedules.by_score)
            d_arrays = d_arrays._replace(array=d_array.astype(arrays.array.dtype))
    return dq, dk, dv, d_arrays


def _widen(x: Leaf) -> Leaf:
    """bfloat16 as float32, since Triton's interpreter has no bfloat16."""
    return x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x


def _sum_like(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient [B, H, n] of a bias's value, summed to the value's shape [B or 1, H or 1, n or 1]."""
    axes = tuple(axis for axis in range(3) if x.shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True)
