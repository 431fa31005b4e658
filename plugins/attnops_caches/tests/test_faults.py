"""Calls over caches where a plausible mistake, or a number that is data, gave a wrong result without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Ancestors, Causal
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache
from attnops_caches.pool import PageCopies, PagePool

B, T, H, K, D = 2, 3, 4, 2, 4
OPTIONS: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}


def draw(batch: int, length: int, heads: int = K, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, heads, D)), jnp.float32)


def dense() -> DenseCache:
    return DenseCache.create(length=8, **OPTIONS).append(draw(B, T), draw(B, T, seed=1))


def ring() -> WindowCache:
    return WindowCache.create(window=4, max_append=2, **OPTIONS)


@pytest.fixture(scope="module")
def flash() -> Any:
    return OperationRegistry.create("attnops:flash", OperationMetadata(block_q=8, block_k=8))


def stepped(flash: Any, starts: jax.Array, slots: Any) -> tuple[np.ndarray, np.ndarray, Cache]:
    """A step of packed rows whose slots are traced, unless they are numpy's."""
    tokens = draw(1, 5, H, seed=2), draw(1, 5, seed=3), draw(1, 5, seed=4)

    @jax.jit
    def step(cache: Cache, starts: Any, traced: Any) -> Any:
        rows = Rows(starts, slots if isinstance(slots, np.ndarray) else traced)
        return flash.step(*tokens, cache, rows=rows, mask=Causal(), return_lse=True)

    out, cache = step(dense(), starts, slots)
    return np.asarray(out.attention_outputs), np.asarray(out.logsumexp), cache


@pytest.mark.slow
def test_of_two_traced_runs_of_a_row_the_first_is_computed_and_the_second_is_padding(flash: Any) -> None:
    wanted, wanted_lse, _ = stepped(flash, jnp.array([0, 2]), jnp.array([0]))
    out, lse, cache = stepped(flash, jnp.array([0, 2, 5]), jnp.array([0, 0]))
    np.testing.assert_allclose(out[:, :2], wanted[:, :2], rtol=1e-6)
    np.testing.assert_allclose(lse[..., :2], wanted_lse[..., :2], rtol=1e-6)
    assert not out[:, 2:].any()
    assert (lse[..., 2:] == -np.inf).all()
    assert cache.lengths.tolist() == [T + 2, T]
    assert cache.overflowed.tolist() == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("other", [0, -1, 7])
def test_where_runs_are_traced_those_that_are_empty_may_have_any_known_slot(flash: Any, other: int) -> None:
    *wanted, cache = stepped(flash, jnp.array([0, 2, 5]), jnp.array([0, 1]))
    *found, same = stepped(flash, jnp.array([0, 2, 5, 5]), np.array([0, 1, other]))
    for x, y in zip([*found, *jax.tree.leaves(same)], [*wanted, *jax.tree.leaves(cache)], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_traced_starts_beyond_the_queries_are_the_queries_there_are(flash: Any) -> None:
    wanted, wanted_lse, _ = stepped(flash, jnp.array([0, 2, 5]), jnp.array([0, 1]))
    out, lse, _ = stepped(flash, jnp.array([0, 2, 9]), jnp.array([0, 1]))
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)


@pytest.mark.slow
def test_traced_integers_that_int32_does_not_hold_do_not_become_others() -> None:
    cache = dense()
    assert cache.truncate(jnp.array([2**32 - 1, 1], jnp.uint32)).lengths.tolist() == [T, 1]
    with jax.enable_x64(True):
        assert cache.truncate(jnp.array([2**32 + 1, 1], jnp.int64)).lengths.tolist() == [T, 1]
        pages = PagedCache.create(pages=4, page_size=2, max_pages=2, **OPTIONS)
        table = pages.with_table(jnp.array([[2**32, 1], [2, -(2**32)]], jnp.int64)).table
        assert ((table >= 0) & (table < 4)).tolist() == [[False, True], [True, False]]
        rows = Rows(jnp.array([0, 2, 5], jnp.int64), jnp.array([0, 2**32], jnp.int64))
        grown = cache.append(draw(1, 5), draw(1, 5), rows=rows)
        assert grown.lengths.tolist() == [T + 2, T]


def test_take_rows_of_traced_rows_that_are_none_gives_empty_rows_that_overflowed() -> None:
    taken = jax.jit(lambda cache, rows: cache.take_rows(rows))(dense(), jnp.array([1, 7, -1]))
    assert taken.lengths.tolist() == [T, 0, 0]
    assert taken.starts.tolist() == [0, 0, 0]
    assert taken.overflowed.tolist() == [False, True, True]
    np.testing.assert_array_equal(taken.read().keys[0], dense().read().keys[1])


@pytest.mark.slow
def test_ancestors_of_drafted_tokens_of_which_the_first_are_left_padding(flash: Any) -> None:
    q, k, v = draw(B, 4, H, seed=2), draw(B, 4, seed=3), draw(B, 4, seed=4)
    cache = DenseCache.create(length=8, starts=[2, 0], **OPTIONS)
    out, _ = jax.jit(lambda *x: flash.step(*x, mask=Ancestors([-1, 0, 1, 1])))(q, k, v, cache)
    # Of row 0, tokens 2 and 3 are siblings: each sees itself only, since their ancestors are padding.
    wanted = np.repeat(v[0, 2:], H // K, axis=1)
    np.testing.assert_allclose(out.attention_outputs[0, 2:], wanted, rtol=1e-5)
    assert not out.attention_outputs[0, :2].any()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "codec"), [("flash", Quantized("int8")), ("vanilla", None)])
def test_a_packed_row_of_values_that_are_not_finite_is_nan_and_no_other_row(name: str, codec: Any) -> None:
    operation = OperationRegistry.create(f"attnops:{name}")
    rows, k, v = Rows([0, 2, 3], [0, 1]), draw(B, T), draw(B, T, seed=1)
    empty = DenseCache.create(length=8, codec=codec, **OPTIONS)
    query = draw(1, T, H)
    attend = jax.jit(
        lambda *tokens: operation(query, empty.append(*tokens), rows=rows, mask=Causal()).attention_outputs
    )
    wanted, out = attend(k, v), attend(k, v.at[0, 1].set(jnp.nan))
    assert np.isnan(out[0, :2]).all()
    np.testing.assert_allclose(out[0, 2], wanted[0, 2], rtol=1e-6)


@pytest.mark.slow
def test_a_donated_cache_leaves_the_table_that_it_was_given() -> None:
    table = jnp.array([[0, 2], [1, 3]], jnp.int32)
    cache = PagedCache.create(pages=4, page_size=2, max_pages=2, **OPTIONS).with_table(table)
    jax.jit(lambda cache: cache.truncate([0, 0]), donate_argnums=0)(cache)
    assert table.tolist() == [[0, 2], [1, 3]]


def test_a_step_with_an_option_that_is_none_of_the_call_is_refused(flash: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"FlashAttention has no option 'lengths'; it has .*'query_lengths', .*did you mean 'query_lengths'",
    ):
        flash.step(draw(B, T, H), draw(B, T), draw(B, T), dense(), lengths=[1, 1])


@pytest.mark.filterwarnings("ignore::attnops.errors.UnsupportedWarning")
@pytest.mark.slow
def test_a_step_of_an_operation_that_names_few_options_takes_those_of_every_call() -> None:
    sdpa = OperationRegistry.create("attnops:sdpa")
    out, _ = sdpa.step(draw(B, T, H), draw(B, T), draw(B, T), dense(), return_lse=True)
    assert out.logsumexp.shape == (B, H, T)


def test_fork_of_a_traced_row_that_is_none_changes_nothing() -> None:
    pages = PagedCache.create(pages=4, page_size=2, max_pages=2, table=[[0, 2], [1, 3]], **OPTIONS)
    pages = pages.append(draw(B, T), draw(B, T), [1, 3])
    none = PageCopies(jnp.array([-1]), jnp.array([-1]))
    forked = pages.fork(jnp.array([5]), jnp.array([0]), pages.table, none)
    assert forked.lengths.tolist() == [1, 3]


LAYERS = DenseCache.create(length=8, layers=2, **OPTIONS)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "step with rows that are none": (
        lambda op: op.step(draw(1, T, H), draw(1, T), draw(1, T), dense(), rows=[0, 1, 3]),
        r"rows is a list, but must be an attnops_caches.Rows",
    ),
    "append with rows that are none": (
        lambda op: ring().append(draw(1, 2), draw(1, 2), rows=([0, 1], [0])),  # type: ignore[arg-type]
        r"rows is a tuple, but must be an attnops_caches.Rows",
    ),
    "step without a cache": (
        lambda op: op.step(draw(B, T, H), draw(B, T), draw(B, T), None),
        r"source is a NoneType, but must be an attnops.Source, such as a cache of attnops-caches: op.step\(query, key",
    ),
    "step with fewer queries than keys": (
        lambda op: op.step(draw(B, 2, H), draw(B, T), draw(B, T), dense()),
        r"query has length 2, but key has length 3: they must be equal",
    ),
    "packed step with more queries than keys": (
        lambda op: op.step(draw(1, 3, H), draw(1, 2), draw(1, 2), dense(), rows=Rows([0, 1, 2], [0, 1])),
        r"query has length 3, but key has length 2: they must be equal",
    ),
    "no runs": (
        lambda op: op(draw(1, T, H), dense(), rows=Rows([0], [])),
        r"Rows has 0 slots, but must have at least 1",
    ),
    "no traced runs": (
        lambda op: dense().append(draw(1, T), draw(1, T), rows=Rows(jnp.array([0]), jnp.zeros(0, jnp.int32))),
        r"Rows has 0 slots, but must have at least 1",
    ),
    "more queries than a ring has tokens for": (
        lambda op: op(draw(B, T, H), ring()),
        r"3 queries of a row are given at once, but the cache was created with max_append=2",
    ),
    "a packed run of more queries than a ring has tokens for": (
        lambda op: op(draw(1, 4, H), ring(), rows=Rows([0, 1, 4], [0, 1])),
        r"3 queries of a row are given at once, but the cache was created with max_append=2",
    ),
    "rows to take that are none": (lambda op: dense().take_rows([0, 7]), r"rows=\[0, 7\] must be rows .* 0 to 1"),
    "rows to take that are no integers": (lambda op: dense().take_rows([0.0, 1.0]), r"rows is float64 \(2,\), but"),
    "a layer that is none": (lambda op: LAYERS.layer(2), r"layer=2 must be from 0 to 1: the cache has 2 layers"),
    "a layer that is none, to be written": (lambda op: LAYERS.pending(T).layer(-1), r"layer=-1 must be from 0 to 1"),
    "a layer that is no integer": (lambda op: LAYERS.layer(0.5), r"layer is float64 \(\), but must be an integer"),
    "a partial softmax": (lambda op: op.partial(draw(B, T, H), dense(), None), r"key is a DenseCache, but a partial"),
    "a scale of 0": (
        lambda op: DenseCache.create(
            length=8, codec=Quantized("int8", "head"), key_scale=[0.0, 1.0], value_scale=[1.0, 1.0], **OPTIONS
        ),
        r"key_scale=\[0.0, 1.0\] must be finite and above 0",
    ),
    "a step over one of several layers": (
        lambda op: op.step(draw(B, T, H), draw(B, T), draw(B, T), LAYERS.layer(0)),
        r"an append, cache.pending\(T\).layer\(layer\), is for all layers together",
    ),
    "a step over all layers": (
        lambda op: op.step(draw(B, T, H), draw(B, T), draw(B, T), LAYERS.pending(T)),
        r"the DenseCache has 2 layers: .* cache.pending\(T\).layer\(layer\)",
    ),
    "a pending step of other tokens": (
        lambda op: op.step(draw(B, 2, H), draw(B, 2), draw(B, 2), dense().pending(T)),
        r"key has length 2, but the append is pending for T=3",
    ),
    "queries of other tokens than a pending append's": (
        lambda op: op(draw(B, 2, H), dense().pending(T)),
        r"query has length 2, but key has length 3: they must be equal",
    ),
    "a codec of no dtype": (lambda op: Quantized("int3"), r"Quantized's dtype='int3' must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_both_values_and_the_rule(flash: Any, name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        function(flash)


@pytest.mark.slow
def test_a_target_that_the_pool_had_no_page_for_never_shows_another_rows_tokens() -> None:
    pool = PagePool.create(pages=4, page_size=4, rows=3, max_pages=2).reserve(np.array([6, 0, 8]))
    options = OPTIONS | {"batch": 3, "pages": 4, "page_size": 4, "max_pages": 2}
    own = np.arange(3, dtype=np.float32)[:, None, None, None] * np.ones(
        (3, 8, K, D), np.float32
    )  # a row's tokens are its number
    cache = PagedCache.create(**options).with_table(pool.table).append(own, own, np.array([6, 0, 8]))
    pool, copies = pool.fork([0], [1])
    assert pool.ok.tolist() == [True, False, True]
    cache = cache.fork([0], [1], pool.table, copies)
    assert cache.lengths.tolist() == [6, 0, 8]
    assert cache.overflowed.tolist() == [False, True, False]
    pool = pool.release(np.array([False, False, True])).reserve(np.array([6, 4, 0]))
    cache = cache.with_table(pool.table)
    assert cache.lengths.tolist() == [6, 0, 0]
    assert not np.asarray(cache.read().held)[1:].any()


@pytest.mark.slow
def test_a_row_has_no_tokens_after_its_last_page() -> None:
    cache = PagedCache.create(**OPTIONS, pages=4, page_size=4, max_pages=2, table=np.array([[0, 1], [2, 3]]))
    cache = cache.append(draw(B, 6), draw(B, 6), np.array([6, 3]))
    fewer = jax.jit(lambda cache, table: cache.with_table(table))(cache, np.array([[0, -1], [2, 3]]))
    for found in (fewer, cache.with_table(np.array([[0, -1], [2, 3]]))):
        assert found.lengths.tolist() == [4, 3]
        assert not found.overflowed.any()
