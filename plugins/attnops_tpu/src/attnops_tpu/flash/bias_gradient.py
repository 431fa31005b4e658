"""The gradients of biases: kernels of their own, run only where one is asked for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import folds_batch, one_by_one, output_like
from attnops.masks import Coverage
from attnops_tpu.flash.backward import Inputs, input_operands, known, products, scores, weights_and_gradients
from attnops_tpu.flash.operands import Arrays, Place, compiler_params, cost, rows_of_spans
from attnops_tpu.flash.plan import Plan
from attnops_tpu.flash.tile import Part, sheared, turned_back
from attnops_tpu.flash.visits import Visits
from attnops_tpu.interpreter import interpret_params


def bias_gradients(
    plan: Plan, inputs: Inputs, arrays: Arrays, by_query: tuple[Visits, ...], by_score: Visits | None
) -> Arrays:
    """The gradients of the bias's arrays, each in its array's shape.

    Args:
        plan: of the call.
        inputs: see `Inputs`.
        arrays: what scores depend on beside these.
        by_query: the visits by tiles of queries, for so many rows each.
        by_score: the visits of an array bias, see `array_gradient`.
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
    return Arrays(mask=None, dense=None, bias=d_values, table=d_table, array=d_array)  # type: ignore[arg-type]


def _all_rows(
    plan: Plan, inputs: Inputs, arrays: Arrays, spans: tuple[Visits, ...]
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    parts = [_value_gradients(plan, inputs, arrays, visits) for visits in spans]
    axes = () if plan.scoring.bias is None else plan.scoring.bias.values
    values = [
        found[0] if found[0] is None else sum(found) if "kv" in a else rows_of_spans(plan, spans, found, 3)
        for a, found in zip(axes, zip(*(values for values, _ in parts), strict=True), strict=True)
    ]
    tables = [table for _, table in parts if table is not None]
    return tuple(values), sum(tables[1:], tables[0]) if tables else None


@folds_batch
def _value_gradients(
    plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits
) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """Of the values of an elementwise bias, and of a table: [B, H, 1, n] each, not yet summed to their shapes.

    What a key or a distance has one of is added up in vector memory over a whole head: O(T + S) of it.
    """
    operands = input_operands(plan, inputs, arrays)
    axes = () if plan.scoring.bias is None else plan.scoring.bias.values
    wanted = [i for i, x in enumerate(arrays.bias) if jnp.issubdtype(x.dtype, jnp.floating)]
    # Of each query, or, where it is a number, of each query's share in it; of each key.
    by_key = [i for i in wanted if "kv" in axes[i]]
    of_query = [i for i in wanted if "kv" not in axes[i]]

    def where(b: Any, h: Any, step: Any, entries: Any) -> Place:
        visit = visits.at(entries, b, h, step)
        return Place(b, h, visit.row, visit.column)

    def kernel(entries: Any, *refs: Any) -> None:
        found, outputs = refs[: len(operands)], refs[len(operands) :]
        named = dict(zip((o.name for o in operands), found, strict=True))
        rows, whole = outputs[: len(of_query)], outputs[len(of_query) :]
        ids = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        visit, place = visits.at(entries, *ids), where(*ids, entries)

        @pl.when(ids[2] == 0)
        def _() -> None:
            for ref in whole:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)

        @pl.when(visit.first == 1)
        def _() -> None:
            for ref in rows:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)

        def add(masked: bool) -> None:
            for part in _parts(plan, named, place):
                s, d_weights = products(part, named)
                s = known(part, s, masked)
                values = [jnp.broadcast_to(x, (1, part.cols)) if jnp.ndim(x) == 0 else x for x in part.bias_values()]

                def change(some: list[Any], s: Any = s, values: Any = values, part: Part = part) -> Any:
                    merged = list(values)
                    for i, x in zip(wanted, some, strict=True):
                        merged[i] = x
                    return part.change(s * plan.rest, merged)

                changed, pull_back = jax.vjp(change, [values[i] for i in wanted])
                _, d_scores, _ = weights_and_gradients(part, named, masked, changed, d_weights)
                gradients = dict(zip(wanted, pull_back(d_scores)[0], strict=True))
                for ref, i in zip(rows, of_query, strict=True):
                    ref[:, part.queries] += gradients[i]
                for ref, i in zip(whole, by_key, strict=False):
                    at = place.kv_tile * plan.bk + part.row
                    at = pl.ds(at if plan.interpret else pl.multiple_of(at, 128), part.rows)
                    ref[:, at] += turned_back(gradients[i])
                if arrays.table is not None:
                    width = part.rows + part.cols
                    whole[-1][:, pl.ds(part.first_distance(), width)] += _by_distance(plan, d_scores)

        for kind in visits.kinds:
            pl.when(visit.kind == kind)(functools.partial(add, kind == Coverage.PARTIAL))

    def row_spec(*ids: Any) -> tuple[Any, ...]:
        p = where(*ids)
        return (p.b, p.h, 0, p.q_tile)

    lengths = [plan.Sp] * len(by_key) + [plan.Sp + plan.Tp] * (arrays.table is not None)
    found = pl.pallas_call(
        kernel,
        out_shape=[
            output_like(inputs.q, (plan.B, plan.H, 1, n), jnp.float32) for n in [plan.Tp] * len(of_query) + lengths
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.B, plan.H, visits.steps),
            in_specs=[operand.spec(where) for operand in operands],
            out_specs=[pl.BlockSpec((None, None, 1, plan.bq), row_spec)] * len(of_query)
            + [pl.BlockSpec((None, None, 1, n), lambda b, h, step, entries: (b, h, 0, 0)) for n in lengths],
        ),
        compiler_params=compiler_params(plan, 3),
        cost_estimate=cost(plan, visits.longest, plan.D + plan.Dv),
        interpret=interpret_params(plan.interpret),
        name="attnops_flash_bias_gradient",
    )(visits.entries, *(operand.array for operand in operands))
    by_value = dict(zip([*of_query, *by_key], found, strict=False))
    gradients = tuple(by_value.get(i) for i in range(len(arrays.bias)))
    return gradients, None if arrays.table is None else found[-1]


def _by_distance(plan: Plan, d_scores: jax.Array) -> jax.Array:
    """[rows, cols] summed over scores of one distance: [1, rows + cols], score (j, i) at ``rows + i - j``."""
    rows, cols = d_scores.shape
    # Each row must go back by one more than the one before it, but the hardware moves rows on: so last row first. The
    # product with a permutation is exact in full precision.
    last_first = lax.broadcasted_iota(jnp.int32, (rows, rows), 0) + lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
    flip = (last_first == rows - 1).astype(jnp.float32)
    flipped = jnp.dot(flip, d_scores, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    padded = jnp.concatenate([jnp.zeros((rows, rows), jnp.float32), flipped], axis=1)
    level = sheared(plan, padded, cols + 1)
    return jnp.sum(level, axis=0, keepdims=True)


def _summed(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """[B, H, 1, n] summed to the shape of a value, see `attnops_tpu.flash.operands.value_layout`."""
    shape = x.shape if x.ndim == 4 else (*x.shape, 1, 1)
    axes = tuple(axis for axis in range(4) if shape[axis] == 1 and gradient.shape[axis] > 1)
    return gradient.sum(axis=axes, keepdims=True).reshape(x.shape)


@one_by_one
def _array_gradient(plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits) -> jax.Array:
    """Of an array [B or 1, H or 1, Tp, Sp]: what shares an element is added up before it is written.

    The visits are of [B or 1, H or 1] maps: each tile that any batch or head which shares it visits.
    """
    array = arrays.array
    assert array is not None
    operands = input_operands(plan, inputs, arrays)
    batches, heads = (1 if size > 1 else full for size, full in zip(array.shape, (plan.B, plan.H), strict=False))

    def where(b: Any, h: Any, step: Any, r: Any, entries: Any) -> Place:
        visit = visits.at(entries, b, h, step)
        return Place(b + lax.div(r, heads), h + lax.rem(r, heads), visit.row, visit.column)

    def kernel(entries: Any, *refs: Any) -> None:
        named = dict(zip((o.name for o in operands), refs, strict=False))
        out, total = refs[len(operands) + 1 :]
        ids = tuple(pl.program_id(axis) for axis in range(4))
        visit, place = visits.at(entries, ids[0], ids[1], ids[2]), where(ids[0], ids[1], ids[2], ids[3], entries)

        @pl.when(ids[3] == 0)
        def _() -> None:
            total[...] = jnp.zeros(total.shape, jnp.float32)

        def add(masked: bool) -> None:
            for part in _parts(plan, named, place):
                s, d_weights = products(part, named)
                _, d_scores, _ = weights_and_gradients(part, named, masked, scores(part, s, masked)[0], d_weights)
                total[part.keys, part.queries] += d_scores

        for kind in visits.kinds:
            pl.when(visit.kind == kind)(functools.partial(add, kind == Coverage.PARTIAL))

        # A tile that is repeated at the end of a shorter map was written already.
        @pl.when((ids[3] == batches * heads - 1) & ((visit.kind > 0) | (visit.last == 1)))
        def _() -> None:
            out[...] = total[...].T

    def tile(*ids: Any) -> tuple[Any, ...]:
        visit = visits.at(ids[-1], *ids[:3])
        return (ids[0], ids[1], visit.row, visit.column)

    gradient = output_like(inputs.q, array.shape, jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=gradient,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(array.shape[0], array.shape[1], visits.steps, batches * heads),
            in_specs=[*(operand.spec(where) for operand in operands), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((None, None, plan.bq, plan.bk), tile),
            scratch_shapes=[pltpu.VMEM((plan.bk, plan.bq), jnp.float32)],
        ),
        # EMPTY tiles keep the zeros that are there.
        input_output_aliases={1 + len(operands): 0},
        compiler_params=compiler_params(plan, 4),
        interpret=interpret_params(plan.interpret),
        name="attnops_flash_array_gradient",
    )(visits.entries, *(operand.array for operand in operands), jnp.zeros_like(array, jnp.float32))


def _parts(plan: Plan, refs: Any, place: Place) -> list[Part]:
    rows, cols = plan.backward.rows, plan.backward.cols
    return [
        Part(plan, refs, place, row, rows, col, cols)
        for row in range(0, plan.bk, rows)
        for col in range(0, plan.bq, cols)
    ]
