"""From the options of a call to a plan, arrays and tiles to visit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attnops.dropout import dropout_rows, dropout_seed
from attnops.kernels import FlashCall, elementwise_bias, of_bias, of_mask, ragged
from attnops.masks import Mask, block_map
from attnops_triton.flash.bits import Pack, packer, told_apart
from attnops_triton.flash.operands import Arrays, value_layout
from attnops_triton.flash.plan import Plan, Tiles
from attnops_triton.flash.visits import Maps, every_score, visits


def arrays(plan: Plan, call: FlashCall) -> Arrays:
    """The arrays of a call as kernels take them. Differentiable; O(T + S) memory beside arrays of T × S elements."""
    scoring, shape = plan.scoring, call.scores
    bias: Any = elementwise_bias(call.bias)
    found = Arrays(sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None])
    if call.mask is not None and not plan.packed:
        function, leaves, dense = of_mask(call.mask)
        found = found._replace(
            mask=tuple(value_layout(x) for x in function.compute(leaves, shape)),
            dense=tuple(jnp.asarray(x).astype(jnp.int8) for x in dense),
        )
    if scoring.bias is not None:
        function, leaves = of_bias(bias)
        found = found._replace(bias=tuple(value_layout(x) for x in function.compute(leaves, shape)))
    elif scoring.table:
        found = found._replace(table=bias.by_distance(plan.H, plan.T, plan.S).astype(jnp.float32)[None])
    elif scoring.array:
        # The interpreter has no bfloat16.
        found = found._replace(array=bias.astype(jnp.float32) if plan.interpret else bias)
    if call.dropout_key is not None and scoring.dropout_prob:
        b, h, i = (np.arange(n).reshape([-1 if axis == own else 1 for axis in range(3)])
                   for own, n in enumerate((plan.B, plan.H, plan.T)))  # fmt: skip
        found = found._replace(dropout=dropout_rows(dropout_seed(call.dropout_key), b, h, i))
    return found


def maps(plan: Plan, mask: Mask | None) -> Maps:
    """The tiles that each kernel visits."""
    coverage, pack = _coverage(mask, plan, plan.forward)
    forward = visits(ragged(coverage, 3, plan.S % plan.forward.bk), pack)
    by_query = by_score = None
    if (plan.by_query.bq, plan.by_query.bk) != (plan.forward.bq, plan.forward.bk):
        coverage, pack = _coverage(mask, plan, plan.by_query)
        by_query = visits(ragged(coverage, 3, plan.S % plan.by_query.bk), pack)
    if plan.scoring.table or plan.scoring.array:
        by_score = every_score(*_coverage(mask, plan, plan.by_score))
    coverage, pack = _coverage(mask, plan, plan.by_key)
    coverage = ragged(coverage, 2, plan.T % plan.by_key.bq).swapaxes(2, 3)
    return Maps(forward, by_query, visits(coverage, pack, by_key=True), by_score)


def _coverage(mask: Mask | None, plan: Plan, tiles: Tiles) -> tuple[Any, Pack | None]:
    """The coverage of each tile, and what computes the bits of tiles for a mask that has them."""
    coverage = block_map(mask, (plan.B, plan.H, plan.T, plan.S), tiles.bq, tiles.bk).coverage
    if mask is None or not plan.packed:
        return coverage, None
    lead = [max(have, told) for have, told in zip(coverage.shape, told_apart(mask, plan), strict=False)]
    xp: Any = np if isinstance(coverage, np.ndarray) else jnp
    return xp.broadcast_to(coverage, (*lead, *coverage.shape[2:])), packer(mask, plan, tiles)
