"""New tokens in whole groups of slots, and where the kernel writes them, held to loops over slots."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_caches import NewTokens
from attnops_tpu.caches.new_tokens import Written, group_of, groups_of, written
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import Tile
from attnops_tpu.caches.write import Writer, bits_of_slots


@pytest.mark.parametrize(
    ("itemsize", "unit", "sublanes", "group"),
    [(4, 64, 8, 8), (2, 64, 8, 16), (1, 64, 8, 32), (2, 8, 8, 8), (1, 48, 8, 16), (2, 64, 16, 32), (2, 16, 16, 16)],
)
def test_groups_fill_registers_and_divide_units(itemsize: int, unit: int, sublanes: int, group: int) -> None:
    assert group_of(False, itemsize, unit, sublanes) == group
    assert group_of(True, 4, 256, sublanes) == 128


@pytest.mark.parametrize("group", [8, 16])
def test_the_most_groups_that_consecutive_slots_lie_in(group: int) -> None:
    for T in range(1, 40):
        assert groups_of(T, group) == max((first + T - 1) // group + 1 for first in range(group))


@pytest.mark.parametrize(("dtype", "T"), [(np.float32, 10), (np.float16, 9), (np.int8, 9)])
@pytest.mark.tier(quick=["float16-9"])
def test_words_hold_the_tokens_of_whole_groups(dtype: Any, T: int, cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(T=T, bq=T, unit=64, bk=64, S=128, cores=2)
    tokens = np.random.default_rng(0).integers(1, 100, (3, 2, T, 8)).astype(dtype)
    first, size = np.array([0, 5, 61], np.int32), np.array([T, T - 1, T], np.int32)
    blocks = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    array = SimpleNamespace(dtype=np.dtype(dtype))
    result = jax.jit(lambda x: written(plan, NewTokens({"key": x}, first, size, blocks), 10, {"key": array}))(tokens)
    assert result.begin is None
    assert (result.stop - result.first).tolist() == size.tolist()
    assert result.blocks.tolist() == [10, 11, 12, 13, 14, 15]
    words = np.asarray(result.tokens[0])
    assert words.shape[0] == plan.items == 4, "rows are padded to as many as items"
    bits = words.view(dtype).reshape(4, 2, words.shape[2], 8, -1)  # the slots of a word are last
    group = group_of(False, tokens.itemsize, 64, plan.sublanes)
    for row in range(3):
        for index in range(size[row]):
            word, place = divmod(first[row] % group + index, 4 // tokens.itemsize)
            np.testing.assert_array_equal(bits[row, :, word, :, place], tokens[row, :, index])


@pytest.mark.parametrize(("dtype", "T"), [(np.float32, 3), (np.float16, 5), (np.int8, 1)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.tier(quick=["False-int8-1"])
def test_few_tokens_of_a_row_are_words_that_repeat_each(
    packed: bool, dtype: Any, T: int, cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(T=T, bq=T, cores=2, scales="token_head")
    shape, starts = ((1, 2, 7), np.array([0, 4, 7], np.int32)) if packed else ((3, 2, T), None)
    random = np.random.default_rng(0)
    given = {"key": random.integers(1, 100, (*shape, 8)).astype(dtype), "key_scale": random.random(shape, np.float32)}
    first, size, blocks = np.array([0, 5, 61], np.int32), np.full(3, T, np.int32), np.zeros((3, 2), np.int32)
    arrays: dict[str, Any] = {"key": None, "x": None, "key_scale": None}
    result = jax.jit(
        lambda given: written(plan, NewTokens(given | {"x": given["key"]}, first, size, blocks, starts), 0, arrays)
    )(given)
    words, _, scales = map(np.asarray, result.tokens)
    assert result.begin.tolist() == [*([0, 4, 7] if packed else [0, T, 2 * T]), 0], "padded to as many as items"
    assert len(words) == len(scales) == (7 if packed else 3 * T) + T, "an item has T from any row's first"
    bits = words.view(dtype).reshape(len(words), 2, 8, -1)
    for token in range(7 if packed else 3 * T):
        row, index = (0, token) if packed else divmod(token, T)
        wanted = given["key"][row, :, index, :, None]
        np.testing.assert_array_equal(bits[token], np.broadcast_to(wanted, bits[token].shape))
        np.testing.assert_array_equal(scales[token], np.repeat(given["key_scale"][row, :, index, None], 128, 1))


def a_writer(plan: CachePlan, first: list[int], size: list[int]) -> Writer:
    slots = np.array(first, np.int32)
    new = Written(slots, slots + np.array(size, np.int32), np.zeros(3, np.int32), None, ())
    return Writer(plan, SimpleNamespace(), new)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_tiles_groups_are_those_that_hold_a_new_token(is_ring: bool, cache_plan: Callable[..., CachePlan]) -> None:
    plan, group = cache_plan(T=20, is_ring=is_ring, is_paged=False, bk=32, unit=8), 8
    firsts, sizes = [0, 31, 60 if is_ring else 44], [0, 20, 20]
    writer, turns = a_writer(plan, firsts, sizes), (0, plan.S) if is_ring else (0,)

    def groups(turn: int) -> list[Any]:
        tiles = [(row, number) for row in range(3) for number in range(plan.nk)]
        return [
            (writer.has(row, number), *writer._groups(Tile(0, 0, row, number, 0, 0, False), group, turn))  # type: ignore[arg-type]
            for row, number in tiles
        ]

    result = {turn: np.array(jax.jit(lambda turn=turn: jnp.array(groups(turn)))()) for turn in turns}
    for row in range(3):
        for number in range(plan.nk):
            slots = {s % plan.S for s in range(firsts[row], firsts[row] + sizes[row])}
            wanted = {s // group for s in slots if s // plan.bk == number}
            at = row * plan.nk + number
            written_to = {
                g - turn // group for turn in turns for g in range(int(result[turn][at, 1]), int(result[turn][at, 2]))
            }
            assert written_to == wanted
            assert bool(result[0][at, 0]) == bool(wanted)


@pytest.mark.parametrize("packed", [1, 2, 4])
def test_the_bits_of_new_slots_are_1(packed: int) -> None:
    rows, first, stop = 8 // packed, 2, 7
    result = np.asarray(jax.jit(lambda: bits_of_slots((rows, 2), jnp.int32(first), jnp.int32(stop), packed))())
    wanted = [sum(((1 << 32 // packed) - 1) << (32 // packed * i) for i in range(packed)
                  if first <= word * packed + i < stop) for word in range(rows)]  # fmt: skip
    assert (result.astype(np.uint32) == np.array(wanted, np.uint32)[:, None]).all()
