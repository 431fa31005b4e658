"""Tiles of calls over caches: what holds of all of them, and those of the benchmark's cases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from attnops import OperationMetadata
from attnops_tpu.caches.tile_sizes import (
    LANES,
    PIECE,
    TABLE,
    CacheTileSizes,
    Heads,
    Starts,
    choose,
    packed_queries_a_tile,
    queries_a_tile,
    reads_a_tile,
    unit_of,
)
from attnops_tpu.generations import GENERATIONS

# Page, kv heads, query heads of each, bytes of a token of a kv head, bytes of a feature, queries.
CASES = [
    (16, 8, 4, 512, 2, 1), (16, 1, 4, 512, 2, 1), (64, 8, 4, 512, 2, 1), (256, 1, 4, 512, 2, 1), (64, 8, 4, 256, 2, 1),
    (128, 8, 4, 256, 1, 1), (128, 1, 4, 256, 1, 1), (64, 1, 128, 1280, 2, 1), (64, 8, 4, 512, 2, 32),
    (64, 8, 4, 512, 2, 4096), (0, 4, 1, 512, 4, 3),
]  # fmt: skip


def chosen(name: str, case: tuple[int, ...], S: int = 1 << 17, **given: Any) -> CacheTileSizes:
    page, K, G, token, itemsize, T = case
    sizes = given.get("block_q"), given.get("block_k")
    heads = Heads(K * G, K, G < 128, False)
    return choose(GENERATIONS[name], *sizes, (T, S), heads, K * token, itemsize, unit_of(page, S))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("S", [1 << 17, 4096, 80])
def test_tiles_are_whole_units_and_lanes_and_fit_vector_memory(name: str, case: tuple[int, ...], S: int) -> None:
    page, K, G, token, _, T = case
    tiles = chosen(name, case, S)
    assert tiles.unit == (page or math.gcd(128, S))
    assert tiles.bk % tiles.unit == tiles.bk % LANES == 0
    assert tiles.bk < S + math.lcm(tiles.unit, LANES)
    assert tiles.piece % PIECE == tiles.piece % (tiles.bk // tiles.unit) == 0
    assert tiles.chunk <= tiles.bk
    assert tiles.bk % tiles.masked_chunk == 0
    assert tiles.masked_chunk <= tiles.chunk
    assert tiles.buffers * tiles.bk * K * token <= GENERATIONS[name].vmem * 0.6
    assert min(T, 8) <= tiles.bq
    assert G * tiles.bq <= max(1024 if tiles.transposed else 256, 8 * G)
    assert tiles.transposed == (G * T > 128 and G < 128)
    if tiles.transposed:
        assert G * tiles.bq % LANES == 0
        assert tiles.bk * G * tiles.bq * K <= 1 << 22
        assert (-(-T // tiles.bq) - 1) * tiles.bq < T
    else:
        assert tiles.bq <= T


# bq, bk, chunk, masked chunk, when transfers start.
WANTED = {
    "v6e": [
        (1, 512, 512, 512, Starts.BEFORE), (1, 8192, 1024, 1024, Starts.BETWEEN), (1, 512, 512, 512, Starts.BEFORE),
    ],
    "tpu7x": [
        (1, 1024, 1024, 512, Starts.BEFORE), (1, 8192, 1024, 1024, Starts.BETWEEN), (1, 1024, 1024, 512, Starts.BEFORE),
    ],
    "v4": [
        (1, 512, 512, 512, Starts.BEFORE), (1, 4096, 2048, 2048, Starts.BEFORE), (1, 512, 512, 512, Starts.BEFORE),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_tiles_of_the_benchmarks_cases(name: str) -> None:
    for case, wanted in zip(CASES, WANTED[name], strict=False):
        tiles = chosen(name, case)
        assert (tiles.bq, tiles.bk, tiles.chunk, tiles.masked_chunk, tiles.starts) == wanted, case


def test_transfers_start_after_the_reads_of_many_rows_and_between_those_of_few() -> None:
    for case in CASES:
        tiles, (_, K, G, _, _, _) = chosen("v6e", case), case
        if tiles.transposed:
            assert tiles.starts is Starts.BRANCHED
        elif 64 <= -(-G * tiles.bq // 8) * 8 <= 128:
            assert tiles.starts is Starts.AFTER
        else:
            is_many = tiles.bk // tiles.unit > reads_a_tile(K, tiles.bk)
            assert tiles.starts is (Starts.BETWEEN if is_many else Starts.BEFORE)
        if not tiles.transposed:
            assert chosen("v4", case).starts is Starts.BEFORE, "it has two buffers"


def test_blocks_of_the_metadata_are_kept() -> None:
    tiles = chosen("v6e", CASES[9], block_q=16, block_k=1000)
    assert (tiles.bq, tiles.bk) == (16, 896)  # whole pages that fill the lanes


def test_queries_a_tile() -> None:
    v6e, llama = GENERATIONS["v6e"], Heads(32, 8, True, False)
    tiles = [queries_a_tile(v6e, None, T, llama) for T in (1, 32, 33, 100, 256, 300, 2048)]
    assert tiles == [(1, False), (32, False), (64, True), (128, True), (256, True), (160, True), (256, True)]
    assert queries_a_tile(v6e, 256, 300, llama) == (256, True)
    assert queries_a_tile(v6e, 250, 300, llama) == (250, False)  # its rows don't fill the lanes
    assert queries_a_tile(v6e, None, 100, Heads(128, 1, False, False)) == (8, False)
    assert queries_a_tile(v6e, None, 50, Heads(24, 8, True, False)) == (50, False)  # 128 queries fill the lanes
    assert queries_a_tile(v6e, 8, 100, Heads(8, 8, True, False)) == (8, False)
    assert queries_a_tile(GENERATIONS["v4"], None, 300, Heads(32, 32, True, False)) == (256, False)
    assert [Heads.of(32, 8, x, False, OperationMetadata()).transposable for x in (("bfloat16", "bfloat16"),
            ("bfloat16", "float32"))] == [True, False]  # fmt: skip
    packed = [packed_queries_a_tile(v6e, None, N, 8, llama) for N in (4, 8, 65, 72, 2000)]
    assert packed == [(4, None), (8, None), (16, None), (8, 96), (8, 256)]
    assert packed_queries_a_tile(v6e, None, 8000, 8, Heads(128, 1, False, False)) == (8, None)
    assert packed_queries_a_tile(v6e, 4, 100, 1, llama) == (4, None)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("interpret", [False, True])
def test_tiles_of_packed_rows_are_one_tile_of_their_call(name: str, interpret: bool) -> None:
    for K, G, N, rows in itertools.product((1, 4, 8), (1, 3, 8, 71, 128, 256), (1, 5, 9, 100, 500), (1, 8)):
        heads = Heads(K * G, K, True, interpret)
        for T in packed_queries_a_tile(GENERATIONS[name], None, N, rows, heads):
            assert T is None or queries_a_tile(GENERATIONS[name], None, T, heads)[0] >= T, (K, G, N, rows)
