"""Chosen blocks: bounds of tiles, what kernels visit, programs, and bad input."""

from typing import Any

import jax
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels import of_mask
from attnops.masks import Blocks, Causal, Coverage, block_map, block_sizes
from attnops.operations.flash.tile_schedule import tile_schedule
from attnops.operations.flash.tile_sizes import choose_tiles

Array = np.ndarray[Any, Any]


def choice(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).random(shape) < 0.4


def by_token(chosen: Array, q_block: int, kv_block: int, H: int, T: int, S: int) -> Array:
    by_head = np.repeat(chosen, H // chosen.shape[1], axis=1)
    return by_head[:, :, np.arange(T) // q_block][..., np.arange(S) // kv_block]


@pytest.mark.parametrize("tile", [(8, 8), (16, 8), (10, 3), (64, 64)])
@pytest.mark.parametrize(
    ("T", "S", "q_block", "kv_block", "n"), [(40, 50, 8, 16, 2), (37, 64, 5, 7, 4), (33, 20, 1, 3, 1)]
)
def test_a_tile_is_empty_or_full_if_and_only_if_none_or_all_of_its_blocks_are_chosen(
    T: int, S: int, q_block: int, kv_block: int, n: int, tile: tuple[int, int]
) -> None:
    chosen = choice(0, 2, n, -(-T // q_block), -(-S // kv_block))
    seen = by_token(chosen, q_block, kv_block, 4, T, S)
    coverage = np.broadcast_to(*[block_map(Blocks(chosen, q_block, kv_block), (2, 4, T, S), *tile).coverage], (
        2, 4, -(-T // tile[0]), -(-S // tile[1])))  # fmt: skip
    for i, j in np.ndindex(coverage.shape[2:]):
        of_tile = seen[:, :, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        expected = np.where(of_tile.all((2, 3)), Coverage.FULL, np.where(of_tile.any((2, 3)), Coverage.PARTIAL, 0))
        np.testing.assert_array_equal(coverage[:, :, i, j], expected)


def test_indices_mark_blocks_and_traced_ones_outside_choose_none() -> None:
    indices = np.array([[[[0, -1], [2, 0]]]])
    expected = [[[[True, False, False], [True, False, True]]]]
    assert Blocks(indices, 4, 4).bind(1, 1, 8, 12).chosen.tolist() == expected
    bound = jax.jit(lambda x: Blocks(x, 4, 4).bind(1, 1, 8, 12).chosen)
    assert bound(indices).tolist() == expected
    assert bound(np.array([[[[0, 3], [2, -7]]]])).tolist() == [[[[True, False, False], [False, False, True]]]]


def test_narrow_indices_count_more_blocks_than_they_hold() -> None:
    assert Blocks(np.zeros((1, 1, 1, 1), np.uint8), 4, 1).bind(1, 1, 4, 300).chosen.sum() == 1


def test_a_picture() -> None:
    assert Blocks([[[[0, -1], [0, 1]]]], 2, 2).show(4) == "█ █ · ·\n█ █ · ·\n█ █ █ █\n█ █ █ █"
    assert repr(Causal() & Blocks(np.zeros((1, 1, 2, 2), bool), 2, 2)) == "Causal() & Blocks(<bool [1, 1, 2, 2]>, 2, 2)"


@pytest.mark.parametrize(
    ("chosen", "sizes", "message"),
    [
        ([[[[0, 2], [0, 1]]]], (2, 2), r"chosen\[0, 0, 0, 1\]=2 must be -1, for none, or the index of one of the 2 "),
        ([[[[0, -2], [0, 1]]]], (2, 2), r"chosen\[0, 0, 0, 1\]=-2 must be -1"),
        (np.zeros((1, 3, 2, 2), bool), (2, 2), r"<bool \[1, 3, 2, 2\]>, but must be .* with n a divisor of H=4"),
        (np.zeros((1, 1, 3, 2), bool), (2, 2), r"<bool \[1, 1, 3, 2\]>, but must be boolean .*=\[1, n, 2, 2\]"),
        (np.zeros((1, 1, 2, 3), bool), (2, 2), r"for T=4 queries and S=4 keys in blocks of 2 and 2"),
        (np.zeros((2, 1, 2, 2), bool), (2, 2), r"<bool \[2, 1, 2, 2\]>"),
        (np.zeros((2, 2), int), (2, 2), r"<int64 \[2, 2\]>"),
        (np.zeros((1, 1, 2, 2), np.float32), (2, 2), "has dtype float32, but must be integers"),
        ([[[[0]]]], (0, 4), "q_block=0 must be an int of at least 1"),
        ([[[[0]]]], (4, True), "kv_block=True must be an int of at least 1"),
    ],
)
def test_bad_choices_are_refused_with_both_values(chosen: Any, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks(chosen, *sizes).bind(1, 4, 4, 4)


def test_blocks_of_one_block_of_queries_are_values_by_key() -> None:
    (function, _, tiles) = of_mask(Blocks(np.ones((1, 2, 1, 4), bool), 8, 4).bind(1, 2, 8, 16))
    assert tiles == []
    assert frozenset({"h", "kv"}) in function.values
    assert len(of_mask(Blocks(np.ones((1, 2, 2, 4), bool), 4, 4).bind(1, 2, 8, 16)).dense) == 1


def test_tiles_are_those_of_blocks() -> None:
    T = 4096
    assert [choose_tiles(T, T, 1, None, None, blocks=(n, n))[0] for n in (1024, 640, 128, 48, 16, 1)] == [
        512, 320, 128, 48, 64, 64]  # fmt: skip
    assert choose_tiles(T, T, 8, None, None, blocks=(128, 128)) == (64, 128)
    assert choose_tiles(T, T, 1, 32, None, blocks=(128, 128)) == (32, 128)
    assert block_sizes(Causal() & ~Blocks(np.ones((1, 1, 4, 2), bool), 8, 4)) == (8, 4)
    assert block_sizes(Causal()) is None


def test_only_tiles_of_chosen_blocks_are_computed_and_one_program_serves_all_choices() -> None:
    """Values that are not finite, in blocks that are not chosen, would reach the output of a tile that is visited."""
    n, block = 4, 64
    operation = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    query, key, value = (
        np.random.default_rng(i).normal(size=(1, n * block, 1, 16)).astype(np.float32) for i in range(3)
    )

    @jax.jit
    def gradients(key: jax.Array, value: jax.Array, chosen: jax.Array) -> Any:
        def loss(*x: jax.Array) -> jax.Array:
            return operation(*x, mask=Causal() & Blocks(chosen, block, block)).attention_outputs.sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(query, key, value)

    # Each query block sees the first one and its own; the second block of keys is then seen by the second of queries.
    for hidden in (1, 2):
        chosen = np.eye(n, dtype=bool) | (np.arange(n) == 0)
        chosen[:, hidden] = False
        bad = np.array(value)
        bad[:, hidden * block : (hidden + 1) * block] = np.nan
        result = jax.tree.map(np.asarray, gradients(key, bad, chosen[None, None]))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(result[1][2][:, hidden * block : (hidden + 1) * block], 0)
    assert gradients._cache_size() == 1


def test_a_schedule_lists_the_tiles_of_chosen_blocks_alone() -> None:
    chosen = choice(3, 1, 2, 8, 8)

    @jax.jit
    def schedules(chosen: jax.Array) -> Any:
        coverage = block_map(Blocks(chosen, 32, 32), (1, 2, 256, 256), 32, 32).coverage[0]
        return tile_schedule(coverage), tile_schedule(coverage.swapaxes(1, 2))

    found = jax.tree.map(np.asarray, schedules(chosen))
    for schedule, expected in zip(found, (chosen[0], chosen[0].swapaxes(1, 2)), strict=True):
        for m, row in np.ndindex(2, 8):
            listed = schedule.columns[m, schedule.start[m, row] : schedule.stop[m, row]]
            assert sorted(listed.tolist()) == np.nonzero(expected[m, row])[0].tolist()
            assert schedule.middle[m, row] == schedule.stop[m, row]  # all FULL
