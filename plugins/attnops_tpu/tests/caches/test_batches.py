"""Rows in several calls: each call is given its rows alone, and results are those of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnops_tpu.caches import batches
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.operands import CacheArrays, KernelInputs, KernelResults
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import Prompts
from attnops_tpu.caches.schedule import ItemSchedule


def numbered(first: int, rows: int, *shape: int) -> np.ndarray:
    """[rows, ...], in each element the number of the row."""
    return np.broadcast_to(np.arange(first, first + rows).reshape(-1, *[1] * len(shape)), (rows, *shape))


def inputs_of(plan: CachePlan, first: int, B: int, writes: bool) -> KernelInputs:
    """The inputs of rows from ``first`` on; each element has the number of its row, or of its item."""
    items, at = B * plan.nq, first * plan.nq
    pad = -items % plan.cores
    by_item = np.r_[np.arange(at, at + items), np.arange(pad) + 10_000] if pad else np.arange(at, at + items)
    one = np.zeros(1, np.int32)
    return KernelInputs(
        query=by_item[:, None], sources=(np.zeros(1),),
        tables=(numbered(first, B, 2).reshape(-1), numbered(first, B, 1).reshape(-1)) if plan.is_paged else (),
        block=np.array([5 if plan.is_paged else 5 + first]),
        values=CacheArrays((numbered(first, B), by_item), (by_item,), numbered(first, B, 3)),
        schedule=ItemSchedule(by_item, by_item + 1, by_item, by_item, following_of(plan, B), one, one),
        new=Written(numbered(first, B), numbered(first, B), numbered(first, B, 2).reshape(-1),
                    None, (by_item,)) if writes else None,
        prompts=None,
    )  # type: ignore[arg-type]  # fmt: skip


def following_of(plan: CachePlan, B: int) -> np.ndarray:
    """Of items that all have keys."""
    items = -(-B * plan.nq // plan.cores) * plan.cores
    return np.minimum(np.arange(items + plan.cores), items)


@pytest.mark.parametrize("fields", [
    {}, {"T": 3, "bq": 1}, {"is_paged": False}, {"cores": 2, "T": 3, "bq": 1}
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("writes", [False, True])
def test_each_call_is_given_its_rows(
    fields: dict[str, Any], writes: bool, cache_plan: Callable[..., CachePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cache_plan(B=6, **fields)
    monkeypatch.setattr(batches, "rows_a_call", lambda nq, words, shared: 4 if words == (5 if writes else 0) else 0)
    monkeypatch.setattr(batches, "following", lambda plan, has_keys: has_keys.all() and following_of(plan, plan.B))
    given: list[tuple[CachePlan, KernelInputs]] = []

    def run(plan: CachePlan, inputs: KernelInputs) -> KernelResults:
        given.append((plan, inputs))
        written = tuple(x + 1 for x in inputs.sources) if writes or inputs.prompts is not None else ()
        return KernelResults(inputs.query * 10, inputs.query * 100, written)

    of_prompts: Any = Prompts(*[np.zeros(0)] * 8)
    inputs = inputs_of(plan, 0, 6, writes)._replace(prompts=of_prompts)
    results = batches.run_in_batches(run, plan, inputs)
    assert [inputs.prompts for _, inputs in given] == [of_prompts, None], "the first call writes prompts"
    given = [(plan, inputs._replace(prompts=None)) for plan, inputs in given]
    assert [of_rows.B for of_rows, _ in given] == [4, 2]
    first = 0
    for call, (of_rows, inputs) in enumerate(given):
        wanted = inputs_of(plan, first, of_rows.B, writes)._replace(sources=(np.full(1, call),))
        for x, y, name in zip(inputs, wanted, KernelInputs._fields, strict=True):
            assert (x is None) == (y is None), name
            for a, b in zip(leaves(x), leaves(y), strict=True):
                np.testing.assert_array_equal(a, b, name)
        first += of_rows.B
    np.testing.assert_array_equal(results.out[:, 0], 10 * np.arange(6 * plan.nq))
    np.testing.assert_array_equal(results.lse[:, 0], 100 * np.arange(6 * plan.nq))  # type: ignore[index]
    assert [int(x[0]) for x in results.sources] == [2 if writes else 1], "what the first call wrote is there"


def leaves(x: Any) -> list[Any]:
    return [leaf for one in x for leaf in leaves(one)] if isinstance(x, tuple) else [] if x is None else [x]


def test_rows_that_fit_are_one_call(cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(B=6)
    inputs = inputs_of(plan, 0, 6, False)
    calls: list[Any] = []
    batches.run_in_batches(lambda *given: calls.append(given), plan, inputs)  # type: ignore[arg-type, func-returns-value]
    assert calls == [(plan, inputs)]
