"""Large items in parts."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_tpu.caches.parts import Parts, split
from attnops_tpu.caches.schedule import ItemSchedule

# Four tiles of 3 units from the second unit on, one tile's last unit, no keys, and two tiles of an item that is none.
FIRST, STOP = np.array([1, 5, 4, 0]), np.array([11, 6, 4, 6])
EXISTS = np.array([True, True, True, False])


@functools.partial(jax.jit, static_argnums=1)
def program(others: jax.Array, most: int) -> Parts:
    nothing = jnp.zeros((4,), jnp.int32)
    schedule = ItemSchedule(*map(jnp.asarray, (FIRST, STOP)), *[nothing] * 4, row=jnp.arange(4) * 10)
    plan: Any = SimpleNamespace(units=3, B=4)
    return split(plan, schedule, jnp.asarray(EXISTS), others, most)


def parts(others: int, most: int) -> tuple[Any, list[list[tuple[int, int]]]]:
    """The parts of these items, and of those that exist the units of each."""
    result = jax.tree.map(np.asarray, program(np.int32(others), most))
    first, stop, exists = (x.reshape(4, most) for x in (result.schedule.first, result.schedule.stop, result.exists))
    return result, [
        [(int(i), int(j)) for i, j, x in zip(*row, strict=True) if x] for row in zip(first, stop, exists, strict=True)
    ]


def test_parts_are_whole_tiles_one_after_another() -> None:
    assert parts(99, 4)[1] == [[(1, 3), (3, 6), (6, 9), (9, 11)], [(5, 6)], [(4, 4)], []]
    assert parts(99, 3)[1] == [[(1, 3), (3, 6), (6, 11)], [(5, 6)], [(4, 4)], []]


def test_there_are_no_more_parts_than_small_items_to_come_between() -> None:
    assert parts(0, 4)[1] == parts(3, 4)[1] == [[(1, 11)], [(5, 6)], [(4, 4)], []]
    assert parts(4, 4)[1][0] == parts(6, 4)[1][0] == [(1, 6), (6, 11)]


def test_an_item_has_one_first_and_one_last_part_and_all_have_its_other_numbers() -> None:
    for others, most in (99, 4), (4, 4), (0, 4), (99, 3):
        result, units = parts(others, most)
        first, last, exists = (x.reshape(4, most) for x in (result.is_first, result.is_last, result.exists))
        assert (first & exists).sum(1).tolist() == (last & exists).sum(1).tolist() == [1, 1, 1, 0]
        assert all(first[i, 0] and last[i, len(units[i]) - 1] for i in range(3))
        assert result.schedule.row.tolist() == np.repeat(np.arange(4) * 10, most).tolist()
