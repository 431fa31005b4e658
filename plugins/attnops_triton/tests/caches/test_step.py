"""A step whose kernel writes the new tokens, held to `append` and the core's `flash`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, WindowCache, step_reasons
from attnops_triton.caches.reader import TritonCacheReader
from attnops_triton.caches.tile_sizes import splits

PAGE, K = 16, 2
SIZES = {"batch": 4, "kv_heads": K, "head_dim": 16}
METADATA = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_k=32)


def paged(dtype: Any = jnp.float32, **options: Any) -> Cache:
    # Row 1 has no page after its second: of its new tokens some don't fit.
    table = np.array([[1, 2, 3, 4], [5, 6, -1, -1], [-1] * 4, [7, 8, 9, 0]])
    return PagedCache.create(pages=10, page_size=PAGE, max_pages=4, table=jnp.asarray(table), dtype=dtype,
                             **SIZES, **options)  # fmt: skip


def dense(dtype: Any = jnp.float32, **options: Any) -> Cache:
    return DenseCache.create(length=64, dtype=dtype, **SIZES, **options)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def check(cache: Cache, T: int, mask: Mask | None, lengths: list[int], real: list[int] | None = None) -> None:
    if isinstance(cache, PagedCache):
        lengths = [min(n, m) for n, m in zip(lengths, [64, 32, 0, 64], strict=True)]
    bits = jax.random.bits(jax.random.key(0), cache.store.key.shape, jnp.uint8)
    filled = {
        name: (bits[..., : x.shape[-1]] % 64).astype(x.dtype) if x.ndim == 4 else bits[..., 0] / 8192
        for name, x in cache.store._blocks().items()
    }
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **filled), lengths=jnp.asarray(lengths))
    key, value = (normal(i, 4, T, K, 16).astype(cache.dtype) for i in (1, 2))
    query = normal(3, 4, T, 2 * K, 16).astype(cache.dtype)
    given = None if real is None else jnp.asarray(real)

    def step(operation: Any) -> Any:
        program = jax.jit(functools.partial(operation.step, mask=mask, query_lengths=given, return_lse=True))
        return program(query, key, value, cache)

    expected, after = step(OperationRegistry.create("flash", OperationMetadata(platform="cpu")))
    got, written = step(OperationRegistry.create("attnops-triton:flash", METADATA))
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    rounding = (
        {"rtol": 2**-7, "atol": 2**-7} if cache.dtype == jnp.float16 or cache.codec else {"rtol": 1e-4, "atol": 1e-5}
    )
    for name in ("attention_outputs", "logsumexp"):
        a, b = (np.asarray(getattr(x, name), np.float32) for x in (got, expected))
        np.testing.assert_allclose(a, b, **rounding)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens a row of each step that is one kernel, of which every test has some."""
    found: list[int] = []
    stepped = TritonCacheReader.step

    def spy(self: TritonCacheReader, operation: Any, query: jax.Array, *given: Any, **options: Any) -> Any:
        found.append(query.shape[1])
        return stepped(self, operation, query, *given, **options)

    monkeypatch.setattr(TritonCacheReader, "step", spy)
    yield found
    assert found


@pytest.mark.slow
def test_what_is_written_and_attended_to_is_that_of_append() -> None:
    # In one page and in two; of row 1 one token fits, of row 2 none.
    check(paged(), 3, Causal(), [15, 31, 0, 33], [3, 3, 3, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "T", "mask", "lengths"),
    [(paged, 1, SlidingWindow(5, 0), [40, 8, 0, 47]), (paged, 1, Causal(), [16, 31, 0, 64]),
     # New tokens that no query sees.
     (dense, 1, ~Causal(), [31, 8, 0, 15]), (paged, 19, Causal(), [0, 17, 0, 40]), (dense, 25, None, [20, 0, 0, 63])],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)  # fmt: skip
@pytest.mark.tier(every=5)
def test_tokens_that_lie_in_any_way(make: Any, T: int, mask: Mask | None, lengths: list[int]) -> None:
    check(make(), T, mask, lengths)


BY_HEAD: dict[str, Any] = {"codec": Quantized("int8", "head"), "key_scale": [0.1, 0.2], "value_scale": [0.3, 0.4]}
BY_TENSOR: dict[str, Any] = {"codec": Quantized("float8_e4m3fn", "tensor"), "key_scale": 0.1, "value_scale": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "options"),
    [(1, {"codec": Quantized("int8")}), (5, BY_HEAD), (1, BY_TENSOR), (5, {"codec": Quantized("int4")}),
     (5, {"codec": Quantized("float8_e5m2")}), (5, {"dtype": jnp.float16})],
    ids=["int8 by token_head", "int8 by head", "float8_e4m3fn by tensor", "int4", "float8_e5m2", "float16"],
)  # fmt: skip
def test_numbers_of_all_kinds_and_scales(T: int, options: dict[str, Any]) -> None:
    check(paged(**options), T, Causal(), [15, 30, 0, 33])


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["token_head", "tensor"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.tier(every=4)
def test_what_a_kernel_quantises_is_what_append_does(dtype: str, scales: str) -> None:
    given = {} if scales == "token_head" else {"key_scale": 0.1, "value_scale": 2.0}
    cache = dense(codec=Quantized(dtype, scales), **given)
    # Magnitudes from denormal to beyond the largest, ties, zeros, and what is no number.
    size = 2.0 ** jnp.arange(-140, 124, 11)[:, None, None]
    key = (normal(0, 24, K, 16) * size).reshape(4, 6, K, 16)
    tie = jnp.linspace(-63.5, 63.5, 16) * 0.1
    key = key.at[0, 0, 0].set(0).at[1, 0, 0, 3].set(jnp.nan).at[1, 1, 1, 3].set(jnp.inf).at[2, 0, :, :].set(tie)
    operation = OperationRegistry.create("attnops-triton:flash", METADATA)
    program = jax.jit(lambda q, k, v, c: operation.step(q, k, v, c, mask=Causal())[1])
    written, after = program(jnp.ones((4, 6, 4, 16)), key, -key, cache), jax.jit(Cache.append)(cache, key, -key)
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_auto_picks_the_kernel_that_writes(steps: list[int]) -> None:
    cache, token = paged(), jnp.zeros((4, 1, K, 16))
    operation = OperationRegistry.create("auto", METADATA)
    jax.eval_shape(lambda cache: operation.step(token, token, token, cache), cache)
    assert steps == [1]


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_a_layer_of_all_is_written(scales: str) -> None:
    given = np.outer([0.01, 0.02, 0.05], np.arange(1, K + 1)).astype(np.float32)  # another size in each layer
    given = given if scales == "head" else given[:, 0]
    cache = paged(layers=3, codec=Quantized("int8", scales), key_scale=given, value_scale=given * 1.5)
    pending = cache.pending(1).layer(1)
    key, query = normal(0, 4, 1, K, 16), normal(1, 4, 1, 4, 16)

    def step(operation: Any) -> Any:
        return jax.jit(lambda q, k, pending: operation.step(q, k, k, pending, mask=Causal()))(query, key, pending)

    got, written = step(OperationRegistry.create("attnops-triton:flash", METADATA))
    expected, after = step(OperationRegistry.create("flash", OperationMetadata(platform="cpu")))
    np.testing.assert_array_equal(written.cache.store.key, after.cache.store.key)
    assert np.abs(written.cache.store.key[1]).max() > 0
    np.testing.assert_allclose(got.attention_outputs, expected.attention_outputs, atol=1e-5)


@pytest.mark.slow
def test_each_split_writes_the_tokens_that_it_reads() -> None:
    with splits(3):
        check(paged(), 3, Causal(), [15, 30, 0, 33])


def told(cache: Cache, T: int) -> list[str]:
    """Why the kernel does not write the tokens of a step."""
    operation = OperationRegistry.create("attnops-triton:flash", METADATA)
    query = jax.ShapeDtypeStruct((4, T, 2 * K, 16), jnp.float32)
    return [reason.argument for reason in step_reasons(operation, "gpu", operation.request(query, cache))]


def test_what_several_programs_would_write_is_appended_first(steps: list[int]) -> None:
    steps.append(0)  # none is run
    ring = WindowCache.create(window=32, max_append=16, dtype=jnp.float32, **SIZES)
    assert told(paged(), 32) == []
    assert told(paged(), 33) == ["query"]
    assert told(ring, 1) == ["cache"]
