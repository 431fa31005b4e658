"""The Triton kernels as a backend of the flash skeleton, and the gradients from what the forward saved."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from attnops.dropout import dropout_step
from attnops.kernels import FlashBackend, FlashCall, Operands, describe
from attnops_triton.flash.backward import Inputs, by_key, by_query
from attnops_triton.flash.bias_gradient import array_gradient, table_gradient
from attnops_triton.flash.bits import is_translatable
from attnops_triton.flash.forward import forward
from attnops_triton.flash.operands import Arrays
from attnops_triton.flash.plan import LN2, Plan
from attnops_triton.flash.prepare import arrays, maps
from attnops_triton.flash.tile_sizes import choose
from attnops_triton.flash.visits import Maps
from attnops_triton.language.compat import device_arch
from attnops_triton.targets import current


class TritonFlash(FlashBackend):
    """See `FlashBackend`.

    The statistics of a softmax are ``level`` and ``rest``, see `attnops_triton.flash.forward.forward`: the weights of
    the backward pass are then those of the forward pass to the last bit.
    """

    second_derivative: ClassVar[str] = (
        "this kernel's gradients have none of their own, but a second derivative was asked for; vanilla has one"
    )

    def compute_dtype(self, call: FlashCall) -> Any:
        same = call.query.dtype == call.key.dtype == call.value.dtype
        return call.query.dtype if same else jnp.dtype(jnp.float32)

    def fit(self, call: FlashCall) -> FlashCall:
        fitted = super().fit(call)
        if not call.metadata.interpret:
            return fitted
        mask, bias = jax.tree.map(_wide, (call.mask, call.bias))
        return fitted.replace(mask=mask, bias=bias)

    def plan(self, call: FlashCall) -> Plan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        dtype, metadata = call.query.dtype, call.metadata
        # A mask that has no form in Triton comes as bits, for the tiles that it is PARTIAL on.
        packed = call.mask is not None and not is_translatable(call.mask)
        scoring = describe(
            (T, S), call.mask, call.bias, call.logits_soft_cap, call.dropout_prob, call.sinks is not None,
            dropout_step(call.dropout_key), packed,
        )  # fmt: skip
        arch = "" if metadata.interpret else current() or device_arch()
        by_score = packed or scoring.dense > 0 or scoring.array
        tiles = choose(arch, dtype.name, max(D, Dv), metadata.block_q, metadata.block_k, by_score)
        return Plan(
            B=B, inner=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, forward=tiles[0], by_query=tiles[1], by_key=tiles[2],
            by_score=tiles[3], dtype=dtype.name, is_partial=call.is_partial, scale=call.scale,
            tf32=metadata.precision == lax.Precision.DEFAULT, scoring=scoring, packed=packed, arch=arch,
            interpret=metadata.interpret,
        )  # fmt: skip

    def arrays(self, plan: Plan, call: FlashCall) -> Arrays:
        return arrays(plan, call)

    def schedule(self, plan: Plan, call: FlashCall) -> Maps:
        return maps(plan, call.mask)

    def forward(self, plan: Plan, operands: Operands) -> tuple[jax.Array, Any]:
        query, key, value, arrays, maps = operands
        out, level, rest = forward(plan, query, key, value, arrays, maps.forward)
        return out, (level, rest)

    def logsumexp(self, plan: Plan, statistics: Any) -> tuple[jax.Array, jax.Array]:
        level, rest = statistics
        m, log = level * plan.unit, rest * LN2
        lse = m + log
        return lse, jnp.where(lse == -jnp.inf, 0.0, (m - lse) + log)

    def statistics(self, plan: Plan, lse: jax.Array, lse_residual: jax.Array) -> Any:
        level = lse * (1 / plan.unit)
        rest = jnp.where(level == -jnp.inf, 0.0, ((lse - level * plan.unit) + lse_residual) * (1 / LN2))
        return level, rest

    def gradients(
        self, plan: Plan, wants_bias: bool, operands: Operands, statistics: Any, delta: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        if plan.dtype != "float16":
            return _gradients(plan, wants_bias, operands, statistics, delta, d_out)
        # float16 ends at 6e-8, where gradients of scores may well lie: cotangents are brought to about 1 by a power of
        # two, in which gradients are linear, and the float32 gradients back from it.
        top = jnp.abs(d_out.astype(jnp.float32)).max()
        scale = jnp.exp2(-jnp.floor(jnp.log2(jnp.where((top > 0) & jnp.isfinite(top), top, 1.0))))
        scaled = delta * scale, d_out.astype(jnp.float32) * scale
        dq, dk, dv, d_arrays = _gradients(plan, wants_bias, operands, statistics, *scaled)

        def back(d: Any, x: Any) -> Any:
            return None if d is None else (d / scale).astype(x.dtype)

        d_arrays = jax.tree.map(back, d_arrays, operands.arrays, is_leaf=lambda d: d is None)
        return dq / scale, dk / scale, dv / scale, d_arrays


def _gradients(
    plan: Plan, wants_bias: bool, operands: Operands, statistics: Any, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
    query, key, value, arrays, maps = operands
    level, rest = statistics
    # A row that sees no key has weights exp(score − inf) = 0.
    above = jnp.where(level == -jnp.inf, jnp.inf, level)
    inputs = Inputs(query, key, value, d_out.astype(query.dtype), above, rest, delta)
    axes = () if plan.scoring.bias is None or not wants_bias else plan.scoring.bias.values
    wanted = [i for i in range(len(axes)) if jnp.issubdtype(arrays.bias[i].dtype, jnp.floating)]
    of_key = tuple(i for i in wanted if "kv" in axes[i])
    others = tuple(i for i in wanted if "kv" not in axes[i])
    dq, d_others = by_query(plan, inputs, arrays, maps.by_query or maps.forward, others)
    dk, dv, d_of_key = by_key(plan, inputs, arrays, maps.by_key, of_key)
    d_arrays = Arrays(mask=None, dense=None, bias=None)  # type: ignore[arg-type]
    if wants_bias:
        d_values = d_others | d_of_key
        of_values: Any = (_summed(d_values[i], x) if i in d_values else None for i, x in enumerate(arrays.bias))
        d_arrays = d_arrays._replace(bias=tuple(of_values))
        if arrays.table is not None:
            d_arrays = d_arrays._replace(table=table_gradient(plan, inputs, arrays, maps.by_score))
        if arrays.array is not None:
            d_array = array_gradient(plan, inputs, arrays, maps.by_score)
            d_arrays = d_arrays._replace(array=d_array.astype(arrays.array.dtype))
    return dq, dk, dv, d_arrays


def _wide(x: Any) -> Any:
    """Triton's interpreter has no bfloat16."""
    return x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x


def _summed(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """[B, H, n] summed to the shape of a value, see `attnops_triton.flash.operands.value_layout`."""
    axes = tuple(axis for axis in range(3) if x.shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True)
