"""The gradients of biases: separate kernels, which run only if the bias is differentiated."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, one_by_one, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.backward import Inputs, input_operands, products, weights_and_gradients
from attnops_tpu.flash.launch import launch
from attnops_tpu.flash.operands import Arrays, TileIndex, array_operands, concatenate_rows, cost
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile import SubTile, cap_and_bias_vjp, sheared, to_row, zero_masked_scores
from attnops_tpu.flash.tile_schedule import TileSchedule
from attnops_tpu.references import Output, Prefetched

if TYPE_CHECKING:
    from attnops.typing import Function, Leaf, PyTree, Ref


def bias_gradients(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, by_query: tuple[TileSchedule, ...], by_score: TileSchedule | None
) -> Arrays:
    """The gradients of the bias's arrays, each in its array's shape.

    Args:
        plan: the plan of the call.
        inputs: the inputs of the backward pass.
        arrays: the other inputs of scores.
        by_query: schedules by tiles of queries, for consecutive chunks of rows.
        by_score: the schedule of an array bias, see `_array_gradient`.
    """
    d_values: tuple[jax.Array | None, ...] = ()
    d_table = d_array = None
    if arrays.bias or arrays.table is not None:
        by_value, by_distance = _all_rows(plan, inputs, arrays, by_query)
        d_values = tuple(None if d is None else _summed(d, x) for d, x in zip(by_value, arrays.bias, strict=True))
        if arrays.table is not None and by_distance is not None:
            d_table = _summed(by_distance, arrays.table)
    if arrays.array is not None:
        d_array = _array_gradient(plan, inputs, arrays, by_score).astype(arrays.array.dtype)
    d_arrays = Arrays(mask=None, dense=None, chosen=None)  # type: ignore[arg-type]
    return d_arrays._replace(bias=d_values, table=d_table, array=d_array)


def _all_rows(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, chunks: tuple[TileSchedule, ...]
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    gradients = [_value_gradients(plan, inputs, arrays, schedule) for schedule in chunks]
    axes = () if plan.scoring.bias is None else plan.scoring.bias.values
    values = [
        d[0] if d[0] is None else sum(d) if "kv" in a else concatenate_rows(plan, chunks, d, 3)
        for a, d in zip(axes, zip(*(values for values, _ in gradients), strict=True), strict=True)
    ]
    tables = [table for _, table in gradients if table is not None]
    return tuple(values), sum(tables[1:], tables[0]) if tables else None


class _Wanted(NamedTuple):
    """The indices of the bias's values that have a gradient."""

    by_query: list[int]  # the values by query, and numbers, whose gradient is a sum over queries
    by_key: list[int]  # the values by key

    @classmethod
    def make(cls, plan: FlashPlan, arrays: Arrays) -> _Wanted:
        axes = () if plan.scoring.bias is None else plan.scoring.bias.values
        inexact = [i for i, x in enumerate(arrays.bias) if jnp.issubdtype(x.dtype, jnp.floating)]
        return cls([i for i in inexact if "kv" not in axes[i]], [i for i in inexact if "kv" in axes[i]])


class _ValueRefs(NamedTuple):
    """The references of a grid step."""

    entries: Any  # the tile schedule, see `TileSchedule.entries`
    inputs: Inputs  # the tile's blocks
    arrays: Arrays  # the tile's other inputs of scores
    by_query: tuple[Any, ...]  # [1, bq] each, the gradients of `_Wanted.by_query`
    by_key: tuple[Any, ...]  # [1, Sp] each, the gradients of `_Wanted.by_key`
    table: Any  # [1, Sp + Tp], the gradient of a table; None without one


def _of_tile(plan: FlashPlan, inputs: Inputs, arrays: Arrays, tile_at: Function) -> tuple[Inputs, Arrays]:
    """The declarations of a tile's inputs."""
    operands = input_operands(plan, inputs), array_operands(plan, arrays)._replace(sinks=None)
    declared: tuple[Inputs, Arrays] = jax.tree.map(lambda x: x.at(tile_at), operands)
    return declared


@folds_batch
def _value_gradients(
    plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """The gradients of the values of an elementwise bias, and of a table: [B, H, 1, n] each, not yet summed.

    Gradients by key or by distance are accumulated in vector memory for a complete head, O(T + S) elements.
    """
    wanted = _Wanted.make(plan, arrays)

    def tile_at(b: jax.Array, h: jax.Array, step: jax.Array, entries: Ref) -> TileIndex:
        entry = schedule.at(entries, b, h, step)
        return TileIndex(b, h, entry.row, entry.column)

    def row_index(*ids: jax.Array) -> tuple[jax.Array | int, ...]:
        index = tile_at(*ids)
        return (index.b, index.h, 0, index.q_tile)

    def of_head(n: int) -> Output:
        spec = pl.BlockSpec((None, None, 1, n), lambda b, h, step, entries: (b, h, 0, 0))
        return Output(output_like(inputs.q, (plan.B, plan.H, 1, n), jnp.float32), spec)

    of_row = Output(
        output_like(inputs.q, (plan.B, plan.H, 1, plan.Tp), jnp.float32),
        pl.BlockSpec((None, None, 1, plan.bq), row_index),
    )
    results = launch(
        plan,
        functools.partial(_value_kernel, plan, schedule, wanted),
        "attnops_flash_bias_gradient",
        _ValueRefs(
            Prefetched(schedule.entries),
            *_of_tile(plan, inputs, arrays, tile_at),
            by_query=(of_row,) * len(wanted.by_query),
            by_key=(of_head(plan.Sp),) * len(wanted.by_key),
            table=of_head(plan.Sp + plan.Tp) if plan.scoring.table else None,
        ),
        grid=(plan.B, plan.H, schedule.steps),
        cost=cost(plan, schedule.longest, plan.D + plan.Dv),
    )
    by_value = dict(zip([*wanted.by_query, *wanted.by_key], results, strict=False))
    gradients = tuple(by_value.get(i) for i in range(len(arrays.bias)))
    return gradients, None if arrays.table is None else results[-1]


def _value_kernel(plan: FlashPlan, schedule: TileSchedule, wanted: _Wanted, refs: _ValueRefs) -> None:
    """A grid step."""
    refs.inputs.check(plan)
    b, h, step = (pl.program_id(axis) for axis in range(3))
    entry = schedule.at(refs.entries, b, h, step)
    index = TileIndex(b, h, entry.row, entry.column)

    @pl.when(step == 0)
    def _() -> None:
        for ref in jax.tree.leaves((refs.by_key, refs.table)):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    @pl.when(entry.first == 1)
    def _() -> None:
        for ref in refs.by_query:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    def add(masked: bool) -> None:
        for sub in _sub_tiles(plan, refs.arrays, index):
            gradients, d_scores = _sub_tile_gradients(sub, refs.inputs, wanted, masked)
            for ref, i in zip(refs.by_query, wanted.by_query, strict=True):
                ref[:, sub.queries] += gradients[i].astype(jnp.float32)
            for ref, i in zip(refs.by_key, wanted.by_key, strict=True):
                first = index.kv_tile * plan.bk + sub.row
                at = pl.ds(first if plan.interpret else pl.multiple_of(first, 128), sub.rows)
                ref[:, at] += to_row(gradients[i].astype(jnp.float32))
            if refs.table is not None:
                width = sub.rows + sub.cols
                refs.table[:, pl.ds(sub.first_distance(), width)] += _by_distance(plan, d_scores)

    for kind in schedule.kinds:
        pl.when(entry.kind == kind)(functools.partial(add, kind != Coverage.FULL))


def _sub_tile_gradients(
    sub: SubTile, inputs: Inputs, wanted: _Wanted, masked: bool
) -> tuple[dict[int, Leaf], jax.Array]:
    """The gradients of the wanted values, by index, and of the scores [rows, cols]."""
    s, d_weights = products(sub, inputs)
    s = zero_masked_scores(sub, s, masked)
    values = [jnp.broadcast_to(x, (1, sub.cols)) if jnp.ndim(x) == 0 else x for x in sub.bias_values()]
    indices = sorted([*wanted.by_query, *wanted.by_key])

    def changed(inexact: list[Leaf]) -> PyTree:
        merged = list(values)
        for i, x in zip(indices, inexact, strict=True):
            merged[i] = x
        return sub.apply_cap_and_bias(s * sub.plan.scale_residual, merged)

    scores, pull_back = jax.vjp(changed, [values[i] for i in indices])
    _, d_scores, _ = weights_and_gradients(sub, inputs, masked, scores, d_weights)
    return dict(zip(indices, pull_back(d_scores)[0], strict=True)), d_scores


def _by_distance(plan: FlashPlan, d_scores: jax.Array) -> jax.Array:
    """[rows, cols] summed over scores of one distance: [1, rows + cols], score (j, i) at ``rows + i - j``."""
    rows, cols = d_scores.shape
    # Each row must be shifted back by one more than the row before it, but the hardware shifts forward: so the rows are
    # reversed. The product with a permutation matrix is exact in full precision.
    row_sum = lax.broadcasted_iota(jnp.int32, (rows, rows), 0) + lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
    flip = (row_sum == rows - 1).astype(jnp.float32)
    flipped = jnp.dot(flip, d_scores, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    padded = jnp.concatenate([jnp.zeros((rows, rows), jnp.float32), flipped], axis=1)
    aligned = sheared(plan, padded, cols + 1)
    return jnp.sum(aligned, axis=0, keepdims=True)


def _summed(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """[B, H, 1, n] summed to the shape of a value, see `attnops_tpu.flash.operands.value_layout`."""
    shape = x.shape if x.ndim == 4 else (*x.shape, 1, 1)
    axes = tuple(axis for axis in range(4) if shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True).reshape(x.shape)


class _ArrayRefs(NamedTuple):
    """The references of a grid step."""

    entries: Any  # the tile schedule, see `TileSchedule.entries`
    inputs: Inputs  # the tile's blocks
    arrays: Arrays  # the tile's other inputs of scores
    out: Any  # [bq, bk], the result
    acc: Any  # [bk, bq], the sum so far


@one_by_one
def _array_gradient(plan: FlashPlan, inputs: Inputs, arrays: Arrays, schedule: TileSchedule) -> jax.Array:
    """The gradient of an array bias [B or 1, H or 1, Tp, Sp], summed over the batches and heads that share an element.

    The schedule has [B or 1, H or 1] maps; a tile is active if it is for any batch or head that shares the map.
    """
    array = arrays.array
    assert array is not None
    batches, heads = (1 if size > 1 else full for size, full in zip(array.shape, (plan.B, plan.H), strict=False))

    def tile_at(b: jax.Array, h: jax.Array, step: jax.Array, r: jax.Array, entries: Ref) -> TileIndex:
        entry = schedule.at(entries, b, h, step)
        return TileIndex(b + lax.div(r, np.int32(heads)), h + lax.rem(r, np.int32(heads)), entry.row, entry.column)

    def kernel(refs: _ArrayRefs) -> None:
        refs.inputs.check(plan)
        acc = refs.acc
        ids = tuple(pl.program_id(axis) for axis in range(4))
        entry = schedule.at(refs.entries, ids[0], ids[1], ids[2])
        index = tile_at(ids[0], ids[1], ids[2], ids[3], refs.entries)

        @pl.when(ids[3] == 0)
        def _() -> None:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        def add(masked: bool) -> None:
            for sub in _sub_tiles(plan, refs.arrays, index):
                s, d_weights = products(sub, refs.inputs)
                scores, _ = cap_and_bias_vjp(sub, s, masked)
                _, d_scores, _ = weights_and_gradients(sub, refs.inputs, masked, scores, d_weights)
                acc[sub.keys, sub.queries] += d_scores

        for kind in schedule.kinds:
            pl.when(entry.kind == kind)(functools.partial(add, kind != Coverage.FULL))

        # The last tile of a shorter map is repeated at its end; it was written already.
        @pl.when((ids[3] == batches * heads - 1) & ((entry.kind > 0) | (entry.last == 1)))
        def _() -> None:
            refs.out[...] = acc[...].T

    def tile(*ids: jax.Array) -> tuple[jax.Array | int, ...]:
        entry = schedule.at(ids[-1], *ids[:3])
        return (ids[0], ids[1], entry.row, entry.column)

    of_tile, spec = _of_tile(plan, inputs, arrays, tile_at), pl.BlockSpec((None, None, plan.bq, plan.bk), tile)
    # EMPTY tiles keep zeros.
    zeros = jnp.zeros_like(array, jnp.float32)
    out = Output(output_like(inputs.q, array.shape, jnp.float32), spec, over=zeros)
    (gradient,) = launch(
        plan, kernel, "attnops_flash_array_gradient",
        _ArrayRefs(Prefetched(schedule.entries), *of_tile, out, pltpu.VMEM((plan.bk, plan.bq), jnp.float32)),
        grid=(array.shape[0], array.shape[1], schedule.steps, batches * heads),
    )  # fmt: skip
    return gradient


def _sub_tiles(plan: FlashPlan, arrays: Arrays, index: TileIndex) -> list[SubTile]:
    rows, cols = plan.backward.rows, plan.backward.cols
    return [
        SubTile(plan, arrays, index, row, rows, col, cols)
        for row in range(0, plan.bk, rows)
        for col in range(0, plan.bq, cols)
    ]
