"""Donated caches are updated in place: their bytes are aliased, and no temporary is as large as a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, KiviCache, PagedCache, Quantized, WindowCache

pytestmark = pytest.mark.optimised  # whether XLA copies a cache is what its optimiser decides

B, H, K, D = 2, 4, 2, 32
STORAGES = ("dense", "ring", "pages")


def create(storage: str, length: int = 24, **options: Any) -> Cache:
    """An empty cache of `length` slots a row, pages of 8."""
    options = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32} | options
    if storage == "ring":
        return WindowCache.create(window=length - 2, max_append=3, **options)
    if storage == "pages":
        pages = length // 8
        table = np.random.default_rng(0).permutation(B * pages).reshape(B, pages)
        return PagedCache.create(pages=B * pages, page_size=8, max_pages=pages, table=table, **options)
    return DenseCache.create(length=length, **options)


def flash(**options: Any) -> Any:
    return OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error", **options))


def tokens(T: int = 3, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(B, T, heads, D)), dtype) for heads in (H, K, K)]


CODECS = {
    "float32": {"dtype": jnp.float32},
    "bfloat16": {"dtype": jnp.bfloat16},
    "int8": {"dtype": jnp.bfloat16, "codec": Quantized("int8")},
    "int4": {"dtype": jnp.bfloat16, "codec": Quantized("int4")},
    "e4m3 by head": {"dtype": jnp.bfloat16, "codec": Quantized("float8_e4m3fn", "head"),
                     "key_scale": np.full(K, 0.01), "value_scale": np.full(K, 0.01)},
}  # fmt: skip


QUICK = {("pages", "bfloat16", 1), ("dense", "int8", 3)}


def check_memory(program: Any, cache: Cache, *arrays: Any) -> None:
    """All of a donated cache is updated in place, and no temporary is as large as one row's keys."""
    memory = jax.jit(program, donate_argnums=0).lower(cache, *arrays).compile().memory_analysis()
    assert memory is not None
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    row = cache.store.key[0].nbytes * (cache.length // cache.store.key.shape[-2])
    assert memory.temp_size_in_bytes < row, f"{memory.temp_size_in_bytes} of temporaries, but a row has {row}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "codec", "T"),
    [
        pytest.param(storage, codec, T, marks=[] if (storage, codec, T) in QUICK else [pytest.mark.slow])
        for storage in STORAGES
        for codec in CODECS
        for T in (1, 3)
    ],
)
@pytest.mark.tier(every=6)
def test_steps_in_a_scan_copy_no_cache(storage: str, codec: str, T: int) -> None:
    op = flash(block_k=32)

    def steps(cache: Cache, query: Any, key: Any, value: Any) -> Any:
        def step(cache: Cache, _: None) -> Any:
            out, cache = op.step(query, key, value, cache, mask=Causal())
            return cache, out.attention_outputs

        return jax.lax.scan(step, cache, None, length=3)

    cache = create(storage, 4096, **CODECS[codec])
    check_memory(steps, cache, *tokens(T, dtype=cache.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 40])
def test_steps_of_a_kivi_cache_copy_no_cache(T: int) -> None:
    """Nor is it read into arrays: a float32 row of keys is larger than all temporaries."""
    op, dtype = flash(block_k=32), jnp.bfloat16
    cache = KiviCache.create(batch=B, length=4096, kv_heads=K, head_dim=D, dtype=dtype)

    def steps(cache: KiviCache, *new: Any) -> Any:
        def step(cache: KiviCache, _: None) -> Any:
            out, cache = op.step(*new, cache, mask=Causal())
            return cache, out.attention_outputs

        return jax.lax.scan(step, cache, None, length=3)

    memory = jax.jit(steps, donate_argnums=0).lower(cache, *tokens(T, dtype=dtype)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < cache.codes.nbytes / B * 8


@pytest.mark.parametrize("storage", ["pages", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "ring"))])
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_steps_in_a_while_loop_copy_no_cache(storage: str) -> None:
    op = flash(block_k=32)

    def steps(cache: Cache, query: Any, key: Any, value: Any) -> Any:
        def step(carry: Any) -> Any:
            cache, query = carry
            out, cache = op.step(query, key, value, cache, mask=Causal())
            return cache, out.attention_outputs

        return jax.lax.while_loop(lambda carry: (carry[0].lengths < 9).all(), step, (cache, query))

    cache = create(storage, 4096, dtype=jnp.bfloat16)
    check_memory(steps, cache, *tokens(1, dtype=cache.dtype))


@pytest.mark.parametrize("storage", ["ring", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "pages"))])
@pytest.mark.slow
def test_an_append_copies_no_cache(storage: str) -> None:
    cache = create(storage, 4096, codec=Quantized("int8"), dtype=jnp.bfloat16)
    check_memory(lambda cache, key, value: cache.append(key, value), cache, *tokens(3, dtype=cache.dtype)[1:])
