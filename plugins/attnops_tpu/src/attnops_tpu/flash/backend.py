"""The Pallas kernels as a backend of the flash skeleton."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.biases import Bias
from attnops.dropout import dropout_step
from attnops.kernels import FlashBackend, FlashCall, Operands, Result, describe, map_shape
from attnops_tpu.flash.backward import Inputs, backward
from attnops_tpu.flash.bias_gradient import bias_gradients
from attnops_tpu.flash.forward import forward
from attnops_tpu.flash.operands import Arrays, pad_last
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.prepare import arrays, by_score, tile_schedules, work
from attnops_tpu.flash.tile import LN2, score_unit
from attnops_tpu.flash.tile_schedule import TileSchedules
from attnops_tpu.flash.tile_sizes import Problem, choose
from attnops_tpu.generations import bounds_checks, generation

if TYPE_CHECKING:
    from attnops.typing import DType, PyTree


class PallasFlash(FlashBackend):
    """See `FlashBackend`. Scores are transposed, see `FlashPlan`."""

    head_dim_multiple: ClassVar[int] = 8  # the sublanes of a vector register

    def compute_dtype(self, call: FlashCall) -> DType:
        return jnp.bfloat16 if call.query.dtype == call.key.dtype == call.value.dtype == jnp.bfloat16 else jnp.float32

    def plan(self, call: FlashCall) -> FlashPlan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        dtype, metadata, mask = call.query.dtype, call.metadata, call.mask
        scoring = describe(
            (T, S), mask, call.bias, call.logits_soft_cap, call.dropout_prob, call.sinks is not None,
            dropout_step(call.dropout_key),
        )  # fmt: skip
        if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:  # where x64 is on
            mask_of, bias_of = (f and f.in_32_bits() for f in (scoring.mask, scoring.bias))
            scoring = dataclasses.replace(scoring, mask=mask_of, bias=bias_of)
        array = _array_bias(call.bias) if scoring.array else None
        problem = Problem(
            T=T, S=S, G=H // K, D=D, Dv=Dv, itemsize=dtype.itemsize,
            out_itemsize=4 if call.is_partial else dtype.itemsize, has_cap_or_bias=scoring.has_cap_or_bias,
            n_maps=math.prod(map_shape(mask, call.scores_shape)),
            # Two buffers of each; the gradient of a bias needs an accumulator and two buffers in float32.
            bytes_a_score=2 * scoring.dense + (0 if array is None else 2 * array.dtype.itemsize + 12),
        )  # fmt: skip
        tiles = choose(metadata, problem, functools.partial(work, mask, call.scores_shape))
        chip = generation()
        # The matrix unit computes float32 products in one bfloat16 pass or in six; HIGH runs in six too.
        one_pass = dtype == jnp.bfloat16 or metadata.precision == lax.Precision.DEFAULT
        return FlashPlan(
            B=B, inner=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, dtype=jnp.dtype(dtype), is_partial=call.is_partial,
            scoring=scoring, precision=lax.Precision.DEFAULT if one_pass else lax.Precision.HIGHEST, scale=call.scale,
            interpret=metadata.interpret, strided_rotation=chip.strided_rotation,
            bounds_checks=bounds_checks(), sequential=chip.cores == 1, max_logits=call.max_logits,
            sublanes=math.gcd(chip.sublanes, Dv, tiles.forward.rows),
            **tiles._asdict(),
        )  # fmt: skip

    def arrays(self, plan: FlashPlan, call: FlashCall) -> Arrays:
        return arrays(plan, call)

    def schedule(self, plan: FlashPlan, call: FlashCall) -> TileSchedules:
        schedules = tile_schedules(plan, call.mask)
        if not plan.scoring.array:
            return schedules
        return schedules._replace(by_score=by_score(plan, call.mask, _array_bias(call.bias).shape))

    def forward(self, plan: FlashPlan, operands: Operands) -> Result:
        query, key, value, arrays, schedules = operands
        q, k, v = _heads_first(_scaled(plan, query), plan.Tp), _heads_first(key, plan.Sp), _heads_first(value, plan.Sp)
        out, rows = forward(plan, q, k, v, arrays, schedules.forward)
        lse, log2_residual, *highest = (rows[:, :, i, : plan.T] for i in range(plan.rows))
        return out[:, :, : plan.T].swapaxes(1, 2), (lse, log2_residual * LN2), *highest

    def gradients(
        self, plan: FlashPlan, wants_bias: bool, operands: Operands, statistics: PyTree, delta: jax.Array,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:  # fmt: skip
        query, key, value, arrays, schedules = operands
        lse, lse_residual = statistics
        # The weights exp(score − lse) are too large by 1 / factor, [B, H, T]. They are linear in their cotangents, to
        # which the factor is applied instead.
        factor = jnp.exp(-lse_residual)
        d_out = d_out.astype(jnp.float32) * factor.swapaxes(1, 2)[..., None]
        # A fully masked row, and the ragged end, have weights exp(score − inf) = 0.
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * (1 / score_unit(plan)))
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, plan.Tp - plan.T)), constant_values=jnp.inf)
        inputs = Inputs(
            q=_features_first(_scaled(plan, query), plan.Tp),
            k=_heads_first(key, plan.Sp),
            v=_heads_first(value, plan.Sp),
            d_out=_features_first(d_out.astype(plan.dtype), plan.Tp),
            rows=jnp.stack([lse, pad_last(delta * factor, plan.Tp)], axis=2),
        )
        dq, dk, dv = backward(plan, inputs, arrays, schedules.spans)
        dq = jnp.moveaxis(dq[..., : plan.T], 3, 1)
        dk, dv = (jnp.moveaxis(d[..., : plan.S], 3, 1) for d in (dk, dv))
        d_arrays = Arrays(mask=None, dense=None, chosen=None, bias=None)  # type: ignore[arg-type]
        if wants_bias:
            d_arrays = bias_gradients(plan, inputs, arrays, schedules.forward, schedules.by_score)
        return dq, dk, dv, d_arrays


def _array_bias(bias: PyTree) -> jax.Array:
    assert not isinstance(bias, Bias)
    array: jax.Array = bias
    return array


def _scaled(plan: FlashPlan, query: jax.Array) -> jax.Array:
    """The query times the folded factor of the scale, which does not round."""
    return query * jnp.asarray(plan.folded, query.dtype)


def _features_first(x: jax.Array, size: int) -> jax.Array:
    """[B, length, heads, d] to [B, heads, d, size]."""
    return pad_last(jnp.moveaxis(x, 1, 3), size)


def _heads_first(x: jax.Array, size: int) -> jax.Array:
    """[B, length, heads, d] to [B, heads, size, d]."""
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, size - x.shape[1]), (0, 0)))
