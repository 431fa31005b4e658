"""Tokens that don't fit set `overflowed` and change nothing else; positions and offsets near what int32 holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_mutants import Mutant

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache
from attnops_testing import oracle

B, K, D = 2, 1, 4
OPTIONS: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
FLASH: Any = OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error"))


def tokens(T: int, seed: int = 0, batch: int = B, heads: int = K) -> Any:
    return np.random.default_rng(seed).normal(size=(batch, T, heads, D)).astype(np.float32)


def dense(length: int = 6, **options: Any) -> DenseCache:
    return DenseCache.create(length=length, **OPTIONS | options)


def paged(table: Any = ((0, 1, 2), (3, 4, -1)), **options: Any) -> PagedCache:
    return PagedCache.create(pages=6, page_size=2, max_pages=3, table=jnp.array(table), **OPTIONS | options)


append = jax.jit(lambda cache, *arrays: cache.append(*arrays))
append_rows = jax.jit(lambda cache, key, value, rows: cache.append(key, value, rows=rows))


def same_but(found: Cache, wanted: Cache, *names: str) -> bool:
    """Whether all leaves but these are equal."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        if not np.array_equal(a, b) and jax.tree_util.keystr(path) not in names:
            return False
    return True


@pytest.mark.parametrize("codec", [None, Quantized("int8")], ids=str)
@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.slow
def test_a_full_row_drops_all_and_changes_nothing_else(make: Any, codec: Quantized | None) -> None:
    cache = append(make(codec=codec), tokens(6, 1), tokens(6, 2), np.array([6, 4]))
    if make is dense:
        cache = append(cache, tokens(2, 1), tokens(2, 2), np.array([0, 2]))
    assert not cache.overflowed.any()
    more = append(cache, tokens(2, 3), tokens(2, 4), np.array([2, 1]))
    assert more.overflowed.tolist() == [True, True]
    assert same_but(more, cache, ".overflowed")


@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.slow
def test_the_first_tokens_that_fit_are_kept(make: Any) -> None:
    cache = append(make(), tokens(5, 1), tokens(5, 2), np.array([5, 3]))
    more = append(cache, tokens(4, 3), tokens(4, 4), np.array([4, 1]))
    assert more.lengths.tolist() == [6, 4]
    assert more.overflowed.tolist() == [True, False]
    np.testing.assert_array_equal(more.read().keys[0, 5], tokens(4, 3)[0, 0])
    np.testing.assert_array_equal(more.read().keys[:, :3], cache.read().keys[:, :3])


@pytest.mark.slow
def test_a_page_that_is_missing_in_the_middle_ends_what_fits() -> None:
    """What comes after it must not be stored as if it came before."""
    cache = append(paged(((0, -1, 2), (3, 9, 5))), tokens(6, 1), tokens(6, 2), np.array([6, 6]))
    assert cache.lengths.tolist() == [2, 2]
    assert cache.overflowed.all()
    assert not np.asarray(cache.store.key)[[1, 2, 4, 5]].any()


@pytest.mark.slow
def test_overflow_is_kept_until_the_row_is_reset() -> None:
    cache = append(dense(2), tokens(3), tokens(3), np.array([3, 1])).truncate([0, 0])
    assert cache.overflowed.tolist() == [True, False]
    assert append(cache, tokens(1), tokens(1), np.array([1, 1])).overflowed.tolist() == [True, False]
    assert cache.reset(np.array([True, False])).overflowed.tolist() == [False, False]


def test_two_runs_of_one_row_are_not_appended_twice() -> None:
    rows = Rows(np.array([0, 1, 3]), np.array([1, 1]))
    cache = append_rows(dense(), tokens(3, 1, 1), tokens(3, 2, 1), rows)
    assert cache.lengths.tolist() == [0, 1]
    assert cache.overflowed.tolist() == [False, True]


def test_runs_of_rows_that_the_cache_has_not_change_nothing() -> None:
    cache = append(dense(), tokens(3), tokens(3), np.array([2, 1]))
    rows = Rows(np.array([0, 1, 3]), np.array([-1, 2]))
    assert same_but(append_rows(cache, tokens(3, 1, 1), tokens(3, 2, 1), rows), cache)


def test_a_traced_run_beyond_max_append_of_a_ring_loses_its_end() -> None:
    cache = WindowCache.create(window=3, max_append=2, **OPTIONS)
    cache = append_rows(cache, tokens(5, 1, 1), tokens(5, 2, 1), Rows(np.array([0, 4, 5]), np.array([0, 1])))
    assert cache.lengths.tolist() == [2, 1]
    assert cache.overflowed.tolist() == [True, False]


def test_a_ring_refuses_a_prompt() -> None:
    cache = WindowCache.create(window=3, max_append=2, **OPTIONS)
    with pytest.raises(ValueError, match="3 tokens are appended at once, but the cache was created with max_append=2"):
        cache.append(tokens(3), tokens(3))


@pytest.mark.slow
def test_a_ring_that_lost_what_the_next_query_sees_says_so() -> None:
    cache = WindowCache.create(window=3, max_append=2, **OPTIONS)
    for i in range(4):
        cache = append(cache, tokens(2, i), tokens(2, i), None)
    assert cache.truncate([6, 7]).overflowed.tolist() == [False, False]
    assert cache.truncate([5, 3]).overflowed.tolist() == [True, True]
    emptied = cache.truncate([0, 8])
    assert emptied.overflowed.tolist() == [False, False]
    again = append(emptied, tokens(2, 9), tokens(2, 9), np.array([2, 0]))
    np.testing.assert_array_equal(again.read().held[0].nonzero()[0], [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("first", [32_766, 2**31 - 5])
def test_a_ring_at_large_positions(first: int) -> None:
    """Positions that int16 does not hold, and the last ones that int32 does."""
    cache = WindowCache.create(window=3, max_append=2, **OPTIONS)
    cache = dataclasses.replace(cache, lengths=jnp.full(B, first), written=jnp.full(B, first),
                                starts=jnp.full(B, first))  # fmt: skip
    # Its earlier tokens are left padding, so that the next ones are the first.
    key, value, query = tokens(4, 1), tokens(4, 2), tokens(4, 3, heads=2)
    outs = []
    for at in (slice(0, 2), slice(2, 4)):
        out, cache = FLASH.step(query[:, at], key[:, at], value[:, at], cache, mask=Causal())
        outs.append(out.attention_outputs)
    i, j = np.arange(4)[:, None], np.arange(4)
    wanted = oracle.attention(query, key, value, mask=((j <= i) & (j > i - 3))[None, None]).out
    np.testing.assert_allclose(np.concatenate(outs, 1), wanted, atol=1e-5)
    assert cache.lengths.tolist() == [first + 4] * B
    assert not cache.overflowed.any()


def test_a_ring_is_full_at_the_last_index_of_int32() -> None:
    cache = WindowCache.create(window=3, max_append=2, **OPTIONS)
    cache = dataclasses.replace(cache, lengths=jnp.full(B, 2**31 - 2), written=jnp.full(B, 2**31 - 2))
    cache = append(cache, tokens(2), tokens(2), None)
    assert cache.lengths.tolist() == [2**31 - 1] * B
    assert cache.overflowed.all()


@pytest.mark.parametrize("make", [
    lambda: DenseCache.create(length=40_000, **OPTIONS | {"batch": 1}),
    lambda: PagedCache.create(pages=40, page_size=1000, max_pages=40, table=np.arange(40)[::-1][None].copy(),
                              **OPTIONS | {"batch": 1}),
], ids=["dense", "paged"])  # fmt: skip
@pytest.mark.slow
def test_positions_beyond_int16(make: Any) -> None:
    """The window of a query at 35,000 has what was appended last."""
    from attnops.masks import SlidingWindow

    cache = dataclasses.replace(make(), lengths=jnp.array([35_000 - 4]))
    key, value, query = tokens(4, 1, 1), tokens(4, 2, 1), tokens(4, 3, 1, heads=2)
    out, cache = jax.jit(lambda *x: FLASH.step(*x, mask=SlidingWindow(1, 0)))(query, key, value, cache)
    i, j = np.arange(5)[:, None], np.arange(5)
    key, value, query = (np.concatenate([x[:, :1] * 0, x], 1) for x in (key, value, query))  # the token before is 0
    wanted = oracle.attention(query, key, value, mask=((j <= i) & (j >= i - 1))[None, None]).out[:, 1:]
    np.testing.assert_allclose(out.attention_outputs, wanted, atol=1e-5)
    assert cache.lengths.tolist() == [35_000]


@pytest.mark.slow
def test_offsets_beyond_int32() -> None:
    """Blocks are indexed, not bytes or elements: the last page of 2³³ elements is found. Nothing is allocated."""
    pages, page = 2**20, 128

    def place(table: Any, lengths: Any) -> Any:
        shapes = jax.eval_shape(
            lambda: PagedCache.create(pages=pages, page_size=page, max_pages=4, **OPTIONS | {"kv_heads": 8,
                                                                                            "head_dim": 8})
        )  # fmt: skip
        cache = dataclasses.replace(shapes, table=table, lengths=lengths)
        return cache.place(2, jnp.array([2, 2]), jnp.arange(B))[0]

    assert pages * page * 8 * 8 == 2**33
    table = jnp.array([[0, pages - 1, pages - 2, -1], [1, 2, 3, pages - 3]])
    pieces = jax.jit(place)(table, jnp.array([2 * page - 1, 3 * page]))
    wrote = pieces.size > 0
    assert pieces.block[wrote].tolist() == [pages - 1, pages - 2, pages - 3]
    assert pieces.slot[wrote].tolist() == [page - 1, 0, 0]


DENSE = "dense:DenseCache."
MISTAKES = {
    "positions are int16": (
        Mutant("base:Cache.query_positions", ", position, -1)",
               ", position.astype(jnp.int16).astype(jnp.int32), -1)", ""),
        lambda: test_positions_beyond_int16(lambda: DenseCache.create(length=40_000, **OPTIONS | {"batch": 1})),
    ),
    "what does not fit overwrites the last slots": (
        Mutant(DENSE + "place", "jnp.clip((self.whole_block or self.length) - lengths, 0, count)", "count", ""),
        lambda: test_a_full_row_drops_all_and_changes_nothing_else(dense, None),
    ),
    "overflow is not told": (
        Mutant("base:Cache.grown", "self.overflowed | (fit < wanted)", "self.overflowed", ""),
        lambda: test_the_first_tokens_that_fit_are_kept(dense),
    ),
    "pages after one that is missing are written": (
        Mutant("paged:PagedCache.place", "jnp.where(exists, LARGEST, number * p)",
               "jnp.where(exists | (number < 2), LARGEST, number * p)", ""),
        test_a_page_that_is_missing_in_the_middle_ends_what_fits,
    ),
    "a page is found by the 32-bit index of its first element": (
        Mutant("paged:PagedCache.place", "jnp.clip(page, 0, self.pages - 1)",
               "page * (p * 64) // (p * 64)", ""),
        test_offsets_beyond_int32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.tier(quick=["pages after one that is missing are written"])
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    mutant, test = MISTAKES[name]
    programs: list[Any] = [append, append_rows]
    mutant.apply(monkeypatch)
    for program in programs:
        program.clear_cache()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
    for program in programs:
        program.clear_cache()


@pytest.mark.slow
def test_lengths_may_be_a_list_of_traced_numbers() -> None:
    cache = DenseCache.create(batch=2, length=16, kv_heads=1, head_dim=8, dtype=jnp.float32)
    tokens = jnp.ones((2, 4, 1, 8))
    appended = jax.jit(lambda cache, lengths: cache.append(tokens, tokens, lengths=lengths).lengths)
    assert appended(cache, [4, 2]).tolist() == [4, 2]
    with pytest.raises(ValueError, match=r"lengths=\[5, 2\] must be from 0 to T=4"):
        cache.append(tokens, tokens, lengths=[5, 2])
