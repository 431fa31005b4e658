"""`Quantized` against its definition in numpy: ties, clipping, zeros, extremes, and the bound of its error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_caches import DenseCache, Quantized
from attnops_testing.cache_codec import Codec

DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# Half a step, relative to a normal number's magnitude, and of numbers below the least normal one in units of the scale.
BOUNDS = {"int8": (0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}


def encode(x: Any, dtype: str, scale: Any) -> Any:
    """Of tokens [K, n, d] by head, as float64."""
    stored, scale = jax.jit(Quantized(dtype, "head").encode)(jnp.asarray(x, jnp.float32), jnp.asarray(scale))
    return np.asarray(stored).astype(np.float64)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_exceeds_the_scale_is_clipped_and_finite(dtype: str) -> None:
    codec = Codec(dtype, "head")
    x = np.array([1.0, 1.1, 100.0, 3e38, -3e38]) * codec.largest
    x = np.clip(x, -3e38, 3e38)
    np.testing.assert_array_equal(
        encode(x[None, None], dtype, np.ones(1, np.float32))[0, 0], [codec.largest] * 4 + [-codec.largest]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_0_with_given_scales_and_nan_with_those_by_token(dtype: str) -> None:
    x = jnp.asarray([[[1.0, jnp.nan, 2.0]]])
    for scales, scale, expected in (("head", jnp.ones(1), [1, 0, 2]), ("token_head", None, [jnp.nan] * 3)):
        codec = Quantized(dtype, scales)
        np.testing.assert_array_equal(codec.decode(*codec.encode(x, scale))[0, 0], expected)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_within_its_bound(dtype: str, magnitude: float) -> None:
    codec = Quantized(dtype)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 16)).astype(np.float32) * np.float32(magnitude)
    x[0, 0, 0] = 0
    stored, scale = jax.jit(lambda x: codec.encode(x, None))(x)
    found = np.asarray(codec.decode(stored, scale), np.float64)
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
