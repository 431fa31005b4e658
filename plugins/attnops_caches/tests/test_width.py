"""Tokens whose key and value are joined in one array, with zeros between them, are those of arrays of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_caches import Cache, DenseCache, PagedCache, Quantized, WindowCache

B, K, D, DV, T = 3, 2, 6, 4, 3
RNG = np.random.default_rng(0)
KEY, VALUE = (RNG.standard_normal((B, T, K, d), np.float32) for d in (D, DV))


def contents(make: Any, **options: Any) -> tuple[Cache, list[np.ndarray]]:
    """A cache, and what it reads after appends, rows in another order and a layer."""

    @jax.jit
    def run() -> Any:
        cache = make(batch=B, kv_heads=K, head_dim=D, dtype=jnp.float32, layers=2, **options)
        value = None if "latent" in options else VALUE
        for lengths in (None, [2, 0, 1]):
            cache = cache.pending(T, lengths).layer(1).write(KEY, value).cache.take_rows([2, 0, 0])
        return cache, cache.layer(1).read()

    cache, read = run()
    held = np.asarray(read.held)
    return cache, [np.where(held[..., None, None], x, 0) for x in read[:2]] + [np.asarray(x) for x in read[2:]]


def dense(**options: Any) -> Cache:
    return DenseCache.create(length=8, **options)


def ring(**options: Any) -> Cache:
    return WindowCache.create(window=4, max_append=T, **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (dense, {"value_head_dim": DV, "codec": Quantized("int8")}),
        pytest.param(ring, {"value_head_dim": DV}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_joined_tokens_are_those_of_separate_arrays(make: Any, options: dict[str, Any]) -> None:
    (joined, found), (separate, wanted) = contents(make, **options, width=16), contents(make, **options)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    # What is written has zeros between key and value, and is otherwise what is written to two arrays.
    store, (key, value) = joined.store, (np.asarray(x) for x in (separate.store.key, separate.store.value))
    zeros = np.zeros((*key.shape[:-1], 16 - D - DV), key.dtype)
    np.testing.assert_array_equal(store.key, np.concatenate([key, zeros, value], -1))
    assert (store.value, joined.head_dim, joined.value_head_dim) == (None, D, DV)
    assert joined.bytes_per_token - separate.bytes_per_token == K * (16 - D - DV) * key.itemsize


def test_a_width_that_holds_no_token_is_refused() -> None:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 1, "head_dim": D}
    with pytest.raises(ValueError, match="width=9 must be at least 10, the features of key and value together"):
        DenseCache.create(length=8, **sizes, value_head_dim=DV, width=9)
    with pytest.raises(ValueError, match="width=5 must be at least 6, the features of a latent"):
        PagedCache.create(pages=2, page_size=4, max_pages=2, **sizes, latent=4, width=5)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, Quantized("float8_e4m3fn", "tensor")])
def test_arrays_may_hold_narrow_floats_in_place_of_their_bits(codec: Quantized | None) -> None:
    """As an engine's arrays do, which it makes itself."""
    scales = {} if codec is None else {"key_scale": 0.5, "value_scale": 2.0}

    @jax.jit
    def run() -> Any:
        cache = PagedCache.create(
            batch=B, pages=8, page_size=2, max_pages=2, kv_heads=K, head_dim=D, value_head_dim=DV, codec=codec,
            table=[[7, 0], [3, 2], [5, 6]], **scales,
        )  # fmt: skip
        as_floats = jax.lax.bitcast_convert_type(cache.store.key, cache.store.layout.stored_dtype)
        both = [cache, cache.with_blocks({"key": as_floats})]
        key, value = (jnp.asarray(x, cache.dtype) for x in (KEY, VALUE))
        return [(x.store.key, x.read()) for x in (x.append(key, value, lengths=[3, 1, 2]) for x in both)]

    (as_bits, bits), (as_floats, floats) = run()
    assert as_bits.dtype != as_floats.dtype
    for wanted, found in zip(bits, floats, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
