"""The operands of kernels: the block of each that belongs to a tile."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.kernels import Scoring
from attnops_tpu.flash import backward, forward
from attnops_tpu.flash.operands import Arrays, TileIndex, array_operands, rows_of_key, rows_of_query
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile_schedule import tile_schedule

VALUES: Any = SimpleNamespace(values=(frozenset("q"), frozenset({"kv", "h"}), frozenset("b")))
INDEX = TileIndex(*map(np.int32, (1, 5, 3, 2)))  # type: ignore[arg-type]


def plan(**fields: Any) -> FlashPlan:
    """A plan of which only the sizes matter."""
    none: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(FlashPlan))
    sizes = {
        "B": 2,
        "T": 64,
        "S": 64,
        "H": 6,
        "K": 2,
        "D": 16,
        "Dv": 24,
        "bq": 16,
        "bk": 32,
        "is_partial": False,
        "sublanes": 8,
    }
    return FlashPlan(**none | sizes | {"dtype": jnp.dtype(jnp.bfloat16), "scoring": Scoring()} | fields)


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block(operand: Any) -> tuple[Any, list[int]]:
    """Shape and index of the block of the tile `INDEX`."""
    return operand.block, [int(i) for i in operand.block_index(INDEX)]


def test_each_array_has_the_block_of_the_tile() -> None:
    of = plan(scoring=Scoring(mask=VALUES))
    arrays = Arrays(
        mask=(f32(1, 1, 1, 64), f32(1, 6, 1, 64), f32(2, 1)), dense=(f32(2, 1, 64, 64),), table=f32(1, 6, 1, 128),
        array=f32(1, 6, 64, 64), dropout=f32(2, 6, 1, 64), sinks=f32(1, 6),
    )  # fmt: skip
    operands = array_operands(of, arrays)
    assert block(operands.mask[0]) == ((None, None, 1, 16), [0, 0, 0, 3])
    assert block(operands.mask[1]) == ((None, None, 1, 32), [0, 5, 0, 2])
    assert operands.mask[2].block_index is operands.sinks.block_index is None, "numbers are in scalar memory"
    assert block(operands.dense[0]) == ((None, None, 16, 32), [1, 0, 3, 2])
    assert block(operands.table) == ((None, None, 1, 128), [0, 5, 0, 0])
    assert block(operands.array) == ((None, None, 16, 32), [0, 5, 3, 2])
    assert block(operands.dropout) == ((None, None, 1, 16), [1, 5, 0, 3])
    assert operands.bias == ()
    assert jax.tree.leaves(array_operands(plan(), Arrays())) == []
    assert block(rows_of_query(f32(2, 6, 64, 16), of)) == ((None, None, 16, 16), [1, 5, 3, 0])
    assert block(rows_of_key(f32(1, 2, 64, 24), of)) == ((None, None, 32, 24), [0, 1, 2, 0])


@pytest.mark.parametrize("sequential", [False, True])
def test_the_forward_kernel_has_values_and_results_of_the_previous_tile(sequential: bool) -> None:
    """Of the head before, at the first step of a head, if one core computes all in order."""
    of = plan(H=2, K=2, B=1, sequential=sequential)
    schedule = tile_schedule(np.ones((1, 1, of.nq, of.nk), np.int8))
    q, v = f32(1, 2, 64, 16), f32(1, 2, 64, 24)
    refs = forward._references(of, q, q, v, Arrays(dropout=f32(1, 2, 1, 64)), schedule)
    tiles = [(h, q, kv) for h in range(2) for q in range(of.nq) for kv in range(of.nk)]
    entries, a_head = np.asarray(schedule.entries), of.nq * of.nk

    def index(x: Any, h: int, step: int) -> list[int]:
        with jax.ensure_compile_time_eval():
            return [int(i) for i in x.spec.index_map(np.int32(0), np.int32(h), np.int32(step), entries)]

    for h, step in np.ndindex(2, a_head + 1):
        here = h * a_head + step
        before = tiles[max(here - 1, 0 if sequential or step else here)]
        if step < a_head:
            assert index(refs.q, h, step) == [0, h, tiles[here][1], 0]
            assert index(refs.k, h, step) == [0, h, tiles[here][2], 0]
        assert index(refs.v, h, step) == [0, before[0], before[2], 0]
        assert index(refs.out, h, step) == [0, before[0], before[1], 0]
        assert index(refs.rows, h, step) == index(refs.previous_arrays.dropout, h, step) == [0, before[0], 0, before[1]]


def test_the_backward_kernel_has_queries_as_columns_and_keys_as_rows() -> None:
    inputs = backward.Inputs(*[f32(2, 6, 16, 64)] * 2, f32(2, 2, 64, 24), f32(2, 6, 24, 64), f32(2, 6, 2, 64))
    operands = backward.input_operands(plan(), inputs._replace(k=f32(2, 2, 64, 16)))
    assert [block(x) for x in operands] == [
        ((None, None, 16, 16), [1, 5, 0, 3]), ((None, None, 32, 16), [1, 1, 2, 0]),
        ((None, None, 32, 24), [1, 1, 2, 0]), ((None, None, 24, 16), [1, 5, 0, 3]),
        ((None, None, 2, 16), [1, 5, 0, 3]),
    ]  # fmt: skip
