"""Which units each item reads, held to a loop over the mask."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from attnops.masks import Dense
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.schedule import ItemSchedule, following, rows_a_call, schedule, words_of_pages


def by_loop(plan: CachePlan, seen: np.ndarray, new: Written | None) -> dict[str, list[int]]:
    """The schedule of a mask [B, T, S]."""
    result: dict[str, list[int]] = {"first": [], "stop": [], "first_full": [], "stop_full": []}
    for item in range(plan.items):
        row, tile = divmod(item, plan.nq)
        exists = row < plan.B
        scores = seen[row, tile * plan.bq : (tile + 1) * plan.bq] if exists else np.zeros((1, plan.S), bool)
        units = [scores[:, u * plan.unit : (u + 1) * plan.unit].any() for u in range(plan.nk * plan.units)]
        if exists and new is not None:
            for slot in range(new.first[row], new.stop[row]):
                units[slot % plan.S // plan.unit] = True
        read = [u for u, is_read in enumerate(units) if is_read] or [0]
        result["first"].append(read[0])
        result["stop"].append(read[-1] + 1 if any(units) else 0)
        slots = [scores[:, t * plan.bk : (t + 1) * plan.bk] for t in range(plan.nk)]
        full = [x.shape[1] == plan.bk and bool(x.all()) for x in slots]
        begin = full.index(True) if any(full) else plan.nk
        end = next((t for t in range(begin, plan.nk) if not full[t]), plan.nk)
        result["first_full"].append(begin)
        result["stop_full"].append(end)
    return result


def a_mask(B: int, T: int, S: int) -> np.ndarray:
    """Of each row a range of slots, some queries none, one row none, one all of them."""
    random = np.random.default_rng(0)
    first, size = random.integers(0, S // 2, (B, T, 1)), random.integers(0, S, (B, T, 1))
    slot = np.arange(S)
    seen = (first <= slot) & (slot < first + size)
    seen[0], seen[1] = True, False
    return seen


@pytest.mark.parametrize("fields", [
    {}, {"T": 5, "bq": 2}, {"cores": 2}, {"T": 5, "bq": 2, "cores": 2}, {"S": 60},
    {"is_ring": True, "is_paged": False, "T": 3, "bq": 3},
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("writes", [False, True])
def test_items_read_from_the_first_to_the_last_unit_that_is_seen_or_written(
    fields: dict[str, int], writes: bool, cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(B=5, **fields)
    seen = a_mask(plan.B, plan.T, plan.S)
    first = np.array([3, 40, plan.S - 2, 7, 0], np.int32)
    size = np.array([1, plan.T, plan.T if plan.is_ring else 2, 0, plan.T], np.int32)
    new = Written(first, first + size, np.zeros(5, np.int32), None, ()) if writes and plan.nq == 1 else None
    mask = Dense(seen[:, None]).bind(plan.B, plan.H, plan.T, plan.S)
    result = jax.jit(lambda: schedule(plan, mask, None, new))()
    wanted = by_loop(plan, seen, new)
    for name, numbers in wanted.items():
        assert getattr(result, name).tolist() == numbers, name
    has_keys = [a < b for a, b in zip(wanted["first"], wanted["stop"], strict=True)]
    assert result.following.tolist() == following_by_loop(plan, has_keys)


def following_by_loop(plan: CachePlan, has_keys: list[bool]) -> list[int]:
    def after(item: int) -> int:
        return next((i for i in range(item, plan.items, plan.cores) if has_keys[i]), plan.items)

    return [after(core) for core in range(plan.cores)] + [after(i + plan.cores) for i in range(plan.items)]


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_each_core_goes_on_to_its_own_next_item_with_keys(cores: int, cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(B=11, cores=cores)
    has_keys = [*(np.random.default_rng(cores).random(11) < 0.5).tolist(), *[False] * (plan.items - 11)]
    assert jax.jit(lambda: following(plan, np.array(has_keys)))().tolist() == following_by_loop(plan, has_keys)


@pytest.mark.parametrize(("unit", "bk"), [(4, 16), (1, 40), (1, 96)])
def test_the_bits_of_a_tiles_pages_are_in_words_of_its_own(
    unit: int, bk: int, cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(unit=unit, bk=bk, S=2 * bk)
    exists = np.random.default_rng(0).random((3, plan.S // unit)) < 0.5
    words = np.asarray(jax.jit(lambda: words_of_pages(plan, exists))()).reshape(3, -1)
    for row, number, index in np.ndindex(3, plan.nk, plan.units):
        word, bit = divmod(index, 32)
        result = int(words[row, number * plan.words + word]) >> bit & 1
        assert result == exists[row, number * plan.units + index]


@pytest.mark.parametrize(
    ("nq", "words", "shared"), [(1, 0, 0), (1, 5, 0), (40, 0, 60_000), (1 << 14, 0, 0), ((1 << 14) + 1, 0, 0)]
)
def test_the_schedules_of_a_calls_rows_fit_scalar_memory(nq: int, words: int, shared: int) -> None:
    def fits(rows: int) -> bool:
        in_memory = rows * (4 * len(ItemSchedule._fields) * nq + 64 + 4 * words) + 4 * shared
        return in_memory <= 960 * 1024 and rows * nq <= 1 << 14

    most = rows_a_call(nq, words, shared)
    assert most == 0 or fits(most)
    assert not fits(most + 1)
