"""Bytes that kernels over caches load, counted in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import PagedCache, Quantized
from attnops_triton.caches.tile_sizes import splits
from attnops_triton.language.interpreter import loads

PAGE, D, K, G, MOST = 16, 32, 2, 4, 12
METADATA = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_k=32)


def loaded(cache: PagedCache, mask: Mask, count: int = 1) -> tuple[int, list[set[int]]]:
    """The bytes that one step of decoding loads, and for each row the loaded pages of its table."""
    operation: Any = OperationRegistry.create("attnops-triton:flash", METADATA)
    query = jnp.ones((cache.batch, 1, K * G, D), cache.dtype)
    with splits(count), loads() as found:
        jax.block_until_ready(jax.jit(lambda q, c: operation(q, c, mask=mask).attention_outputs)(query, cache))
    moved, pages = 0, set()
    for name, x in found:
        if name != "attnops_ragged":
            continue
        # Memory moves whole sectors: the elements of a sector that one load needs arrive together.
        moved += len(np.unique(x.first // 32)) * 32 if x.first.size > 1 else x.size
        if x.array == 1:  # after the number of the first block
            pages |= set((x.first // (K * PAGE * 2 * D * x.size)).tolist())
    rows = [set(row) & pages for row in np.asarray(cache.table).tolist()]
    return moved, rows


def cache_of(codec: Quantized | None, lengths: list[int]) -> PagedCache:
    table = np.random.default_rng(0).permutation(len(lengths) * MOST).reshape(len(lengths), MOST)
    cache = PagedCache.create(batch=len(lengths), pages=table.size, page_size=PAGE, max_pages=MOST, kv_heads=K,
                              head_dim=D, dtype=jnp.float16, codec=codec, table=table)  # fmt: skip
    return dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize(
    "codec",
    [None, pytest.param(Quantized("int8", "token_head"), marks=pytest.mark.slow)],
    ids=["none", "int8"],
)
def test_a_step_of_decoding_loads_each_key_once(codec: Quantized | None) -> None:
    lengths = [MOST * PAGE, 100, 17]
    cache = cache_of(codec, lengths)
    moved, _ = loaded(cache, Causal())
    token = 2 * D * 2 if codec is None else 2 * D + 2 * 4
    query = len(lengths) * K * G * D * 2
    table = sum(-(-n // PAGE) * 4 for n in lengths)
    least = sum(lengths) * K * token + query + table
    assert least <= moved <= 1.05 * least


@pytest.mark.slow
def test_a_window_loads_its_own_pages() -> None:
    window = 40
    lengths = [MOST * PAGE, 130, 17]
    cache = cache_of(None, lengths)
    _, pages = loaded(cache, SlidingWindow(window - 1, 0), 2)
    for row, length, found in zip(np.asarray(cache.table), lengths, pages, strict=True):
        assert found == set(row[max(length - window, 0) // PAGE : -(-length // PAGE)].tolist())
