"""`Quantized` against its definition in numpy: ties, clipping, zeros, extremes, and the bound of its error."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Full
from attnops_caches import DenseCache, Quantized
from attnops_testing.cache_codec import Codec

DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")
# Half a step, relative to a normal number's magnitude, and of numbers below the least normal one in units of the scale.
BOUNDS = {"int8": (0, 0.5), "int4": (0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}


def encode(x: Any, dtype: str, scale: Any) -> Any:
    """Of tokens [K, n, d] by head, as float64."""
    return np.asarray(round_trip(dtype, "head")(np.asarray(x, np.float32), scale)[0]).astype(np.float64)


@functools.cache
def round_trip(dtype: str, scales: str) -> Any:
    """Numbers that are stored, their scales, and what is read; one program for each shape."""
    codec = Quantized(dtype, scales)

    def run(x: Any, scale: Any) -> Any:
        stored, scale = codec.encode(x, scale)
        return jnp.concatenate(codec.parts(stored), -1), scale, codec.decode(stored, scale)

    return jax.jit(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tie_goes_to_the_even_number(dtype: str) -> None:
    codec = Codec(dtype, "head")
    grid = codec.encode(np.linspace(0, codec.largest, 4001), np.asarray(1.0))
    numbers = np.unique(grid)
    middles = (numbers[1:] + numbers[:-1]) / 2
    middles = np.concatenate([middles, -middles]).astype(np.float32)
    found = encode(middles[None, None], dtype, np.ones(1, np.float32))[0, 0]
    np.testing.assert_array_equal(found, codec.encode(middles, np.asarray(1.0)))


def test_halves_of_int8() -> None:
    given = [0.5, 1.5, 2.5, 126.5, 127.5, 200.0, -0.5, -1.5, -127.5, -128.0, -1e9]
    wanted = [0, 2, 2, 126, 127, 127, 0, -2, -127, -127, -127]
    assert encode([[given]], "int8", np.ones(1, np.float32))[0, 0].tolist() == wanted


def test_two_int4_are_one_byte() -> None:
    """The first half of the features is in the lower four bits, the second in the upper; all pairs of numbers."""
    low, high = (x.reshape(-1) for x in np.meshgrid(np.arange(-7, 8), np.arange(-7, 8)))
    x = np.concatenate([low, high]).astype(np.float32)
    codec = Quantized("int4", "tensor")
    stored, _ = jax.jit(codec.encode)(x[None, None], np.ones((), np.float32))
    assert stored.dtype == np.int8
    np.testing.assert_array_equal(np.asarray(stored)[0, 0].view(np.uint8), low % 16 + 16 * (high % 16))
    np.testing.assert_array_equal(np.concatenate(jax.jit(codec.parts)(stored), -1)[0, 0], x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_exceeds_the_scale_is_clipped_and_finite(dtype: str) -> None:
    codec = Codec(dtype, "head")
    x = np.array([1.0, 1.1, 100.0, 3e38, -1.1, -3e38]) * codec.largest
    x = np.clip(x, -3e38, 3e38)
    np.testing.assert_array_equal(
        encode(x[None, None], dtype, np.ones(1, np.float32))[0, 0], [codec.largest] * 4 + [-codec.largest] * 2
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_0_with_given_scales_and_nan_with_those_by_token(dtype: str) -> None:
    x, one = np.array([[[1.0, np.nan, 2.0, -1.0]]], np.float32), np.ones(1, np.float32)
    for scales, scale, expected in (("head", one, [1, 0, 2, -1]), ("token_head", None, [np.nan] * 4)):
        found = np.asarray(round_trip(dtype, scales)(x, scale)[2])
        np.testing.assert_array_equal(found[0, 0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_is_the_largest_number_with_given_scales_and_nan_with_those_by_token(dtype: str) -> None:
    x, largest = np.array([[[1.0, -np.inf]], [[1.0, 2.0]]], np.float32), Codec(dtype, "head").largest
    ones = np.ones(2, np.float32)
    for scales, scale, expected in (("head", ones, [1, -largest]), ("token_head", None, [np.nan] * 2)):
        found = np.asarray(round_trip(dtype, scales)(x, scale)[2])
        np.testing.assert_array_equal(found[0, 0], expected)
        assert np.isfinite(found[1, 0]).all()  # no other head


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_within_its_bound(dtype: str, magnitude: float) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 16)).astype(np.float32) * np.float32(magnitude)
    x[0, 0, 0] = 0
    x[0, 0, 1], x[0, 0, 2, 1:] = magnitude, 0  # all equal; one number
    _, scale, found = (np.asarray(x) for x in round_trip(dtype, "token_head")(x, None))
    found = found.astype(np.float64)
    assert scale.dtype == np.float32
    assert not found[0, 0, 0].any()
    assert np.asarray(scale)[0, 0, 0] == 0
    relative, steps = BOUNDS[dtype]
    spread = np.asarray(scale, np.float64)[..., None]
    allowed = np.maximum(relative * np.abs(np.float64(x)), steps * spread) * (1 + 1e-5) + np.finfo(np.float32).tiny
    # A token whose scale would be below the normal numbers is stored as 0.
    allowed = np.where(spread == 0, np.finfo(np.float32).tiny * Codec(dtype, "head").largest, allowed)
    assert (np.abs(found - x) <= allowed).all()


@pytest.mark.slow
def test_scales_are_data() -> None:
    """One program serves any, and none is a constant of it."""
    traces = 0

    @jax.jit
    def step(cache: DenseCache, key: Any) -> Any:
        nonlocal traces
        traces += 1
        return cache.append(key, key).read().keys

    key = jnp.ones((1, 1, 1, 4))
    for scale in (0.01, 0.02, 0.04):
        cache = DenseCache.create(batch=1, length=2, kv_heads=1, head_dim=4, dtype=jnp.float32,
                                  codec=Quantized("int8", "tensor"), key_scale=scale, value_scale=scale)  # fmt: skip
        assert step(cache, key)[0, 0, 0, 0] == jnp.round(1 / jnp.float32(scale)) * jnp.float32(scale)
    assert traces == 1


@pytest.mark.slow
def test_what_is_stored_is_not_quantised_again() -> None:
    """Appending keeps the bits of all earlier tokens and their scales."""
    cache = DenseCache.create(batch=1, length=8, kv_heads=1, head_dim=4, dtype=jnp.float32, codec=Quantized("int8"))
    append = jax.jit(lambda cache, key: cache.append(key, key))
    rng = np.random.default_rng(0)
    cache = first = append(cache, rng.normal(size=(1, 1, 1, 4)).astype(np.float32))
    for _ in range(5):
        cache = append(cache, 100 * rng.normal(size=(1, 1, 1, 4)).astype(np.float32))
    for name in ("key", "value", "key_scale", "value_scale"):
        np.testing.assert_array_equal(getattr(cache.store, name)[:, :, 0], getattr(first.store, name)[:, :, 0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_int4_holds_the_largest_numbers_of_a_cache(dtype: str) -> None:
    """What is read is finite, and within the bound, also where the greatest number of the dtype is in a token."""
    largest = float(jnp.finfo(dtype).max)
    x = np.random.default_rng(0).uniform(-1, 1, (1, 3, 2, 8)) * largest
    x[0, 0] = largest
    x[0, 1, :, 0] = -largest
    given = jnp.asarray(x, dtype)
    cache = DenseCache.create(batch=1, length=3, kv_heads=2, head_dim=8, dtype=dtype, codec=Quantized("int4"))
    contents = cache.append(given, given[..., ::-1]).read()
    x = np.asarray(given, np.float64)
    bound = np.abs(x).max(-1, keepdims=True) / 14 + np.abs(x) * float(jnp.finfo(dtype).eps)
    for found, wanted in (contents.keys, x), (contents.values, x[..., ::-1]):
        assert np.isfinite(np.asarray(found, np.float64)).all()
        assert (np.abs(np.asarray(found, np.float64) - wanted) <= np.maximum(bound, bound[..., ::-1])).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_the_error_of_attention_is_within_its_bound(dtype: str) -> None:
    """L is the largest number stored: a score changes by e = Σ|q| · scale · max|k| / 2 L at most, a weight by a factor
    of exp(± 2 e), and the output by max|v| / 2 L, and by what the weights' changes make of max|v|.
    """
    rng, L, D = np.random.default_rng(0), Codec(dtype, "head").largest, 16
    query, key, value = (rng.uniform(-1, 1, (1, T, 1, D)).astype(np.float32) for T in (3, 40, 40))
    outputs = []
    for codec in (None, Quantized(dtype)):
        cache = DenseCache.create(batch=1, length=40, kv_heads=1, head_dim=D, dtype=jnp.float32, codec=codec)
        op = OperationRegistry.create("attnops:flash", OperationMetadata())
        outputs.append(np.asarray(op(query, cache.append(key, value), mask=Full()).attention_outputs, np.float64))
    weights = np.exp(np.float64(query)[0, :, 0] @ np.float64(key)[0, :, 0].T / 4)
    plain = weights / weights.sum(-1, keepdims=True) @ np.float64(value)[0, :, 0]
    np.testing.assert_allclose(outputs[0][0, :, 0], plain, atol=1e-5)
    scores = np.abs(query).sum(-1).max() / 4 * np.abs(key).max() / (2 * L)
    bound = np.abs(value).max() * (1 / (2 * L) + np.expm1(2 * scores))
    error = np.abs(outputs[1] - outputs[0]).max()
    assert bound / 100 < error <= bound
