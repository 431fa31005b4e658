"""Masks that have no form in Triton: as bits, for the tiles that they are PARTIAL on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_plans import make_plan

from attnops.biases import RelativePosition
from attnops.masks import Causal, Coverage, Lengths, Mask, MaskFn, SlidingWindow
from attnops_testing.corners import agree, draw
from attnops_testing.runner import Subject
from attnops_triton.flash.bits import bits_function, bits_map_shape, is_translatable
from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.tile_schedule import ScheduleLayout, TileSchedule, tile_schedule

INTERPRETED = Subject(operation="attnops-triton:flash", platform="cuda", interpret=True)
B, T, S, H, K, D = 2, 41, 57, 4, 2, 16
TABLE = np.random.default_rng(0).random((H, 97)) > 0.4


def scattered(table: Any = TABLE) -> Mask:
    """A lookup by query and key, which kernels can't make for each score."""
    return MaskFn(lambda b, h, q, kv: jnp.asarray(table)[0, (q * 31 + kv * 17) % 97])


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return jnp.asarray(TABLE)[h, (q * 31 + kv * 17 + 5 * b) % 97]


MASKS = {
    "everywhere": scattered(),
    "where it is causal": Causal() & scattered(),
    "by batch and head": MaskFn(by_head),
    "not, or": ~scattered() | SlidingWindow(3, 3),
    "fails on scalars": MaskFn(lambda b, h, q, kv: jnp.concatenate([q, q], axis=-1)[..., :1] % 3 >= kv % 4),
    "at positions": (Causal() & scattered()).at(np.arange(T)[::-1].copy(), np.arange(S) // 2),
}


def call(operation: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    return operation(q, k, v, **options).attention_outputs


def inputs() -> list[jax.Array]:
    return [draw(B, T, H, D), draw(B, S, K, D), draw(B, S, K, D)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["by batch and head", *(pytest.param(x, marks=pytest.mark.slow) for x in MASKS if x != "by batch and head")]
)
@pytest.mark.tier(every=6)
def test_a_mask_as_bits_gives_the_values_of_vanilla(name: str) -> None:
    mask = MASKS[name]
    assert not is_translatable(mask.bind(B, H, T, S))
    agree(INTERPRETED, lambda operation, *x: call(operation, *x, mask=mask), *inputs())


@pytest.mark.slow
def test_a_mask_as_bits_of_traced_coverage_gives_the_values_of_vanilla() -> None:
    lengths = jnp.array([S, 20])

    def attend(operation: Any, *qkv: Any) -> Any:
        traced = jax.jit(lambda lengths: call(operation, *qkv, mask=Lengths(lengths) & scattered()))
        return traced(lengths)

    agree(INTERPRETED, attend, *inputs())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "distance"])
@pytest.mark.tier(every=2)
def test_gradients_of_biases_with_an_element_for_each_score(kind: str) -> None:
    bias = draw(1, H, T, S) if kind == "array" else draw(32, H)

    def attend(operation: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
        given = bias if kind == "array" else RelativePosition(bias)
        return call(operation, q, k, v, mask=Causal() & scattered(), bias=given)

    agree(INTERPRETED, attend, *inputs(), bias)


@pytest.mark.slow
def test_each_slice_has_its_own_bits() -> None:
    tables = jnp.asarray(np.random.default_rng(1).random((3, 1, 97)) > 0.4)

    def attend(operation: Any, *qkv: Any) -> Any:
        return jax.vmap(lambda table: call(operation, *qkv, mask=Causal() & scattered(table)))(tables)

    agree(INTERPRETED, attend, *inputs())


def test_bits_of_partial_tiles_alone() -> None:
    coverage = np.array([[[[1, 0, 0], [2, 1, 0], [2, 1, 1]]]], np.int8)
    assert Coverage.PARTIAL == 1
    seen: list[Any] = []

    def bits_of(*at: Any) -> Any:
        seen.append([list(map(int, x)) for x in at])
        return jnp.zeros((len(at[0]), 16, 1), jnp.int32)

    schedule: TileSchedule = tile_schedule(coverage, ScheduleLayout.LISTED, bits_of)
    assert seen[-1][2:] == [[0, 1, 2, 2], [0, 1, 1, 2]]
    assert schedule.first.tolist() == [0, 1, 2]
    tile_schedule(coverage.swapaxes(2, 3), ScheduleLayout.LISTED, bits_of, by_key=True)
    assert seen[-1][2:] == [[0, 1, 2, 2], [0, 1, 1, 2]], "queries and keys, row by row of keys"


@pytest.mark.parametrize("bk", [16, 32, 64])
def test_bit_k_of_a_word_is_key_k_and_ends_repeat_the_last_token(bk: int) -> None:
    plan = make_plan(B=B, H=H, T=T, S=S)
    mask = MaskFn(by_head).bind(B, H, T, S)
    tiles = [(0, 1, 0, 0), (1, 3, 2, (S - 1) // bk)]
    words = np.asarray(jax.jit(bits_function(mask, plan, TileSizes(16, bk, 4, 1)))(*np.transpose(tiles)))
    assert words.dtype == np.int32
    dense = np.broadcast_to(np.asarray(jax.jit(lambda: mask.dense(B, H, T, S))()), (B, H, T, S))
    for (b, h, q_tile, kv_tile), tile in zip(tiles, words, strict=True):
        q = np.minimum(16 * q_tile + np.arange(16), T - 1)
        kv = np.minimum(bk * kv_tile + np.arange(bk), S - 1)
        bits = tile.astype(np.uint32)[:, np.arange(bk) // 32] >> (np.arange(bk) % 32).astype(np.uint32) & 1
        np.testing.assert_array_equal(bits, dense[b, h][q[:, None], kv])


def test_a_mask_has_bits_for_the_batches_and_heads_that_it_depends_on() -> None:
    plan = make_plan(B=B, H=H, T=T, S=S)
    shapes = [bits_map_shape(MASKS[name].bind(B, H, T, S), plan) for name in ("everywhere", "by batch and head")]
    assert shapes == [(1, 1), (B, H)]
