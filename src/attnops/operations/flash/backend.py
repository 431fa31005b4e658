"""Plain JAX as a backend of the flash skeleton: loops over active tiles, laid out for CPUs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias
from attnops.dropout import dropout_seed, dropout_step
from attnops.kernels.block_maps import map_shape, merged, ragged
from attnops.kernels.derivatives import Result, Statistics
from attnops.kernels.flash import FlashBackend, FlashCall, Operands, PlainBackend, backward
from attnops.masks.base import Mask
from attnops.masks.blocks import block_map
from attnops.masks.chosen import block_sizes
from attnops.operations.flash.backward import NativeInputs, with_tangents
from attnops.operations.flash.backward import backward as tiled_backward
from attnops.operations.flash.forward import forward, from_arrays
from attnops.operations.flash.operands import NativeArrays
from attnops.operations.flash.plan import NativePlan
from attnops.operations.flash.scoring import NativeScoring, Numbers
from attnops.operations.flash.tile_bias import bias_leaves, bias_tiles
from attnops.operations.flash.tile_schedule import NativeTileSchedule, tile_schedule
from attnops.operations.flash.tile_sizes import NativeTileSizes, choose_problems_per_tile, choose_tiles, table_row
from attnops.programs.functions import holds_function, is_staged
from attnops.typing import Array, Function, PyTree

# Compiled once for equal plans, also where the caller does not compile.
_backward = jax.jit(backward, static_argnums=(0, 1, 2))


class NativeFlash(FlashBackend):
    """The flash skeleton in plain JAX. A schedule is a pair: by tiles of queries, and by tiles of keys for backward."""

    def plan(self, call: FlashCall) -> NativePlan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        metadata, bias = call.metadata, call.bias
        is_bfloat16 = call.query.dtype == call.key.dtype == call.value.dtype == jnp.bfloat16
        row = table_row(is_bfloat16, max(D, Dv))
        block_q, block_k = self.tiles(call, row)
        batches, heads = map_shape(call.mask, call.scores_shape)
        maps = batches, min(heads, K)
        batch, heads = (1, 1) if bias is None or isinstance(bias, Bias) else bias.shape[:2]
        problems_per_tile = choose_problems_per_tile(
            B, K, (H // K) * block_q * block_k, by_batch=batch != 1 or maps[0] != 1, by_head=heads > 1,
            by_kv_head=maps[1] > 1, row=row,
        )  # fmt: skip
        plan = NativePlan(
            B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, bq=block_q, bk=block_k,
            problems_per_tile=problems_per_tile, map_shape=maps,
            dtype=jnp.dtype(jnp.bfloat16 if is_bfloat16 else jnp.float32), is_partial=call.is_partial,
            precision=lax.Precision.HIGHEST if metadata.precision is None else metadata.precision,
            max_logits=call.max_logits,
        )  # fmt: skip
        # Outside `jax.jit` numbers are data, so that new ones compile nothing; inside, constants make better programs.
        is_data = not is_staged()
        mask = _mask(call, is_data)
        scoring = NativeScoring(
            numbers=None if is_data else Numbers.make(call.scale, call.logits_soft_cap, plan.dtype),
            has_cap=call.logits_soft_cap is not None,
            bias=None if bias is None else bias_tiles(plan, _bias(bias, is_data)),
            dropout_prob=call.dropout_prob,
            dropout_step=dropout_step(call.dropout_key),
            has_fully_masked_tokens=mask is not None and mask.has_fully_masked_tokens(T, S),
            holds_function=holds_function(call.mask) or holds_function(bias),
        )
        return dataclasses.replace(plan, scoring=scoring)

    def tiles(self, call: FlashCall, row: NativeTileSizes) -> tuple[int, int]:
        """Queries and keys per tile."""
        (_, T, H, _), (S, K) = call.query.shape, call.key.shape[1:3]
        return choose_tiles(T, S, H // K, call.metadata.block_q, call.metadata.block_k, row,
                            block_sizes(call.mask))  # fmt: skip

    def arrays(self, plan: NativePlan, call: FlashCall) -> NativeArrays:
        is_data = plan.scoring.numbers is None
        numbers = Numbers.make(call.scale, call.logits_soft_cap, plan.dtype).as_data() if is_data else None
        return NativeArrays(
            mask=_mask(call, is_data),
            bias=() if call.bias is None else bias_leaves(plan, _bias(call.bias, is_data)),
            sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
            seed=None if call.dropout_key is None else dropout_seed(call.dropout_key),
            numbers=numbers,
        )

    def schedule(self, plan: NativePlan, call: FlashCall) -> tuple[NativeTileSchedule, NativeTileSchedule]:
        coverage = coverage_of(call, plan)
        flat = coverage.reshape(-1, *coverage.shape[2:])
        is_data = plan.scoring.numbers is None
        return tile_schedule(flat, is_data), tile_schedule(flat.swapaxes(1, 2), is_data)

    def run(self, plan: NativePlan, operands: Operands) -> Result:
        if plan.scoring.holds_function:
            return call_once(functools.partial(self.forward, plan), (operands,))
        return _forward(self, plan, operands)

    def run_gradients(self, plan: NativePlan, wants_bias: bool, *given: PyTree) -> tuple[PyTree, ...]:
        if plan.scoring.holds_function:
            return call_once(functools.partial(backward, self, plan, wants_bias), given)
        return _backward(self, plan, wants_bias, *given)

    def bias_arrays(self, arrays: NativeArrays) -> PyTree:
        return arrays.bias

    def row_sums(self, x: jax.Array) -> jax.Array:
        # A product with ones: sums over many short rows are forty times slower in XLA's CPU backend.
        ones = jnp.ones((x.shape[3],), jnp.float32)
        return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST).swapaxes(1, 2)

    def forward(self, plan: NativePlan, operands: Operands) -> Result:
        query, key, value, arrays, schedule = operands
        out, lse, residual, *highest = forward(plan, query, from_arrays(plan, key, value), arrays, schedule[0])
        return out, (lse, residual), *highest

    def gradients(
        self,
        plan: NativePlan,
        wants_bias: bool,
        operands: Operands,
        statistics: Statistics,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, NativeArrays]:
        query, key, value, arrays, schedule = operands
        lse, lse_residual = statistics
        # The weights exp(score − lse) are too large by exp(lse_residual). Gradients are linear in the cotangents, so
        # each row's factor is applied to these instead.
        factor = jnp.exp(-lse_residual)  # [B, H, T]
        inputs = NativeInputs(query, key, value, d_out, lse, delta * factor, factor)
        run = with_tangents if isinstance(self, PlainBackend) else tiled_backward
        d = run(plan, wants_bias, inputs, arrays, schedule[1])
        d_bias: PyTree = d.bias if wants_bias else None
        return d.query, d.key, d.value, NativeArrays(mask=None, bias=d_bias, sinks=None, seed=None, numbers=None)


_forward = jax.jit(NativeFlash.forward, static_argnums=(0, 1))


def call_once(function: Function, arguments: tuple[PyTree, ...]) -> PyTree:
    """The result of a function that is compiled for this call alone: JAX's cache would keep the caller's functions."""
    leaves, tree = jax.tree.flatten(arguments)
    return jax.jit(lambda *given: function(*jax.tree.unflatten(tree, given)))(*leaves)


def _mask(call: FlashCall, is_data: bool) -> Mask | None:
    """The mask, with arrays for its numbers where they are data."""
    return call.mask if call.mask is None or not is_data else call.mask.as_data()


def _bias(bias: PyTree, is_data: bool) -> PyTree:
    """The bias, with arrays for its numbers where they are data."""
    return bias.as_data() if is_data and isinstance(bias, Bias) else bias


def coverage_of(call: FlashCall, plan: NativePlan) -> Array:
    """The coverage [B or 1, K or 1, tiles of q, tiles of kv], merged over the query heads of a kv head."""
    coverage = merged(block_map(call.mask, call.scores_shape, plan.bq, plan.bk).coverage, 1, plan.K)
    return ragged(coverage, 3, plan.S % plan.bk).astype("int8")
