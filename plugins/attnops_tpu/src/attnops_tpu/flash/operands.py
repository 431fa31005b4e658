"""What kernels are given: arrays laid out for them, and which block of each belongs to a tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.visits import Visits

PARALLEL, ARBITRARY = pltpu.GridDimensionSemantics.PARALLEL, pltpu.GridDimensionSemantics.ARBITRARY


class Place(NamedTuple):
    """Which tile; numbers in scalar registers."""

    b: Any
    h: Any
    q_tile: Any
    kv_tile: Any


class Arrays(NamedTuple):
    """What a call has in addition to query, key and value, made by `prepare`; None for what it has not.

    Attributes:
        mask: values of the mask, see `value_layout`.
        dense: the mask's arrays of T × S elements, int8 [B or 1, H or 1, Tp, Sp].
        bias: values of an elementwise bias, see `value_layout`.
        table: a bias by distance, float32 [B or 1, H, 1, Sp + Tp]: of ``q − kv`` at ``q − kv + Sp``.
        array: a bias of T × S elements, [B or 1, H or 1, Tp, Sp].
        sinks: [B or 1, H] float32.
        dropout: the hash of each row, int32 [B, H, 1, Tp].
    """

    mask: tuple[jax.Array, ...] = ()
    dense: tuple[jax.Array, ...] = ()
    bias: tuple[jax.Array, ...] = ()
    table: jax.Array | None = None
    array: jax.Array | None = None
    sinks: jax.Array | None = None
    dropout: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array and its blocks.

    Attributes:
        name: what a kernel calls it.
        array: the array.
        block: the block's shape, None for axes of which it takes one; empty for all of it, in scalar memory.
        index: which block belongs to a tile.
    """

    name: str
    array: jax.Array
    block: tuple[int | None, ...] = ()
    index: Callable[[Place], tuple[Any, ...]] | None = None

    def spec(self, where: Callable[..., Place]) -> pl.BlockSpec:
        """For Pallas; ``where`` says which tile a grid step is at."""
        index = self.index
        if index is None:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec(self.block, lambda *ids: index(where(*ids)))


def rows_of_query(name: str, x: jax.Array, plan: Plan) -> Operand:
    """[B, H, Tp, d]: the rows of a tile's queries."""
    return Operand(name, x, (None, None, plan.bq, x.shape[3]), lambda p: (_batch(x, p), p.h, p.q_tile, 0))


def rows_of_key(name: str, x: jax.Array, plan: Plan) -> Operand:
    """[B, K, Sp, d]: the rows of a tile's keys."""
    return Operand(
        name, x, (None, None, plan.bk, x.shape[3]), lambda p: (_batch(x, p), lax.div(p.h, plan.G), p.kv_tile, 0)
    )


def columns_of_key(name: str, x: jax.Array, plan: Plan) -> Operand:
    """[B, K, d, Sp]: the columns of a tile's keys."""
    return Operand(
        name, x, (None, None, x.shape[2], plan.bk), lambda p: (_batch(x, p), lax.div(p.h, plan.G), 0, p.kv_tile)
    )


def by_query(name: str, x: jax.Array, bq: int) -> Operand:
    """[B or 1, H or 1, rows, Tp]: the columns of a tile's queries."""
    return Operand(name, x, (None, None, x.shape[2], bq), lambda p: (*_lead(x, p), 0, p.q_tile))


def by_key(name: str, x: jax.Array, bk: int) -> Operand:
    """[B or 1, H or 1, rows, Sp]: the columns of a tile's keys."""
    return Operand(name, x, (None, None, x.shape[2], bk), lambda p: (*_lead(x, p), 0, p.kv_tile))


def by_score(name: str, x: jax.Array, plan: Plan) -> Operand:
    """[B or 1, H or 1, Tp, Sp]: the scores of a tile, queries first."""
    return Operand(name, x, (None, None, plan.bq, plan.bk), lambda p: (*_lead(x, p), p.q_tile, p.kv_tile))


def by_head(name: str, x: jax.Array) -> Operand:
    """[B or 1, H or 1, 1, n]: all of a head's."""
    return Operand(name, x, (None, None, 1, x.shape[3]), lambda p: (*_lead(x, p), 0, 0))


def rows_of_spans(plan: Plan, spans: tuple[Visits, ...], found: Sequence[jax.Array], axis: int) -> jax.Array:
    """An array by query, of whose tokens along ``axis`` each kernel wrote those of its rows."""
    if len(found) == 1:
        return found[0]
    rows = (visits.rows for visits in spans)
    return jnp.concatenate(
        [lax.slice_in_dim(x, a * plan.bq, b * plan.bq, axis=axis) for x, (a, b) in zip(found, rows, strict=True)],
        axis=axis,
    )


def compiler_params(plan: Plan, axes: int) -> pltpu.CompilerParams:
    """Of a kernel with a grid of so many axes: batch and heads, which cores may share, and what goes in order."""
    return pltpu.CompilerParams(
        dimension_semantics=(PARALLEL, PARALLEL, *[ARBITRARY] * (axes - 2)),
        vmem_limit_bytes=plan.vmem,
        # Blocks come from the visits, which are checked here; the interpreter checks them too.
        disable_bounds_checks=True,
    )


def cost(plan: Plan, visits: int, dims: int) -> pl.CostEstimate:
    """What the compiler is told that a kernel takes, so that it puts it between the start and the end of a transfer.

    Args:
        plan: of the call.
        visits: tiles of a batch and query head, at most.
        dims: the products' inner or outer head dims, all together.
    """
    tiles = plan.B * plan.H * visits
    scores = tiles * plan.bq * plan.bk
    return pl.CostEstimate(
        flops=2 * scores * dims,
        transcendentals=scores,
        bytes_accessed=tiles * (plan.bq + plan.bk) * (plan.D + plan.Dv) * plan.dtype.itemsize,
    )


def score_operands(plan: Plan, arrays: Arrays) -> list[Operand]:
    """Everything that the scores of a tile depend on beside query and key, dropout excepted."""
    found = []
    for prefix, function, values in (
        ("mask", plan.scoring.mask, arrays.mask),
        ("bias", plan.scoring.bias, arrays.bias),
    ):
        for i, (axes, x) in enumerate(zip(function.values if function else (), values, strict=True)):
            name = f"{prefix}{i}"
            if "q" in axes:
                found.append(by_query(name, x, plan.bq))
            elif "kv" in axes:
                found.append(by_key(name, x, plan.bk))
            else:
                found.append(Operand(name, x))
    found += [by_score(f"dense{i}", x, plan) for i, x in enumerate(arrays.dense)]
    if arrays.table is not None:
        found.append(by_head("table", arrays.table))
    if arrays.array is not None:
        found.append(by_score("array", arrays.array, plan))
    return found


def value_layout(plan: Plan, axes: frozenset[str], x: jax.Array) -> jax.Array:
    """A value [B or 1, H or 1, T or 1, S or 1] as kernels take it, 32 bits wide.

    Of each query [B or 1, H or 1, 1, Tp]; of each key [B or 1, H or 1, 1, Sp]; else [B or 1, H or 1], for scalar
    memory.
    """
    x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    x = x.swapaxes(2, 3) if "q" in axes else x
    if not axes & {"q", "kv"}:
        return x[:, :, 0, 0]
    # Beyond the ragged end stands the last one's: a 0 might be divided by.
    size = plan.Tp if "q" in axes else plan.Sp
    return jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])], mode="edge")


def pad_last(x: jax.Array, size: int) -> jax.Array:
    """``x`` with zeros up to ``size`` along its last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _batch(x: jax.Array, p: Place) -> Any:
    """Which of an array's batch; under `jax.vmap` all may share one."""
    return p.b if x.shape[0] > 1 else 0


def _lead(x: jax.Array, p: Place) -> Sequence[Any]:
    return (_batch(x, p), p.h if x.shape[1] > 1 else 0)
