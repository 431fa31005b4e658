"""Peers of TPUs and GPUs on a CPU, whose kernels are replaced by the convention that they document."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops.masks import Causal, Mask, PrefixLM, Segments, SlidingWindow
from attnops_caches import PagedCache
from attnops_testing.bench import PEERS, CacheCase, Case, Measurement, Tokens, measure, packed_documents, peers, ragged

RPA = "tpu_inference.kernels.ragged_paged_attention.v3.kernel"


@pytest.fixture(autouse=True)
def pretend_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "platform_of", lambda device: "tpu")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")


def measured(name: str, case: Case | CacheCase) -> Measurement:
    return measure([(case, PEERS[name].contender)], rounds=1)[0]


def over_pages(pages: Any, lengths: Any, table: Any, queries: Any, starts: Any) -> Any:
    """Attention of tokens [N, H, D] over pages [P, size, 2 K, D], a head's key before its value."""
    G = queries.shape[1] // (pages.shape[2] // 2)
    out = []
    for b in range(len(lengths)):
        tokens = pages[table[b]].reshape(-1, *pages.shape[2:])
        key, value = (jnp.repeat(tokens[:, i::2].astype(jnp.float32), G, 1) for i in (0, 1))
        query = queries[starts[b] : starts[b + 1]].astype(jnp.float32)
        scores = jnp.einsum("nhd,shd->hns", query, key) * query.shape[-1] ** -0.5
        positions = lengths[b] - len(query) + jnp.arange(len(query))
        scores = jnp.where(jnp.arange(len(tokens)) <= positions[:, None], scores, -jnp.inf)
        out.append(jnp.einsum("hns,shd->nhd", jax.nn.softmax(scores), value))
    return jnp.concatenate(out).astype(queries.dtype)


def cached(T: int, packed: bool = False, dtype: str = "bfloat16") -> CacheCase:
    lengths, queries = ((200, 77, 256), (1, 1, 1)) if T == 1 else ragged(3, 256, T)
    tokens = Tokens(lengths=lengths, queries=queries, heads=4, kv_heads=2, head_dim=128, dtype=dtype)
    cache = jax.eval_shape(
        lambda: PagedCache.create(
            batch=3, pages=48, page_size=16, max_pages=16, kv_heads=2, head_dim=128, dtype=jnp.dtype(dtype)
        )
    )
    return CacheCase(tokens=tokens, cache=cache, packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "packed"), [(1, False), (20, True)])
@pytest.mark.parametrize("name", ["rpa", "flywheel"])
def test_kernels_over_pages_are_given_the_case(
    name: str, T: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cached(T, packed)
    starts = np.cumsum([0, *case.tokens.queries])

    def rpa(
        query: Any, key: Any, value: Any, pages: Any, lengths: Any, table: Any, cu: Any, ranges: Any, **options: Any
    ) -> Any:
        assert options == {"sm_scale": 128**-0.5, "update_kv_cache": False}
        assert ranges.shape == (3,)
        plain = pages.reshape(*pages.shape[:2], 4, 128)
        return over_pages(plain, lengths, table.reshape(3, -1), query, starts), pages

    def flywheel(
        query: Any, pages: Any, value: Any, *, cache_seqlens: Any, block_table: Any, cu_seqlens_q: Any, causal: bool
    ) -> Any:
        assert (value, causal, cu_seqlens_q is None) == (None, True, T == 1)
        out = over_pages(pages, cache_seqlens, block_table, query.reshape(-1, 4, 128), starts)
        return out.reshape(query.shape), pages

    shape = lambda pages, size, K, D, dtype: (pages, size, K, 2, D)  # noqa: E731  # two numbers of 16 bits in a word
    monkeypatch.setitem(sys.modules, RPA, types.SimpleNamespace(ragged_paged_attention=rpa, get_kv_cache_shape=shape))
    monkeypatch.setitem(sys.modules, "flywheel_tpu", types.SimpleNamespace(flash_attn_with_kvcache=flywheel))
    found = measured(name, case)
    assert (found.status, found.reason) == ("ok", "")
    assert "over pages of 128" in found.what


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, Causal() & SlidingWindow(20, 0), Causal() & packed_documents(3, 64)])
def test_flywheel_is_given_the_case(mask: Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple[int, int]) -> Any:
        left = None if window_size[0] == -1 else window_size[0]
        arrays = (x.swapaxes(1, 2) for x in (q, k, v))
        return attnops.attention(*arrays, causal=causal, window=(left, None)).swapaxes(1, 2)

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, longest: int, _: int, **options: Any
    ) -> Any:
        assert (cu_q.shape, options) == ((4,), {"causal": True, "window_size": (-1, -1)})
        ids = jnp.searchsorted(cu_q, jnp.arange(64), side="right")
        arrays = (x.swapaxes(0, 1)[None] for x in (q, k, v))
        return attnops.attention(*arrays, causal=True, mask=Segments(ids[None])).swapaxes(1, 2)[0]

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    monkeypatch.setitem(sys.modules, "flywheel_tpu", types.SimpleNamespace(**functions))
    found = measured("flywheel", Case(length=64, heads=2, head_dim=16, dtype="bfloat16", mask=mask))
    assert (found.status, found.reason) == ("ok", "")


def test_what_a_peer_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"length": 128, "heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    assert "dtype='float32' must be bfloat16" in measured("flywheel", Case(**half | {"dtype": "float32"})).reason
    window = Case(**half, mask=Causal() & SlidingWindow(9, 0), backward=True)
    assert "windows and documents have no backward pass" in measured("flywheel", window).reason
    assert "must be causal, a window" in measured("flywheel", Case(**half, mask=PrefixLM(3))).reason
    assert "measured over caches alone" in measured("rpa", Case(**half)).reason
    assert "dtype='float32' must be bfloat16" in measured("flywheel", cached(1, dtype="float32")).reason
    assert "runs on cuda, and this is tpu" in measured("cudnn", Case(**half)).reason
    assert "runs on cuda, and this is tpu" in measured("flashinfer", Case(**half)).reason
