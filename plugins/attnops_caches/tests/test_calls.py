"""How native `flash` reads caches in place: its tiles, which of them it visits, and its temporaries."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels.flash import FlashCall
from attnops.masks import Causal, Mask, SlidingWindow
from attnops.operations.flash.tile_sizes import WIDE
from attnops_caches import Cache, DenseCache, PagedCache, Quantized
from attnops_caches.flash.attention import CachedFlash

H, K, D = 4, 2, 16


def tiles(
    T: int, slots: int, page: int = 0, is_packed: bool = False, mask: Mask | None = None, itemsize: int = 4,
    head_dim: int = D, **options: Any,
) -> tuple[int, int]:  # fmt: skip
    query = jnp.zeros((1, T, H, head_dim))
    keys = jax.ShapeDtypeStruct((1, slots, K, head_dim), jnp.float32)
    call = FlashCall(OperationMetadata(**options), query, keys, keys, mask)
    return CachedFlash(slots, itemsize, page or 1, is_packed).tiles(call, WIDE)


def test_a_tile_of_few_queries_has_no_row_that_does_not_exist():
    assert tiles(1, 4096) == (1, 512)
    assert tiles(3, 100) == (3, 100)
    assert tiles(1, 4096, block_q=1, block_k=64) == (1, 64)


def test_a_tile_of_few_queries_has_as_many_bytes_of_narrow_numbers():
    for itemsize, keys in ((4, 512), (2, 1024), (1, 2048)):
        assert tiles(1, 32768, itemsize=itemsize, head_dim=512)[1] == keys
        assert tiles(1, 32768, itemsize=itemsize)[1] == 512  # a token's numbers are few
    assert tiles(1, 4096, itemsize=1, head_dim=512)[1] == 1024  # a quarter of a row
    assert tiles(1, 1024, itemsize=1, head_dim=512)[1] == 512


def test_whole_pages_fill_a_tile():
    assert tiles(1, 4096, page=48)[1] == 480
    assert tiles(1, 4096, page=1024)[1] == 1024
    assert tiles(1, 4096, page=16, block_k=40)[1] == 32


def test_tiles_of_packed_rows_divide_a_row():
    for slots, page in ((1000, 0), (1021, 0), (96 * 7, 96), (512, 16)):
        block = tiles(5, slots, page, is_packed=True)[1]
        assert slots % block == 0
        assert not page or block % page == 0


def test_a_tile_of_packed_rows_has_few_queries_since_each_reads_the_keys_of_every_row_that_it_has_queries_of():
    assert tiles(256, 4096, is_packed=True)[0] == 16
    assert tiles(256, 4096)[0] == 256
    assert tiles(5, 4096, is_packed=True)[0] == 5
    assert tiles(256, 4096, is_packed=True, block_q=64)[0] == 64


def test_a_window_has_tiles_of_a_quarter_of_it():
    positions = jnp.zeros((1, 1), jnp.int32)
    window = (SlidingWindow(1023, 0).at(positions) & Causal().at(positions)).bind(1, H, 1, 32768)
    assert tiles(1, 32768, mask=window)[1] == 256
    assert tiles(1, 32768, mask=SlidingWindow(3, 0))[1] == 128
    assert tiles(1, 32768, mask=Causal())[1] == 512
    by_row = SlidingWindow(jnp.array([[5]]), 0)  # not known when tracing
    assert tiles(1, 32768, mask=by_row)[1] == 512


def visited(monkeypatch: pytest.MonkeyPatch, lengths: list[int], mask: Mask, **options: Any) -> list[int]:
    """Tiles that are loaded for each row of a cache of 64 slots and tiles of 8."""
    cache = DenseCache.create(batch=len(lengths), length=64, kv_heads=K, head_dim=D, dtype=jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))
    op = OperationRegistry.create("flash", OperationMetadata(block_k=8, **options))
    found: list[np.ndarray] = []
    schedule = CachedFlash.schedule

    def spy(self: CachedFlash, plan: Any, call: FlashCall) -> Any:
        result = schedule(self, plan, call)
        found.append(np.asarray(result[0].stop - result[0].start))
        return result

    monkeypatch.setattr(CachedFlash, "schedule", spy)
    op(jnp.zeros((len(lengths), 1, H, D)), cache, mask=mask)
    return [int(row.sum()) for row in found[0].reshape(len(lengths), -1)]


@pytest.mark.slow
def test_only_tiles_with_keys_that_are_seen_are_loaded(monkeypatch: pytest.MonkeyPatch):
    assert visited(monkeypatch, [0, 1, 8, 9, 64], Causal()) == [0, 1, 1, 2, 8]


@pytest.mark.slow
def test_a_window_reads_the_tiles_that_it_spans(monkeypatch: pytest.MonkeyPatch):
    assert visited(monkeypatch, [64, 60, 5], SlidingWindow(7, 0)) == [1, 2, 1]


@pytest.mark.parametrize("codec", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_no_temporary_is_as_large_as_the_cache(codec: str | None, pages: bool):
    options: dict[str, Any] = {"kv_heads": K, "head_dim": 64, "codec": codec and Quantized(codec)}
    cache: Cache = DenseCache.create(batch=2, length=8192, **options)
    if pages:
        cache = PagedCache.create(batch=2, pages=512, page_size=32, max_pages=256, **options)
    op = OperationRegistry.create("flash", OperationMetadata())
    run = jax.jit(lambda q, cache: op(q, cache, mask=Causal()).attention_outputs)
    memory = run.lower(jnp.zeros((2, 1, H, 64), jnp.bfloat16), cache).compile().memory_analysis()
    assert memory is not None
    tile = 512 * K * 64 * 4  # of 512 keys in float32
    assert memory.temp_size_in_bytes < 4 * tile + 32 * 2 * 8192  # and integers by slot: positions, ids
    assert memory.temp_size_in_bytes < 2 * 8192 * K * 64 * 2  # the keys in bfloat16
