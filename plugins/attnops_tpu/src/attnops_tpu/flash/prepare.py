"""The arrays and tile schedules of a call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.dropout import dropout_rows, dropout_seed
from attnops.kernels import FlashCall, elementwise_bias, merged, of_bias, of_mask, ragged
from attnops.masks import Coverage, Mask, block_map, block_sizes
from attnops_tpu.flash.operands import Arrays, chosen_by_tile, pad_last, value_layout
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile_schedule import MASKED, Bodies, TileSchedules, reduced, row_chunks, tile_schedule
from attnops_tpu.flash.tile_sizes import MAX_CODE, forward_code

if TYPE_CHECKING:
    from attnops.typing import Array, PyTree
    from attnops_tpu.flash.tile_schedule import TileSchedule


# Above, looking at all sub-tiles would need seconds.
MAX_SUB_TILES: Final = 1 << 22


def arrays(plan: FlashPlan, call: FlashCall) -> Arrays:
    """The arrays of a call in kernels' layouts. Differentiable; O(T + S) memory, plus that of T × S arrays."""
    scoring, shape = plan.scoring, call.scores_shape
    bias: PyTree = elementwise_bias(call.bias)
    result = Arrays(sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None])
    if call.mask is not None:
        function, leaves, dense = of_mask(call.mask)
        values = function.compute(leaves, shape)
        result = result._replace(
            mask=tuple(value_layout(plan, axes, x) for axes, x in zip(function.values, values, strict=True)),
            dense=tuple(_padded(plan, jnp.asarray(x).astype(jnp.int8)) for x in dense[: scoring.dense]),
            chosen=tuple(chosen_by_tile(plan, x) for x in dense[scoring.dense :]),
        )
    if scoring.bias is not None:
        function, leaves = of_bias(bias)
        values = function.compute(leaves, shape)
        result = result._replace(
            bias=tuple(value_layout(plan, axes, x) for axes, x in zip(function.values, values, strict=True))
        )
    elif scoring.table:
        # From [H, T + S − 1] with distance kv − q at kv − q + T − 1, to distance q − kv at q − kv + Sp.
        flipped = bias.by_distance(plan.H, plan.T, plan.S)[:, ::-1]
        before = plan.Sp - (plan.S - 1)
        table = jnp.pad(flipped, ((0, 0), (before, plan.Sp + plan.Tp - before - flipped.shape[1])))
        result = result._replace(table=table[None, :, None])
    elif scoring.array:
        result = result._replace(array=_padded(plan, bias))
    if call.dropout_key is not None and scoring.dropout_prob:
        b, h, i = (np.arange(n).reshape([-1 if a == axis else 1 for a in range(3)])
                   for axis, n in enumerate((plan.B, plan.H, plan.T)))  # fmt: skip
        rows = lax.bitcast_convert_type(dropout_rows(dropout_seed(call.dropout_key), b, h, i), jnp.int32)
        result = result._replace(dropout=pad_last(rows[:, :, None], plan.Tp))
    return result


def tile_schedules(plan: FlashPlan, mask: Mask | None) -> TileSchedules:
    """The schedules of all kernels but that of an array bias's gradient."""
    shape = (plan.B, plan.H, plan.T, plan.S)
    coverage = ragged(block_map(mask, shape, plan.bq, plan.bk).coverage, 3, plan.S % plan.bk)
    by_kv_head = merged(coverage, 1, plan.K).swapaxes(2, 3)
    # Two cores share an even number of heads; the kernels of a bias's gradient have all batches in their grid.
    joins = (plan.sequential or plan.K % 2 == 0) and not plan.scoring.has_bias
    by_kv_head, bodies = _reduced(plan, mask, by_kv_head, by_key=True)
    spans = tuple(
        tile_schedule(by_kv_head[..., first : first + plan.span], 0, first, bodies, joins and plan.span >= plan.nq)
        for first in range(0, plan.nq, plan.span)
    )  # fmt: skip
    coverage, bodies = _reduced(plan, mask, coverage, by_key=False)
    sub_tiles = plan.bq // plan.forward.cols * (plan.bk // plan.forward.rows)
    forward = tuple(
        tile_schedule(
            coverage[:, :, first:stop],
            first,
            bodies=bodies,
            joins=joins,
            sequential=plan.sequential,
            sub_tiles=sub_tiles,
            most_code=MAX_CODE / forward_code(plan.bq, plan.bk),
        )
        for first, stop in row_chunks(coverage)
    )
    return TileSchedules(forward, spans, None)


def _reduced(plan: FlashPlan, mask: Mask | None, coverage: Array, by_key: bool) -> tuple[Array, Bodies]:
    """`reduced` of a block map by tiles of queries, or by tiles of keys and kv heads."""
    sizes = plan.backward if by_key else plan.forward
    keys, queries = plan.bk // sizes.rows, plan.bq // sizes.cols
    if mask is None or not isinstance(coverage, np.ndarray):
        return coverage, (MASKED, MASKED)
    if keys * queries == 1 or coverage.size * keys * queries > MAX_SUB_TILES:
        return coverage, (MASKED, MASKED)
    sub_tiles = block_map(mask, (plan.B, plan.H, plan.T, plan.S), sizes.cols, sizes.rows).coverage
    sub_tiles = ragged(sub_tiles, 3, plan.S % sizes.rows)
    missing = plan.nq * queries - sub_tiles.shape[2], plan.nk * keys - sub_tiles.shape[3]
    sub_tiles = np.pad(np.asarray(sub_tiles), ((0, 0), (0, 0), *((0, n) for n in missing)))
    return reduced(coverage, merged(sub_tiles, 1, plan.K).swapaxes(2, 3) if by_key else sub_tiles)


def count_active_tiles(
    mask: Mask | None, shape: tuple[int, int, int, int], block_q: int, block_k: int
) -> tuple[int, int] | None:
    """How many tiles of a head are PARTIAL, and how many FULL; None for a traced mask.

    For traced `attnops.masks.Blocks` it is an estimate, with one block of eight chosen at random.
    """
    # Called for every candidate; for a traced mask, only a block map of one tile is computed.
    if not block_map(mask, shape, *shape[2:]).is_static:
        sizes = block_sizes(mask)
        if sizes is None:
            return None
        tiles, in_tile = (
            math.prod(-(-n // size) for n, size in zip(lengths, of, strict=True))
            for lengths, of in ((shape[2:], (block_q, block_k)), ((block_q, block_k), sizes))
        )
        return 0, math.ceil(tiles * (1 - (7 / 8) ** in_tile))
    blocks = block_map(mask, shape, block_q, block_k)
    return int(blocks.count(Coverage.PARTIAL)), int(blocks.count(Coverage.FULL))


def by_score(plan: FlashPlan, mask: Mask | None, bias_shape: tuple[int, ...]) -> TileSchedule | None:
    """The schedule of the gradient of an array bias."""
    coverage = block_map(mask, (plan.B, plan.H, plan.T, plan.S), plan.bq, plan.bk).coverage
    coverage = ragged(coverage, 3, plan.S % plan.bk)
    for axis in (0, 1):
        if bias_shape[axis] == 1:
            coverage = merged(coverage, axis, 1)
    return tile_schedule(coverage)


def _padded(plan: FlashPlan, x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, plan.Tp - plan.T), (0, plan.Sp - plan.S)))
