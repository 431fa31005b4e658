"""What the kernel over caches transfers, counted in Pallas's interpreter, and that mistakes of it are caught."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, Segments, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Rows
from attnops_caches.bits import to_bits
from attnops_tpu.caches import attention, tile_sizes
from attnops_tpu.caches.between import Between
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.generations import target
from attnops_tpu.interpreter import detect_races

PAGE, PAGES, K, D = 4, 40, 2, 16


def paged(lengths: list[int], values: Any = 1) -> PagedCache:
    """A cache whose pages hold ones where there are tokens, or the value of each row, and NaN everywhere else."""
    table = np.full((len(lengths), 12), -1, np.int32)
    page = 1
    for b, length in enumerate(lengths):
        for i in range(-(-length // PAGE)):
            table[b, i], page = page, page + 1
    cache = PagedCache.create(batch=len(lengths), pages=PAGES, page_size=PAGE, max_pages=12, kv_heads=K, head_dim=D,
                              dtype=jnp.float32, table=table)  # fmt: skip
    nan = to_bits(jnp.full(cache.store.key.shape, jnp.nan, jnp.float32))
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, key=nan))
    tokens = jnp.ones((len(lengths), max([*lengths, 1]), K, D)) * jnp.reshape(jnp.asarray(values), (-1, 1, 1, 1))
    return cache.append(tokens, tokens, np.array(lengths, np.int32))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How many transfers of units and of pieces of the table are started."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    counts: collections.Counter[str] = collections.Counter()
    start = interpret_pallas_call.dma_start

    def spy(token: Any, device: Any, core: Any, space: Any, source: Any, transforms: Any, to: Any, *rest: Any,
            **options: Any) -> Any:  # fmt: skip
        counts[str(int(to))] += 1
        return start(token, device, core, space, source, transforms, to, *rest, **options)

    monkeypatch.setattr(interpret_pallas_call, "dma_start", spy)
    return counts


def run(cache: Cache, mask: Mask, T: int = 1, heads: int = 4, block_k: int = 16) -> jax.Array:
    operation = OperationRegistry.create(
        "attnops-tpu:flash", OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=block_k)
    )
    program = jax.jit(lambda query, cache: operation(query, cache, mask=mask).attention_outputs)
    return jax.block_until_ready(program(jnp.ones((cache.batch, T, heads, D)), cache))


def count(started: collections.Counter[str], lengths: list[int], mask: Mask, **options: int) -> list[int]:
    """Transfers started by each kind of memory that they go to, in order."""
    started.clear()
    out = run(paged(lengths), mask, **options)
    # Queries of rows with tokens give ones: nothing that was not written takes part.
    np.testing.assert_allclose(out[:, 0, 0, 0], [float(n > 0) for n in lengths], rtol=1e-6)
    return sorted(started.values())


def expected(pages: list[int], by_key: int = 0) -> list[int]:
    """A piece of the table for each row that has pages; each page, and values by key of tiles."""
    return sorted(n for n in (sum(n > 0 for n in pages), sum(pages) + by_key) if n)


@pytest.mark.slow
def test_each_page_that_is_seen_is_transferred_once(started: collections.Counter[str]) -> None:
    assert count(started, [33, 1, 16], Causal()) == expected([9, 1, 4])


@pytest.mark.slow
def test_a_row_of_length_0_starts_no_transfer(started: collections.Counter[str]) -> None:
    assert count(started, [0, 5, 0], Causal()) == expected([0, 2, 0])


@pytest.mark.slow
def test_packed_rows_transfer_their_pages_with_each_tile_of_queries(started: collections.Counter[str]) -> None:
    cache = paged([33, 9, 16, 40])
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=16, block_q=8)
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    # Of the first row one query, none of the second, of the last twelve in two tiles, of which one sees 36 keys.
    rows = Rows(np.array([1, 2, 3, 15]), np.array([0, 2, 3]))
    run = jax.jit(lambda query, cache: operation(query, cache, mask=Causal(), rows=rows).attention_outputs)
    out = jax.block_until_ready(run(jnp.ones((1, 16, 4, D)), cache))
    np.testing.assert_allclose(out[0, :, 0, 0], [0.0, *[1.0] * 14, 0.0], rtol=1e-6)
    assert sorted(started.values()) == [4, 4 * 2, 9 + 4 + 9 + 10]  # outputs of each tile and kv head


@pytest.mark.slow
def test_no_tokens_start_no_transfer(started: collections.Counter[str]) -> None:
    assert count(started, [0, 0, 0], Causal()) == []


@pytest.mark.slow
def test_a_window_transfers_the_pages_that_it_spans(started: collections.Counter[str]) -> None:
    # Positions 27 to 32 lie in pages 6 to 8, in two tiles.
    assert count(started, [33], SlidingWindow(5, 0)) == expected([3])


@pytest.mark.slow
def test_segments_are_transferred_with_the_tiles_that_they_mask(started: collections.Counter[str]) -> None:
    ids = Segments(np.zeros((1, 1), int), np.repeat([[1, 0]], [8, 40], axis=1))
    # Tokens 8 to 32 in pages 2 to 8; of three tiles of four pages one is FULL.
    assert count(started, [33], ids) == expected([7], 2)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 128])
@pytest.mark.tier(every=2)
def test_starts_between_and_after_reads_are_as_many(
    heads: int, started: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few heads between, of many after."""
    spread = []
    original = Between.go_on
    monkeypatch.setattr(Between, "go_on", lambda self: (spread.append(len(self._starts)), original(self))[1])
    with target("v6e"), detect_races():
        # Tiles have 8 pages; while the first, which is FULL, is computed, that of the other row is asked for.
        assert count(started, [48, 33], Causal(), heads=heads, block_k=32) == expected([12, 9])
    assert (max(spread) > 0) == (heads == 4)


@pytest.mark.slow
def test_pieces_of_one_tile_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles with as many pages as a piece of the table has entries, at addresses that are known."""
    slots = set()
    original = Stream._starter
    monkeypatch.setattr(Stream, "_starter", lambda self, *given: (slots.add(given[2:]), original(self, *given))[1])
    monkeypatch.setattr(tile_sizes, "PIECE", 8)
    rows = np.array([1.0, 2.0, 3.0, 4.0])
    with target("tpu7x"), detect_races():
        # While the one tile of a row is computed, that of the row after the next is asked for.
        out = run(paged([32] * 4, rows), Causal(), block_k=32)
    np.testing.assert_allclose(out[:, 0, 0, 0], rows, rtol=1e-6)
    assert slots >= {(0,), (1,)}


@pytest.mark.slow
def test_a_unit_too_many_is_counted(started: collections.Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = attention.schedule

    def one_too_far(*given: Any) -> Any:
        made = schedule(*given)
        return made._replace(stop=jnp.where(made.stop > made.first, made.stop + 1, made.stop))

    monkeypatch.setattr(attention, "schedule", one_too_far)
    assert count(started, [5], Causal()) == expected([3]) != expected([2])


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "length"), [("_wait_whole", 40), ("_each_unit", 5)])
@pytest.mark.tier(every=2)
def test_a_missing_wait_is_caught(wait: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Stream, wait)

    def without(self: Stream, *given: Any, **options: Any) -> None:
        if options.get("start"):
            original(self, *given, **options)

    monkeypatch.setattr(Stream, wait, without)
    with pytest.raises((RuntimeError, AssertionError), match=r"RACE|data race|Not equal"), detect_races():
        np.testing.assert_allclose(run(paged([length]), Causal())[:, 0, 0, 0], [1.0], rtol=1e-6)


@pytest.mark.slow
def test_rows_without_pages_are_transferred_in_whole_tiles(started: collections.Counter[str]) -> None:
    cache = DenseCache.create(batch=2, length=48, kv_heads=K, head_dim=D, dtype=jnp.float32)
    tokens = jnp.ones((2, 40, K, D))
    cache = cache.append(tokens, tokens)
    np.testing.assert_allclose(run(cache, Causal()), 1.0, rtol=1e-6)
    # Two whole tiles, keys and values; or by units of 16, of which the last tile has one.
    assert sum(started.values()) == 2 * (2 * 3)
