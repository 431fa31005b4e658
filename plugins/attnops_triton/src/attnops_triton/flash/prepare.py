"""The arrays and tile schedules of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax.numpy as jnp
import numpy as np

from attnops.dropout import dropout_rows, dropout_seed
from attnops.kernels import FlashCall, elementwise_bias, of_bias, of_mask, ragged
from attnops.masks import Mask, block_map
from attnops_triton.flash.bits import BitsFunction, bits_function, bits_map_shape
from attnops_triton.flash.operands import Arrays, value_layout
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.flash.sizes import is_even
from attnops_triton.flash.tile_schedule import ScheduleLayout, TileSchedules, every_tile, layout_of, tile_schedule

if TYPE_CHECKING:
    from types import ModuleType

    from attnops.typing import Array, PyTree


# If T != S, these masks have an offset that depends on both lengths. Kernels then load it instead of having it as a
# literal.
_POSITION_MASKS: Final = frozenset({"Causal", "SlidingWindow", "Segments", "&"})


def mask_of_scores(mask: Mask | None, T: int, S: int) -> Mask | None:
    """The mask as kernels evaluate it: if T != S, its numbers are data, so that one program serves all lengths."""
    return mask.as_data() if mask is not None and T != S and mask.kinds() <= _POSITION_MASKS else mask


def arrays(plan: FlashPlan, call: FlashCall) -> Arrays:
    """The arrays of a call in kernels' layouts. Differentiable; O(T + S) memory, plus that of T × S arrays."""
    scoring, shape = plan.scoring, call.scores_shape
    bias: PyTree = elementwise_bias(call.bias)
    result = Arrays(sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None])
    if call.mask is not None and not plan.bit_mask:
        mask = mask_of_scores(call.mask, plan.T, plan.S)
        assert mask is not None
        function, leaves, dense = of_mask(mask)
        result = result._replace(
            mask=tuple(value_layout(x) for x in function.compute(leaves, shape)),
            dense=tuple(jnp.asarray(x).astype(jnp.int8) for x in dense[: scoring.dense]),
            chosen=tuple(jnp.asarray(x.chosen).astype(jnp.int8) for x in dense[scoring.dense :]),
        )
    if scoring.bias is not None:
        function, leaves = of_bias(bias)
        result = result._replace(bias=tuple(value_layout(x) for x in function.compute(leaves, shape)))
    elif scoring.table:
        result = result._replace(table=bias.by_distance(plan.H, plan.T, plan.S).astype(jnp.float32)[None])
    elif scoring.array:
        # The interpreter has no bfloat16.
        result = result._replace(array=bias.astype(jnp.float32) if plan.interpret else bias)
    if call.dropout_key is not None and scoring.dropout_prob:
        b, h, i = np.ix_(*(np.arange(n) for n in (plan.B, plan.H, plan.T)))
        result = result._replace(dropout=dropout_rows(dropout_seed(call.dropout_key), b, h, i))
    return result


def tile_schedules(plan: FlashPlan, mask: Mask | None) -> TileSchedules:
    """The schedules of all kernels."""
    layout = layout_of(mask)
    coverage, bits_of = _coverage(mask, plan, plan.forward)
    forward = tile_schedule(ragged(coverage, 3, plan.S % plan.forward.bk), layout, bits_of)
    by_query = by_score = None
    if (plan.by_query.bq, plan.by_query.bk) != (plan.forward.bq, plan.forward.bk) and not plan.fuses_dq:
        coverage, bits_of = _coverage(mask, plan, plan.by_query)
        by_query = tile_schedule(ragged(coverage, 3, plan.S % plan.by_query.bk), layout, bits_of)
    if plan.scoring.table or plan.scoring.array:
        by_score = every_tile(*_coverage(mask, plan, plan.by_score))
    coverage, bits_of = _coverage(mask, plan, plan.by_key)
    coverage = ragged(coverage, 2, plan.T % plan.by_key.bq).swapaxes(2, 3)
    if layout is ScheduleLayout.RANGES and not is_even(plan, plan.by_key):
        # The PARTIAL tiles of a column of keys are those of the diagonal and of the last queries: not contiguous.
        layout = ScheduleLayout.LISTED
    return TileSchedules(forward, by_query, tile_schedule(coverage, layout, bits_of, by_key=True), by_score)


def _coverage(mask: Mask | None, plan: FlashPlan, tiles: TileSizes) -> tuple[Array, BitsFunction | None]:
    """The coverage of each tile, and for a bit mask the function that computes the bits of tiles."""
    coverage = block_map(mask, (plan.B, plan.H, plan.T, plan.S), tiles.bq, tiles.bk).coverage
    if mask is None or not plan.bit_mask:
        return coverage, None
    leading = [max(sizes) for sizes in zip(coverage.shape, bits_map_shape(mask, plan), strict=False)]
    xp: ModuleType = np if isinstance(coverage, np.ndarray) else jnp
    return xp.broadcast_to(coverage, (*leading, *coverage.shape[2:])), bits_function(mask, plan, tiles)
