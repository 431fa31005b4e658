"""The arrays and tile schedules of a call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.dropout import dropout_rows, dropout_seed
from attnops.kernels import FlashCall, elementwise_bias, map_shape, merged, of_bias, of_mask, ragged
from attnops.masks import Band, Coverage, Mask, block_map, block_sizes
from attnops_tpu.flash.operands import Arrays, chosen_by_tile, pad_last, value_layout
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile_schedule import (
    MASKED,
    REDUCED,
    Bodies,
    Body,
    TileSchedules,
    reduced,
    row_chunks,
    tile_schedule,
)
from attnops_tpu.flash.tile_sizes import SubTileSizes, Work, most_forward_code

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
            most_code=most_forward_code(plan.bq, plan.bk),
        )
        for first, stop in row_chunks(coverage)
    )
    return TileSchedules(forward, spans, None)


def _reduced(plan: FlashPlan, mask: Mask | None, coverage: Array, by_key: bool) -> tuple[Array, Bodies]:
    """`reduced` of a block map by tiles of queries, or by tiles of keys and kv heads."""
    sizes, shape = plan.backward if by_key else plan.forward, (plan.B, plan.H, plan.T, plan.S)
    keys, queries = plan.bk // sizes.rows, plan.bq // sizes.cols
    sub_tiles = _sub_tiles(mask, shape, plan.bq, plan.bk, sizes)
    if mask is None or sub_tiles is None or not isinstance(coverage, np.ndarray):
        return coverage, (MASKED, MASKED)
    coverage, bodies = reduced(coverage, merged(sub_tiles, 1, plan.K).swapaxes(2, 3) if by_key else sub_tiles)
    split = mask.split()
    rest = block_map(split._replace(band=Band(None, None)).join(), shape, sizes.cols, sizes.rows).coverage
    if not isinstance(rest, np.ndarray):
        return coverage, bodies
    is_seen = (rest == int(Coverage.FULL)).all(axis=(0, 1))
    tiles = (keys, queries) if by_key else (queries, keys)

    def with_band(kind: int, body: Body) -> Body:
        """If all else than the mask's band is seen in all sub-tiles that the mask is applied to."""
        of_kind = np.argwhere((coverage == kind).any(axis=(0, 1)))
        masked = [at for at in np.ndindex(*tiles) if body.is_masked(*at) and at not in body.hidden]
        places = (of_kind[:, None] * tiles + np.reshape(masked, (-1, 2)).astype(int)).reshape(-1, 2)
        query, key = places.T[:: -1 if by_key else 1]
        inside = (query < is_seen.shape[0]) & (key < is_seen.shape[1])
        if not len(of_kind) or not is_seen[query[inside], key[inside]].all():
            return body
        # Distances between the first query of a sub-tile and its last key, and between its last query and first key.
        least = query * sizes.cols - key * sizes.rows - (sizes.rows - 1)
        most = least + sizes.rows + sizes.cols - 2
        low, high = split.band.limits
        return body._replace(band=(
            low if low is not None and (least < low).any() else None,
            high if high is not None and (most > high).any() else None,
        ))  # fmt: skip

    reduced_body, other = bodies
    return coverage, (with_band(REDUCED, reduced_body), with_band(int(Coverage.PARTIAL), other))


def _sub_tiles(
    mask: Mask | None, shape: tuple[int, int, int, int], bq: int, bk: int, sizes: SubTileSizes
) -> np.ndarray | None:
    """The coverage of the sub-tiles of all tiles; None if it is traced, or not worth its time."""
    (rows, columns), (down, across) = (-(-shape[2] // bq), -(-shape[3] // bk)), (bq // sizes.cols, bk // sizes.rows)
    if mask is None or down * across == 1:
        return None
    maps = math.prod(map_shape(mask, shape))
    if maps * rows * columns * down * across > MAX_SUB_TILES:
        return None
    result = block_map(mask, shape, sizes.cols, sizes.rows).coverage
    if not isinstance(result, np.ndarray):
        return None
    result = ragged(result, 3, shape[3] % sizes.rows)
    missing = rows * down - result.shape[2], columns * across - result.shape[3]
    return np.pad(np.asarray(result), ((0, 0), (0, 0), *((0, n) for n in missing)))


def work(mask: Mask | None, shape: tuple[int, int, int, int], block_q: int, block_k: int, sizes: SubTileSizes) -> Work:
    """The work with tiles of a size. For a traced mask all tiles are FULL; of `attnops.masks.Blocks`, one block of
    eight is assumed to be chosen, at random.
    """
    tiles = -(-shape[2] // block_q) * -(-shape[3] // block_k)
    # Called for every candidate; for a traced mask, only a block map of one tile is computed.
    if not block_map(mask, shape, *shape[2:]).is_static:
        of_blocks = block_sizes(mask)
        if of_blocks is not None:
            in_tile = math.prod(-(-n // size) for n, size in zip((block_q, block_k), of_blocks, strict=True))
            tiles = math.ceil(tiles * (1 - (7 / 8) ** in_tile))
        return Work(tiles, tiles, 2)
    coverage: Array = ragged(block_map(mask, shape, block_q, block_k).coverage, 3, shape[3] % block_k)
    sub_tiles, bodies = _sub_tiles(mask, shape, block_q, block_k, sizes), (MASKED, MASKED)
    if sub_tiles is not None:
        coverage, bodies = reduced(coverage, sub_tiles)
    n = block_q // sizes.cols * (block_k // sizes.rows)
    hidden = {int(Coverage.FULL): 0, REDUCED: len(bodies[0].hidden), int(Coverage.PARTIAL): len(bodies[1].hidden)}
    of_kinds = [(int((coverage == kind).sum()), 1 - less / n) for kind, less in hidden.items()]
    return Work(
        sum(times for times, _ in of_kinds),
        sum(times * share for times, share in of_kinds),
        sum(share for times, share in of_kinds if times),
    )


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
