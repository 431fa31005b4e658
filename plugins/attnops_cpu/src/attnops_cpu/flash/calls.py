"""The calls of the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dropout import dropout_threshold, spread_of_keys
from attnops.kernels import folds_batch, one_by_one, output_like
from attnops_cpu.flash.plan import Arrays, CpuPlan, TileMap

if TYPE_CHECKING:
    from attnops.typing import DType


@folds_batch
def forward(
    plan: CpuPlan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, tiles: TileMap
) -> tuple[jax.Array, ...]:
    """The output [B, T, H, Dv]; the logsumexp, its rounding error and, with ``plan.max_logits``, the largest scores,
    float32 [B, H, T].
    """
    rows = (plan.B, plan.H, plan.T)
    shapes = [rows, rows, rows if plan.max_logits else (0,)]
    results = [
        output_like(query, (plan.B, plan.T, plan.H, plan.Dv), plan.out_dtype),
        *(output_like(query, shape, jnp.dtype(jnp.float32)) for shape in shapes),
    ]
    operands = _operands(plan, query, key, value, arrays, tiles)
    out = jax.ffi.ffi_call("attnops_cpu_forward", results)(*operands, **_attributes(plan), in_place=plan.in_place)
    return tuple(out if plan.max_logits else out[:3])


class Cotangents(NamedTuple):
    """The cotangents and statistics from which the backward pass computes gradients.

    Attributes:
        d_out: [B, T, H, Dv] in the query's dtype; float32 for float16.
        lse: the logsumexp, float32 [B, H, T].
        lse_residual: the rounding error of ``lse``, float32 [B, H, T].
        delta: float32 [B, H, T]; the gradient of a score is ``weight · (d_out · value − delta)``.
    """

    d_out: jax.Array
    lse: jax.Array
    lse_residual: jax.Array
    delta: jax.Array


@folds_batch
def backward(
    plan: CpuPlan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, tiles: TileMap, given: Cotangents
) -> tuple[jax.Array, ...]:
    """The gradients of query, key and value; float32 for a partial softmax."""
    return _backward(plan, False, query, key, value, arrays, tiles, given)[:3]


@one_by_one
def backward_with_bias(
    plan: CpuPlan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, tiles: TileMap, given: Cotangents
) -> tuple[jax.Array, ...]:
    """`backward`, and the gradient of the bias's array, float32."""
    return _backward(plan, True, query, key, value, arrays, tiles, given)


def _backward(
    plan: CpuPlan, wants_bias: bool, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, tiles: TileMap,
    given: Cotangents,
) -> tuple[jax.Array, ...]:  # fmt: skip
    bias = arrays.bias.shape if wants_bias and arrays.bias is not None else (0,)
    results = [
        *(output_like(query, (plan.B, *x.shape[1:]), plan.out_dtype) for x in (query, key, value)),
        output_like(query, bias, jnp.dtype(jnp.float32)),
    ]
    operands = *_operands(plan, query, key, value, arrays, tiles), *(_for_all(plan, x) for x in given)
    return tuple(jax.ffi.ffi_call("attnops_cpu_backward", results)(*operands, **_attributes(plan)))


def _for_all(plan: CpuPlan, x: jax.Array) -> jax.Array:
    """``x`` with batch B; under `jax.vmap`, an array that all slices share has batch 1 if the slices have batch 1."""
    return x if x.shape[0] == plan.B else jnp.broadcast_to(x, (plan.B, *x.shape[1:]))


def _operands(
    plan: CpuPlan, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, tiles: TileMap
) -> tuple[jax.Array, ...]:
    """The arrays in the handlers' order; empty ones in place of arrays that the call does not have."""

    def given(x: jax.Array | None, dtype: DType) -> jax.Array:
        return jnp.zeros_like(query, shape=(0,), dtype=dtype) if x is None else x

    if arrays.dropout is not None:
        arrays = arrays._replace(dropout=_for_all(plan, arrays.dropout))
    query, key, value = (_for_all(plan, x) for x in (query, key, value))
    return (
        query, key, value, given(tiles.tiles, jnp.int32), given(tiles.bits, jnp.uint32),
        given(tiles.q_ids, jnp.int32), given(tiles.kv_ids, jnp.int32), given(arrays.bias, jnp.float32),
        given(arrays.dropout, jnp.uint32), given(arrays.sinks, jnp.float32),
    )  # fmt: skip


def _attributes(plan: CpuPlan) -> dict[str, Any]:
    return {
        "scale": np.float32(plan.scale), "cap": np.float32(plan.cap), "low": np.int64(plan.low),
        "high": np.int64(plan.high), "block_q": np.int64(plan.block_q), "block_k": np.int64(plan.block_k),
        "table": plan.table, "dropout_spread": np.int64(spread_of_keys(plan.dropout_step)),
        "dropout_threshold": np.int64(dropout_threshold(plan.dropout_prob)),
        "dropout_scale": np.float32(1 / (1 - plan.dropout_prob)),
    }  # fmt: skip
