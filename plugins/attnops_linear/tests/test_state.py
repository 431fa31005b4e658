"""Steps over a StateCache are the call over all tokens."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_linear import CausalConv1d, LinearAttention, StateCache
from attnops_linear.testing import problem

B, T, K, H, D, Dv = 3, 11, 1, 2, 4, 6
LINEAR, CONV = LinearAttention(), CausalConv1d()


def arrays() -> dict[str, np.ndarray]:
    (query, key, value), options = problem(T, B=B, K=K, H=H, D=D, Dv=Dv, state=False)(np.random.default_rng(0))
    found = {"query": query, "key": key, "value": value, **options}
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def test_steps_of_any_lengths_are_one_call() -> None:
    given = arrays()
    whole = jax.jit(lambda x: LINEAR(**x, return_state=True))(given)
    cache = StateCache.create(batch=B, heads=H, head_dim=D, value_head_dim=Dv)
    # Rows step by other numbers of tokens; what lies behind them is not read.
    done = np.zeros(B, int)
    outputs = np.zeros(whole.attention_outputs.shape)
    step = jax.jit(lambda cache, lengths, x: LINEAR.step(**x, cache=cache, query_lengths=lengths), donate_argnums=0)
    for lengths in ([4, 0, 1], [1, 4, 3], [4, 4, 4], [2, 3, 3]):
        index = done[:, None] + np.arange(4)
        chunk = {name: np.array(x)[np.arange(B)[:, None], np.minimum(index, T - 1)] for name, x in given.items()}
        for x in chunk.values():
            x[np.arange(4) >= np.array(lengths)[:, None]] = np.nan
        output, cache = step(cache, jnp.asarray(lengths), chunk)
        for b, n in enumerate(lengths):
            outputs[b, done[b] : done[b] + n] = np.asarray(output.attention_outputs)[b, :n]
        done += lengths
    np.testing.assert_array_equal(cache.lengths, [T] * B)
    np.testing.assert_allclose(outputs, whole.attention_outputs, atol=1e-5)
    np.testing.assert_allclose(cache.state, whole.state, atol=1e-5)


def test_a_convolution_by_steps_is_one_call() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.normal(size=s).astype(np.float32) for s in ((2, 9, 3), (3, 4), (3,)))
    expected = np.zeros((2, 9, 3))
    for t in range(9):
        for i in range(4):
            if t - 3 + i >= 0:
                expected[:, t] += weight[:, i] * x[:, t - 3 + i]
    expected += bias
    np.testing.assert_allclose(jax.jit(CONV)(x, weight, bias=bias).outputs, expected, atol=1e-5)
    cache = StateCache.create(batch=2, heads=1, head_dim=1, conv=(3, 4))
    done = np.zeros(2, int)
    step = jax.jit(lambda cache, x, lengths: CONV.step(x, weight, cache, query_lengths=lengths, bias=bias))
    for lengths in ([2, 0], [1, 2], [2, 1], [0, 2], [2, 2], [2, 2]):
        index = np.minimum(done[:, None] + np.arange(2), 8)
        output, cache = step(cache, x[np.arange(2)[:, None], index], np.array(lengths))
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(np.asarray(output.outputs)[b, :n], expected[b, done[b] : done[b] + n], atol=1e-5)
        done += lengths
    np.testing.assert_array_equal(cache.conv, np.stack([x[0, 6:], x[1, 6:]]))


@pytest.mark.slow
def test_a_convolution_begins_anew_with_each_document() -> None:
    from attnops_linear.testing import documents, padding

    rng = np.random.default_rng(0)
    x, weight, state = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 30, 3), (3, 4), (2, 3, 3)))
    ids, kept = documents(2, 30).q_ids, padding(2, 30).is_token
    found = CONV(x, weight, state=state, mask=documents(2, 30) & padding(2, 30), return_state=True)
    for b in range(2):
        history: list[Any] = list(np.asarray(state)[b])
        before = None
        for t in range(30):
            if not kept[b, t]:
                assert (np.asarray(found.outputs)[b, t] == 0).all()
                continue
            if before is not None and ids[b, t] != before:
                history = [np.zeros(3)] * 3
            before = ids[b, t]
            history.append(np.asarray(x)[b, t])
            expected = sum(np.asarray(weight)[:, i] * history[-4 + i] for i in range(4))
            np.testing.assert_allclose(found.outputs[b, t], expected, atol=1e-5)
        np.testing.assert_allclose(found.state[b], history[-3:], atol=1e-6)  # type: ignore[index]


def test_layers_rows_and_resets() -> None:
    cache = StateCache.create(batch=2, heads=1, head_dim=2, conv=(3, 2), layers=3)
    one = cache.layer(1)
    one = StateCache(one.state + 1, one.conv + 2, jnp.asarray([4, 5], jnp.int32))  # type: ignore[operator]
    cache = jax.jit(lambda cache, i, one: cache.with_layer(i, one))(cache, 1, one)
    assert cache.layers == 3
    np.testing.assert_array_equal(cache.state.sum(axis=(1, 2, 3, 4)), [0, 8, 0])
    np.testing.assert_array_equal(cache.lengths, [[0, 0], [4, 5], [0, 0]])
    marked = cache.layer(1).advanced(one.state * jnp.asarray([1, 10])[:, None, None, None], jnp.zeros(2, jnp.int32))
    taken = marked.take_rows([1, 1, 0])
    np.testing.assert_array_equal(taken.state[:, 0, 0, 0], [10, 10, 1])
    np.testing.assert_array_equal(taken.lengths, [5, 5, 4])
    emptied = cache.reset(np.array([True, False]))
    np.testing.assert_array_equal(emptied.lengths, [[0, 0], [0, 5], [0, 0]])
    np.testing.assert_array_equal(emptied.layer(1).state[:, 0, 0, 0], [0, 1])
    np.testing.assert_array_equal(emptied.layer(1).conv[:, 0, 0], [0, 2])  # type: ignore[index]


def test_what_a_cache_has_not_is_refused() -> None:
    given = arrays()
    cache = StateCache.create(batch=B, heads=H, head_dim=D, value_head_dim=Dv, layers=2)
    with pytest.raises(
        ValueError, match=re.escape("the cache has 2 layers, but a call takes one: step with cache.laye")
    ):
        LINEAR.step(**given, cache=cache)  # type: ignore[arg-type]
    one = cache.layer(0)
    with pytest.raises(ValueError, match="the cache has one layer"):
        one.layer(0)
    with pytest.raises(ValueError, match=re.escape("query_lengths=[12, 0, 0] must be from 0 to T=11")):
        LINEAR.step(**given, cache=one, query_lengths=[12, 0, 0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="initial_state is given, but step takes the state from the cache"):
        LINEAR.step(**given, cache=one, initial_state=one.state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the cache has no convolution"):
        CONV.step(jnp.ones((B, 1, 3)), jnp.ones((3, 4)), one)
    with pytest.raises(ValueError, match="dtype=float16, but states must be float32 or bfloat16"):
        StateCache.create(batch=1, heads=1, head_dim=1, dtype=jnp.float16)
    with pytest.raises(ValueError, match="cache is a NoneType, but must be a StateCache"):
        LINEAR.step(**given, cache=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("query has shape (11,), but must have 4 dimensions")):
        LINEAR.step(given["query"][0, :, 0, 0], *(given[x] for x in ("key", "value")), one)
    with pytest.raises(ValueError, match=re.escape("query_lengths=[4294967296, 0, 0] must be from 0 to T=11")):
        LINEAR.step(**given, cache=one, query_lengths=np.array([2**32, 0, 0]))  # type: ignore[arg-type]
    for rows in ([3], [-1]):
        with pytest.raises(ValueError, match=re.escape(f"rows={rows} must be rows of the cache, 0 to 2")):
            cache.take_rows(rows)
    for layer in (2, np.int64(2), jnp.int32(2)):
        with pytest.raises(ValueError, match="layer=2 must be from 0 to 1"):
            cache.layer(layer)
    with pytest.raises(ValueError, match="layer=True must be an integer"):
        cache.layer(True)
    smaller = StateCache.create(batch=1, heads=H, head_dim=D, value_head_dim=Dv)
    with pytest.raises(ValueError, match=re.escape("the layer's arrays have shapes [(1, 2, 4, 6), (1,)], but must")):
        cache.with_layer(0, smaller)
    with pytest.raises(ValueError, match=re.escape("conv=(1, 2, 3) must be a tuple (channels, width)")):
        StateCache.create(batch=1, heads=1, head_dim=1, conv=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="conv_dtype=int32 must be a dtype of floating-point numbers"):
        StateCache.create(batch=1, heads=1, head_dim=1, conv=(3, 2), conv_dtype=jnp.int32)


def test_each_layer_counts_its_tokens() -> None:
    given = {name: x[:, :1] for name, x in arrays().items()}
    cache = StateCache.create(batch=B, heads=H, head_dim=D, value_head_dim=Dv, layers=2)

    @jax.jit
    def step(cache: StateCache) -> StateCache:
        for layer in range(2):
            _, one = LINEAR.step(**given, cache=cache.layer(layer))  # type: ignore[arg-type]
            cache = cache.with_layer(layer, one)
        return cache

    cache = step(cache)
    np.testing.assert_array_equal(cache.lengths, [[1] * B] * 2)
    # A traced index that is no row gives an empty one.
    taken = jax.jit(lambda cache, rows: cache.take_rows(rows))(cache, np.array([0, 7, -1]))
    np.testing.assert_array_equal(taken.lengths, [[1, 0, 0]] * 2)
    assert not np.asarray(taken.state)[:, 1:].any()


@pytest.mark.slow
def test_rows_move_to_another_cache() -> None:
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 3, "conv": (4, 3), "layers": 2}
    source, target = StateCache.create(batch=3, **sizes), StateCache.create(batch=4, **sizes)
    source, target = (
        jax.tree.map(lambda x, i=i: (jnp.arange(x.size) + 1000 * i).reshape(x.shape).astype(x.dtype), cache)
        for i, cache in enumerate((source, target))
    )
    taken = source.take_rows([2, 0])
    moved = jax.jit(StateCache.put, donate_argnums=0)(jax.tree.map(jnp.copy, target), jnp.array([1, 3]), taken)
    for new, old, given in zip(*(jax.tree.leaves(x) for x in (moved, target, source)), strict=True):
        np.testing.assert_array_equal(new[:, [1, 3]], given[:, [2, 0]])
        np.testing.assert_array_equal(new[:, [0, 2]], old[:, [0, 2]])
    nothing = target.put([-1, 2], taken)
    np.testing.assert_array_equal(nothing.lengths[:, [0, 1, 3]], target.lengths[:, [0, 1, 3]])
    with pytest.raises(ValueError, match="a row twice"):
        target.put([1, 1], taken)
    with pytest.raises(ValueError, match=r"must be integers \[n\]"):
        target.put([1], taken)
    with pytest.raises(ValueError, match="without the axis of rows"):
        StateCache.create(batch=4, **sizes | {"head_dim": 4}).put([0, 1], taken)
