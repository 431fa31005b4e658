"""The operands of kernels: arrays in the kernels' layouts, and the block of each that belongs to a tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import Elementwise
from attnops.masks import Blocks
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile_schedule import TileSchedule
from attnops_tpu.references import Input

# An index, in a scalar register.
Index: TypeAlias = jax.Array


class TileIndex(NamedTuple):
    """The indices of a tile, in scalar registers."""

    b: Index
    h: Index
    q_tile: Index
    kv_tile: Index


class Arrays(NamedTuple):
    """Inputs other than query, key and value: arrays, in kernels' layouts; their `Operand`s; or references to a tile's
    blocks. None, or an empty tuple, if absent.
    """

    mask: tuple[Any, ...] = ()  # values of the mask, see `value_layout`; blocks [1, bq] or [1, bk]
    bias: tuple[Any, ...] = ()  # values of an elementwise bias, see `value_layout`; blocks [1, bq] or [1, bk]
    dense: tuple[Any, ...] = ()  # the mask's arrays of T × S elements, int8 [B or 1, H or 1, Tp, Sp]; blocks [bq, bk]
    # the choices of the mask's `attnops.masks.Blocks`, bfloat16 [B or 1, H or 1, nq · rows, nk · columns], see
    # `chosen_by_tile`; blocks [rows, columns]
    chosen: tuple[Any, ...] = ()
    # a bias by distance, float32 [B or 1, H, 1, Sp + Tp]; distance ``q − kv`` is element ``q − kv + Sp``; blocks [1, Sp
    # + Tp].
    table: Any = None
    array: Any = None  # a bias of T × S elements, [B or 1, H or 1, Tp, Sp]; blocks [bq, bk]
    dropout: Any = None  # the hash of each row, int32 [B, H, 1, Tp]; blocks [1, bq]
    sinks: Any = None  # [B or 1, H] float32, in scalar memory


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array and its blocks."""

    array: jax.Array  # the array
    # Shape of a block, None for squeezed axes; empty for the complete array, in scalar memory.
    block: tuple[int | None, ...] = ()
    block_index: Callable[[TileIndex], tuple[jax.Array | int, ...]] | None = None  # the index of a tile's block

    def at(self, tile_at: Callable[..., TileIndex]) -> Input:
        """The array and the blocks of grid steps, whose tiles ``tile_at`` gives."""
        block_index = self.block_index
        if block_index is None:
            return Input(self.array, pl.BlockSpec(memory_space=pltpu.SMEM))
        return Input(self.array, pl.BlockSpec(self.block, lambda *ids: block_index(tile_at(*ids))))


def rows_of_query(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B, H, Tp, d]: a tile's queries, as rows."""
    return Operand(x, (None, None, plan.bq, x.shape[3]), lambda p: (_batch(x, p), p.h, p.q_tile, 0))


def rows_of_key(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B, K, Sp, d]: a tile's keys, as rows."""
    return Operand(x, (None, None, plan.bk, x.shape[3]), lambda p: (_batch(x, p), _kv_head(plan, p), p.kv_tile, 0))


def by_query(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B or 1, H or 1, rows, Tp]: a tile's queries, as columns."""
    return Operand(x, (None, None, x.shape[2], plan.bq), lambda p: (*_lead(x, p), 0, p.q_tile))


def by_key(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B or 1, H or 1, rows, Sp]: a tile's keys, as columns."""
    return Operand(x, (None, None, x.shape[2], plan.bk), lambda p: (*_lead(x, p), 0, p.kv_tile))


def by_score(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B or 1, H or 1, Tp, Sp]: a tile's scores, queries first."""
    return Operand(x, (None, None, plan.bq, plan.bk), lambda p: (*_lead(x, p), p.q_tile, p.kv_tile))


def by_tile(x: jax.Array, plan: FlashPlan) -> Operand:
    """[B or 1, H or 1, nq · rows, nk · columns]: the rows and columns of a tile."""
    block = x.shape[2] // plan.nq, x.shape[3] // plan.nk
    return Operand(x, (None, None, *block), lambda p: (*_lead(x, p), p.q_tile, p.kv_tile))


def by_head(x: jax.Array) -> Operand:
    """[B or 1, H or 1, 1, n]: all n elements of a head."""
    return Operand(x, (None, None, 1, x.shape[3]), lambda p: (*_lead(x, p), 0, 0))


def array_operands(plan: FlashPlan, arrays: Arrays) -> Arrays:
    """The operands of `Arrays`."""

    def values(function: Elementwise | None, xs: tuple[Any, ...]) -> tuple[Operand, ...]:
        axes = function.values if function else ()
        return tuple(
            by_query(x, plan) if "q" in of_x else by_key(x, plan) if "kv" in of_x else Operand(x)
            for of_x, x in zip(axes, xs, strict=True)
        )

    return Arrays(
        mask=values(plan.scoring.mask, arrays.mask),
        bias=values(plan.scoring.bias, arrays.bias),
        dense=tuple(by_score(x, plan) for x in arrays.dense),
        chosen=tuple(by_tile(x, plan) for x in arrays.chosen),
        table=None if arrays.table is None else by_head(arrays.table),
        array=None if arrays.array is None else by_score(arrays.array, plan),
        dropout=None if arrays.dropout is None else by_query(arrays.dropout, plan),
        sinks=None if arrays.sinks is None else Operand(arrays.sinks),
    )


def concatenate_rows(
    plan: FlashPlan, chunks: tuple[TileSchedule, ...], results: Sequence[jax.Array], axis: int
) -> jax.Array:
    """An array by query along ``axis``, from a result for each chunk of rows, in which only that chunk is written."""
    if len(results) == 1:
        return results[0]
    rows = (schedule.rows for schedule in chunks)
    return jnp.concatenate(
        [lax.slice_in_dim(x, a * plan.bq, b * plan.bq, axis=axis) for x, (a, b) in zip(results, rows, strict=True)],
        axis=axis,
    )


def cost(plan: FlashPlan, longest: int, dims: int) -> pl.CostEstimate:
    """The cost estimate of a kernel, by which the compiler overlaps it with transfers.

    Args:
        plan: the plan of the call.
        longest: the most tiles of a batch and query head.
        dims: the sum of the head dims of all products.
    """
    tiles = plan.B * plan.H * longest
    scores = tiles * plan.bq * plan.bk
    return pl.CostEstimate(
        flops=2 * scores * dims,
        transcendentals=scores,
        bytes_accessed=tiles * (plan.bq + plan.bk) * (plan.D + plan.Dv) * plan.dtype.itemsize,
    )


def value_layout(plan: FlashPlan, axes: frozenset[str], x: jax.Array) -> jax.Array:
    """A value [B or 1, H or 1, T or 1, S or 1] in kernels' layout, with 32-bit elements.

    Returns:
        By query [B or 1, H or 1, 1, Tp]; by key [B or 1, H or 1, 1, Sp]; otherwise [B or 1, H or 1], for scalar memory.
    """
    x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    x = x.swapaxes(2, 3) if "q" in axes else x
    if not axes & {"q", "kv"}:
        return x[:, :, 0, 0]
    # The last token's value is repeated beyond the ragged end: a function might divide by 0.
    size = plan.Tp if "q" in axes else plan.Sp
    return jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])], mode="edge")


def chosen_by_tile(plan: FlashPlan, blocks: Blocks) -> jax.Array:
    """Which blocks of keys were chosen for which blocks of queries, tile by tile: those that overlap a tile come first.

    Returns:
        bfloat16 [B or 1, H or 1, nq · rows, nk · columns], where rows and columns fill vector registers.
    """
    x = jnp.asarray(blocks.chosen).astype(jnp.bfloat16)
    for axis, size, tile, tiles, multiple in (
        (2, blocks.q_block, plan.bq, plan.nq, 16), (3, blocks.kv_block, plan.bk, plan.nk, 128)
    ):  # fmt: skip
        start = np.arange(tiles) * tile
        first, last = start // size, (start + tile - 1) // size
        width = -(-int((last - first).max() + 1) // multiple) * multiple
        index = (first[:, None] + np.arange(width)).reshape(-1)
        x = jnp.take(x, index, axis=axis, mode="fill", fill_value=0)
    return x


def pad_last(x: jax.Array, size: int) -> jax.Array:
    """``x`` with zeros up to ``size`` along its last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _batch(x: jax.Array, p: TileIndex) -> jax.Array | int:
    """The index in an array's batch, which has one element if all slices of `jax.vmap` share it."""
    return p.b if x.shape[0] > 1 else 0


def _lead(x: jax.Array, p: TileIndex) -> Sequence[jax.Array | int]:
    return (_batch(x, p), p.h if x.shape[1] > 1 else 0)


def _kv_head(plan: FlashPlan, p: TileIndex) -> jax.Array | int:
    # int32, even where x64 is on.
    return lax.div(p.h, np.int32(plan.G))
