"""Plain JAX as a backend of the flash skeleton: loops over tiles, laid out for CPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias
from attnops.dropout import dropout_seed, dropout_step
from attnops.kernels.coverage import map_shape, merged, ragged
from attnops.kernels.flash import FlashBackend, FlashCall
from attnops.kernels.vjp import Operands, attend, contribution_gradients
from attnops.masks.base import Mask
from attnops.masks.blocks import block_map
from attnops.operations.flash.backward import backward
from attnops.operations.flash.forward import forward
from attnops.operations.flash.options import Numbers, Options
from attnops.operations.flash.plan import Plan
from attnops.operations.flash.scores import Arrays
from attnops.operations.flash.tile_bias import bias_leaves, bias_tiles
from attnops.operations.flash.tile_sizes import choose_lanes, choose_tiles, table_row
from attnops.operations.flash.visits import Visits, visits
from attnops.programs.functions import holds_function, is_staged

# Compiled once for equal shapes and options, also where the caller does not compile.
_attend = jax.jit(attend, static_argnums=(0, 1))
_contribution_gradients = jax.jit(contribution_gradients, static_argnums=(0, 1, 2))


class NativeFlash(FlashBackend):
    """See `FlashBackend`. The schedule is a pair: by tiles of queries, and by tiles of keys for the backward pass."""

    second_derivative: ClassVar[str] = (
        "flash computes its gradients in a loop that has none of its own, but a second derivative was asked for; "
        "vanilla has one"
    )

    def plan(self, call: FlashCall) -> Plan:
        (B, T, H, D), (S, K, Dv) = call.query.shape, call.value.shape[1:]
        metadata, bias = call.metadata, call.bias
        is_bfloat16 = call.query.dtype == call.key.dtype == call.value.dtype == jnp.bfloat16
        row = table_row(is_bfloat16, max(D, Dv))
        block_q, block_k = choose_tiles(T, S, H // K, metadata.block_q, metadata.block_k, row)
        maps = map_shape(call.mask, call.scores)
        maps = maps[0], min(maps[1], K)
        batch, heads = (1, 1) if bias is None or isinstance(bias, Bias) else bias.shape[:2]
        lanes = choose_lanes(
            B, K, (H // K) * block_q * block_k, by_batch=batch != 1 or maps[0] != 1, by_head=heads > 1,
            alone=maps[1] > 1, row=row,
        )  # fmt: skip
        plan = Plan(
            B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, bq=block_q, bk=block_k, lanes=lanes, maps=maps,
            dtype=jnp.dtype(jnp.bfloat16 if is_bfloat16 else jnp.float32), is_partial=call.is_partial,
            precision=lax.Precision.HIGHEST if metadata.precision is None else metadata.precision,
        )  # fmt: skip
        # Outside `jax.jit` numbers are data, so that other ones don't compile anew; inside they make better programs.
        is_data = not is_staged()
        mask = _mask(call, is_data)
        options = Options(
            numbers=None if is_data else Numbers.make(call.scale, call.logits_soft_cap, plan.dtype),
            has_cap=call.logits_soft_cap is not None,
            bias=None if bias is None else bias_tiles(plan, _bias(bias, is_data)),
            dropout_prob=call.dropout_prob,
            dropout_step=dropout_step(call.dropout_key),
            has_fully_masked_tokens=mask is not None and mask.has_fully_masked_tokens(T, S),
            holds_function=holds_function(call.mask) or holds_function(bias),
        )
        return dataclasses.replace(plan, options=options)

    def arrays(self, plan: Plan, call: FlashCall) -> Arrays:
        is_data = plan.options.numbers is None
        numbers = Numbers.make(call.scale, call.logits_soft_cap, plan.dtype).as_data() if is_data else None
        return Arrays(
            mask=_mask(call, is_data),
            bias=() if call.bias is None else bias_leaves(plan, _bias(call.bias, is_data)),
            sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
            seed=None if call.dropout_key is None else dropout_seed(call.dropout_key),
            numbers=numbers,
        )

    def schedule(self, plan: Plan, call: FlashCall) -> tuple[Visits, Visits]:
        coverage = _coverage(call, plan.K, plan.bq, plan.bk)
        flat = coverage.reshape(-1, *coverage.shape[2:])
        is_data = plan.options.numbers is None
        return visits(flat, is_data), visits(flat.swapaxes(1, 2), is_data)

    def run(self, plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        found: tuple[jax.Array, jax.Array, jax.Array]
        if plan.options.holds_function:
            found = _once(functools.partial(attend, self, plan), operands)
        else:
            found = _attend(self, plan, *operands)
        return found

    def run_gradients(self, plan: Plan, wants_bias: bool, *given: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...]
        if plan.options.holds_function:
            found = _once(functools.partial(contribution_gradients, self, plan, wants_bias), given)
        else:
            found = _contribution_gradients(self, plan, wants_bias, *given)
        return found

    def learnt(self, arrays: Arrays) -> Any:
        return arrays.bias

    def row_sums(self, x: jax.Array) -> jax.Array:
        # A product with ones: XLA's CPU backend sums so many short rows forty times as slowly.
        ones = jnp.ones((x.shape[3],), jnp.float32)
        return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST).swapaxes(1, 2)

    def forward(self, plan: Plan, operands: Operands) -> tuple[jax.Array, Any]:
        query, key, value, arrays, schedule = operands
        out, *statistics = forward(plan, query, key, value, arrays, schedule[0])
        return out, tuple(statistics)

    def gradients(
        self, plan: Plan, wants_bias: bool, operands: Operands, statistics: Any, delta: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        query, key, value, arrays, schedule = operands
        lse, residual = statistics
        # Weights come back as exp(score − lse), too large by exp(residual): a factor of the row, applied to cotangents.
        factor = jnp.exp(-residual)  # [B, H, T]
        found = backward(
            plan, wants_bias, query, key, value, arrays, schedule[1], lse, delta * factor, factor, d_out
        )  # fmt: skip
        d_bias: Any = found.bias if wants_bias else None
        return found.query, found.key, found.value, Arrays(mask=None, bias=d_bias, sinks=None, seed=None, numbers=None)


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The result of a function that is compiled for one call, and forgotten: JAX keeps structures of arguments."""
    leaves, tree = jax.tree.flatten(arguments)
    return jax.jit(lambda *given: function(*jax.tree.unflatten(tree, given)))(*leaves)


def _mask(call: FlashCall, is_data: bool) -> Mask | None:
    """The mask, its numbers as arrays where they are data."""
    return call.mask if call.mask is None or not is_data else call.mask.as_data()


def _bias(bias: Any, is_data: bool) -> Any:
    """The bias, its numbers as arrays where they are data."""
    return bias.as_data() if is_data and isinstance(bias, Bias) else bias


def _coverage(call: FlashCall, K: int, block_q: int, block_k: int) -> Any:
    """The coverage [B or 1, K or 1, tiles of q, tiles of kv], of the query heads of a kv head together."""
    coverage = merged(block_map(call.mask, call.scores, block_q, block_k).coverage, 1, K)
    return ragged(coverage, 3, call.scores[3] % block_k).astype("int8")
