"""From the options of a call to a plan, arrays and tiles to visit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.dropout import dropout_rows, dropout_seed
from attnops.kernels import FlashCall, elementwise_bias, merged, of_bias, of_mask, ragged
from attnops.masks import Coverage, Mask, block_map
from attnops_tpu.flash.operands import Arrays, pad_last, value_layout
from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.visits import Maps, row_spans, visits


def arrays(plan: Plan, call: FlashCall) -> Arrays:
    """The arrays of a call as kernels take them. Differentiable; O(T + S) memory beside arrays of T × S elements."""
    scoring, shape = plan.scoring, call.scores
    bias: Any = elementwise_bias(call.bias)
    found = Arrays(sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None])
    if call.mask is not None:
        function, leaves, dense = of_mask(call.mask)
        values = function.compute(leaves, shape)
        found = found._replace(
            mask=tuple(value_layout(plan, axes, x) for axes, x in zip(function.values, values, strict=True)),
            dense=tuple(_padded(plan, jnp.asarray(x).astype(jnp.int8)) for x in dense),
        )
    if scoring.bias is not None:
        function, leaves = of_bias(bias)
        values = function.compute(leaves, shape)
        found = found._replace(
            bias=tuple(value_layout(plan, axes, x) for axes, x in zip(function.values, values, strict=True))
        )
    elif scoring.table:
        # [H, T + S − 1] of kv − q at kv − q + T − 1, to that of q − kv at q − kv + Sp.
        flipped = bias.by_distance(plan.H, plan.T, plan.S)[:, ::-1]
        before = plan.Sp - (plan.S - 1)
        table = jnp.pad(flipped, ((0, 0), (before, plan.Sp + plan.Tp - before - flipped.shape[1])))
        found = found._replace(table=table[None, :, None])
    elif scoring.array:
        found = found._replace(array=_padded(plan, bias))
    if call.dropout_key is not None and scoring.dropout_prob:
        b, h, i = (np.arange(n).reshape([-1 if axis == own else 1 for axis in range(3)])
                   for own, n in enumerate((plan.B, plan.H, plan.T)))  # fmt: skip
        rows = lax.bitcast_convert_type(dropout_rows(dropout_seed(call.dropout_key), b, h, i), jnp.int32)
        found = found._replace(dropout=pad_last(rows[:, :, None], plan.Tp))
    return found


def maps(plan: Plan, mask: Mask | None) -> Maps:
    """The tiles that each kernel visits."""
    shape = (plan.B, plan.H, plan.T, plan.S)
    coverage = ragged(block_map(mask, shape, plan.bq, plan.bk).coverage, 3, plan.S % plan.bk)
    by_kv_head = merged(coverage, 1, plan.K).swapaxes(2, 3)
    spans = tuple(
        visits(by_kv_head[..., first : first + plan.span], first_column=first)
        for first in range(0, plan.nq, plan.span)
    )  # fmt: skip
    forward = tuple(visits(coverage[:, :, first:stop], first_row=first) for first, stop in row_spans(coverage))
    return Maps(forward, spans, None)


def visited(mask: Mask | None, shape: tuple[int, int, int, int], block_q: int, block_k: int) -> int | None:
    """How many tiles of a head the mask leaves; None where only run time knows."""
    # Asked for every candidate: of a traced mask nothing but one tile is looked at.
    if not block_map(mask, shape, *shape[2:]).is_static:
        return None
    known = block_map(mask, shape, block_q, block_k)
    return int(known.count(Coverage.PARTIAL) + known.count(Coverage.FULL))


def by_score(plan: Plan, mask: Mask | None, bias_shape: tuple[int, ...]) -> Any:
    """The tiles that the gradient of an array bias visits."""
    coverage = block_map(mask, (plan.B, plan.H, plan.T, plan.S), plan.bq, plan.bk).coverage
    coverage = ragged(coverage, 3, plan.S % plan.bk)
    for axis in (0, 1):
        if bias_shape[axis] == 1:
            coverage = merged(coverage, axis, 1)
    return visits(coverage)


def _padded(plan: Plan, x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, plan.Tp - plan.T), (0, plan.Sp - plan.S)))
