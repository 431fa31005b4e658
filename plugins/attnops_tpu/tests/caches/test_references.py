"""The list of the kernel's references: what a call has, in which memory, with which blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.kernels import describe
from attnops.masks import KeyPadding
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.operands import CacheArrays, KernelInputs, rows_by_key
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import Prompts
from attnops_tpu.caches.references import memory, references
from attnops_tpu.caches.schedule import ItemSchedule
from attnops_tpu.references import ANY, Input, Output, Prefetched, needed


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def inputs_of(
    plan: CachePlan, writes: bool = False, by_row: int = 0, scales: int = 0, prompts: bool = False
) -> KernelInputs:
    tokens = f32(9, plan.K, plan.unit, plan.width)
    scale = f32(9, plan.K, plan.unit)
    rows = rows_by_key(plan)
    return KernelInputs(
        query=f32(plan.items, plan.K, plan.R, plan.key_lanes),
        sources=(tokens,) * plan.token_arrays + (scale,) * (plan.sources - plan.token_arrays),
        tables=(i32(plan.B * plan.pieces, 1, plan.piece), i32(plan.B, 1, 128)) if plan.is_paged else (),
        block=i32(1),
        values=CacheArrays(
            (i32(plan.B),), (f32(plan.items, plan.K, 128),) * by_row,
            i32(1, plan.nk, rows, plan.bk) if rows else None, (f32(plan.K),) * scales,
        ),
        schedule=ItemSchedule(*[i32(plan.items)] * len(ItemSchedule._fields)),
        new=Written(i32(plan.B), i32(plan.B), i32(plan.B), None, (i32(plan.items, plan.K, 8, 8),) * plan.sources)
        if writes else None,
        prompts=Prompts(i32(1), *[i32(5)] * 6, (f32(1, plan.K, 24, plan.width),) * plan.sources) if prompts else None,
    )  # fmt: skip


def indices(x: Input | Output, plan: CachePlan) -> list[tuple[int, ...]]:
    """The block of each step of each core, in the order of items."""
    with jax.ensure_compile_time_eval():
        return [
            tuple(int(i) for i in x.spec.index_map(np.int32(item % plan.cores), np.int32(item // plan.cores)))  # type: ignore[misc]
            for item in range(plan.items)
        ]


OPTIONAL = {"packed", "by_row", "new", "prompts", "lse", "scores", "by_key", "by_key_buffer", "written", "scales"}
MASK = KeyPadding(np.arange(64)[None] < 9).bind(3, 4, 1, 64)
PADDING = describe((1, 64), MASK, None, None, 0.0, False, by_row=True)


@pytest.mark.parametrize(("fields", "given", "absent"), [
    ({}, {}, OPTIONAL),
    ({"is_paged": False}, {}, {*OPTIONAL, "table", "words", "missing"}),
    ({}, {"writes": True}, OPTIONAL - {"new", "written"}),
    ({}, {"prompts": True}, OPTIONAL - {"prompts"}),
    ({"wants_lse": True}, {"by_row": 2, "scales": 2}, OPTIONAL - {"lse", "by_row", "scales"}),
    ({"scoring": PADDING}, {}, OPTIONAL - {"by_key", "by_key_buffer"}),
])  # fmt: skip
def test_what_a_call_does_not_have_is_absent(
    fields: dict[str, Any], given: dict[str, Any], absent: set[str], cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(**fields)
    refs = references(plan, inputs_of(plan, **given))
    assert {name for name, x in refs._asdict().items() if x is None or x == ()} == absent | {"part"}


def test_steps_have_the_blocks_of_their_items(cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(T=5, bq=2, cores=2, wants_lse=True)
    refs = references(plan, inputs_of(plan, writes=True, by_row=1))
    for x in (refs.query, refs.out, refs.lse):
        assert x.spec.block_shape[:3] == (1, plan.K, plan.R)
        assert indices(x, plan) == [(item, 0, 0, 0) for item in range(plan.items)]
    assert indices(refs.by_row[0], plan) == [(item, 0, 0) for item in range(plan.items)]
    assert refs.new is not None
    assert indices(refs.new.tokens[0], plan) == [(item, 0, 0, 0) for item in range(plan.items)]


def test_of_transposed_scores_the_state_is_transposed(cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(T=5, bq=5, wants_lse=True, transposed=True)
    refs = references(plan, inputs_of(plan, by_row=1))
    assert refs.out.array.shape == (plan.items, plan.K, plan.R, plan.value_lanes)
    assert refs.lse.array.shape == (plan.items, plan.K, 1, plan.R)
    assert [x.shape for x in (refs.state.m, refs.state.l, refs.state.acc)] == [(2, 8, 10), (2, 8, 10), (2, 8, 10)]
    assert refs.state.by_row == ()
    assert {x.shape for x in refs.scores} == {(plan.chunk + 8, 256)}


@pytest.mark.parametrize("writes", ["", "writes", "prompts"])
def test_sources_stay_in_main_memory_and_are_written_in_place(
    writes: str, cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(scales="token_head")
    inputs = inputs_of(plan, **({writes: True} if writes else {}))
    refs = references(plan, inputs)
    assert all(x.spec is ANY for x in (*refs.sources, refs.table, refs.words))
    assert all(isinstance(x, Output if writes else Input) for x in refs.sources)
    assert [x.over if writes else x.array for x in refs.sources] == list(inputs.sources)
    assert [x.shape for x in refs.buffers] == [(2, 2, 16, 8)] * 2 + [(2, 2, 16)] * 2
    scalars = jax.tree.leaves((refs.schedule, refs.block, refs.scalars, refs.scales))
    assert all(isinstance(x, Prefetched) for x in scalars)


def test_16_bit_tiles_wider_than_the_lanes_have_rows_of_8(cache_plan: Callable[..., CachePlan]) -> None:
    for itemsize, width, interpret, shape in (
        (2, 256, False, (2, 8, 256)), (2, 256, True, (16, 256)), (2, 128, False, (16, 128)), (4, 256, False, (16, 256)),
    ):  # fmt: skip
        plan = cache_plan(width=width, interpret=interpret)
        tokens = jax.ShapeDtypeStruct((9, 2, 4, width), f"float{8 * itemsize}")
        refs = references(plan, inputs_of(plan)._replace(sources=(tokens, tokens)))  # type: ignore[arg-type]
        assert refs.buffers[0].shape == (2, 2, *shape)


def test_memory_is_what_is_declared_and_a_margin_but_never_more_than_the_most(
    cache_plan: Callable[..., CachePlan],
) -> None:
    plan = cache_plan(vmem=64 << 20)
    refs = references(plan, inputs_of(plan))
    assert needed(refs) + (4 << 20) < memory(plan, refs) < 2 * needed(refs) + (5 << 20)
    assert memory(cache_plan(vmem=1 << 20), refs) == 1 << 20
