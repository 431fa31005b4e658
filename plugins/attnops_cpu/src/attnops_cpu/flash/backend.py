"""The C++ kernels as a backend of the flash skeleton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import Bias, RelativeBias
from attnops.dropout import dropout_rows, dropout_seed, dropout_step
from attnops.kernels import FlashBackend, FlashCall, Operands, Result, ReverseInputs, Statistics
from attnops_cpu.flash.calls import Cotangents, backward, backward_with_bias, forward
from attnops_cpu.flash.plan import HIGHEST, LOWEST, PANEL, TILE, Arrays, CpuPlan, TileMap
from attnops_cpu.flash.tile_map import tile_map

if TYPE_CHECKING:
    from attnops.typing import DType, PyTree

# The dtypes of biases that kernels read.
_FLOATS = ("float32", "bfloat16", "float16")


class CpuFlash(FlashBackend):
    """The steps of `attnops.kernels.flash.attention` in C++. Statistics: the logsumexp and its rounding error."""

    def compute_dtype(self, call: FlashCall) -> DType:
        same = call.query.dtype == call.key.dtype == call.value.dtype
        return call.query.dtype if same else jnp.dtype(jnp.float32)

    def plan(self, call: FlashCall) -> CpuPlan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        metadata = call.metadata
        low, high = (None, None) if call.mask is None else call.mask.split().band.limits
        return CpuPlan(
            B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, block_q=min(metadata.block_q or TILE, T),
            block_k=-(-min(metadata.block_k or 4 * PANEL, S) // PANEL) * PANEL, dtype=call.query.dtype.name,
            is_partial=call.is_partial, scale=call.scale, cap=call.logits_soft_cap or 0.0,
            low=_limit(low, LOWEST), high=_limit(high, HIGHEST),
            table=isinstance(call.bias, RelativeBias), dropout_prob=call.dropout_prob,
            dropout_step=dropout_step(call.dropout_key), max_logits=call.max_logits,
            in_place=False,
        )  # fmt: skip

    def arrays(self, plan: CpuPlan, call: FlashCall) -> Arrays:
        bias: PyTree = call.bias
        if isinstance(bias, RelativeBias):
            bias = bias.by_distance(plan.H, plan.T, plan.S).astype(jnp.float32)[None]
        assert not isinstance(bias, Bias)
        if bias is not None and (plan.in_place or bias.dtype.name not in _FLOATS):
            bias = bias.astype(jnp.float32)
        dropout = None
        if call.dropout_key is not None and plan.dropout_prob:
            b, h, i = np.ix_(*(np.arange(n) for n in (plan.B, plan.H, plan.T)))
            dropout = dropout_rows(dropout_seed(call.dropout_key), b, h, i)
        return Arrays(None if call.sinks is None else call.sinks.astype(jnp.float32)[None], bias, dropout)

    def schedule(self, plan: CpuPlan, call: FlashCall) -> TileMap:
        return tile_map(plan, call.mask)

    def run(self, plan: CpuPlan, operands: Operands) -> Result:
        return _forward(self, plan, operands)

    def run_gradients(
        self, plan: CpuPlan, wants_bias: bool, operands: Operands, given: ReverseInputs
    ) -> tuple[PyTree, ...]:
        return _backward(self, plan, wants_bias, operands, given)

    def bias_arrays(self, arrays: Arrays) -> PyTree:
        return arrays.bias

    def forward(self, plan: CpuPlan, operands: Operands) -> Result:
        query, key, value, arrays, tiles = operands
        out, lse, residual, *highest = forward(plan, query, key, value, arrays, tiles)
        return out, (lse, residual), *highest

    def gradients(
        self,
        plan: CpuPlan,
        wants_bias: bool,
        operands: Operands,
        statistics: Statistics,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        query, key, value, arrays, tiles = operands
        d_out = d_out.astype(jnp.float32 if plan.dtype == "float16" else plan.dtype)
        lse, lse_residual = statistics
        given = Cotangents(d_out, lse, lse_residual, delta)
        if not wants_bias:
            return *backward(plan, query, key, value, arrays, tiles, given), Arrays()
        *d, d_bias = backward_with_bias(plan, query, key, value, arrays, tiles, given)
        return *d, Arrays(bias=d_bias.astype(arrays.bias.dtype))


def _limit(given: int | None, default: int) -> int:
    """A band's limit, clipped to `LOWEST` and `HIGHEST`, which are farther than any key and fit int64."""
    return default if given is None else max(LOWEST, min(given, HIGHEST))


# Compiled once for equal plans, also where the caller does not compile.
_forward = jax.jit(CpuFlash.forward, static_argnums=(0, 1))
_backward = jax.jit(FlashBackend.run_gradients, static_argnums=(0, 1, 2))
