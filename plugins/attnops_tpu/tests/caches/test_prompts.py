"""New tokens in chunks, and where the kernel writes them, held to loops over slots."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import NewTokens, Quantized, WindowCache
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import chunk_of, most_chunks, prompts, sizes
from attnops_tpu.caches.reader import TPUCacheReader
from attnops_tpu.generations import target


@pytest.mark.parametrize(
    ("unit", "group", "token_bytes", "chunk"),
    [(128, 16, 4096, 64), (16, 16, 4096, 16), (256, 128, 4096, 128), (48, 16, 1 << 20, 48), (512, 16, 512, 512)],
)
def test_chunks_are_whole_groups_of_a_unit(unit: int, group: int, token_bytes: int, chunk: int) -> None:
    assert chunk_of(unit, group, token_bytes) == chunk


CASES = {
    "a batch over pages": ({}, [0, 7, 30, 5], [9, 1, 0, 12], None),
    "rows without pages": ({"is_paged": False}, [3, 50, 0, 8], [12, 9, 4, 0], None),
    "a ring": ({"is_paged": False, "is_ring": True}, [60, 3, 0, 63], [12, 12, 1, 9], None),
    "packed rows": ({"is_packed": True}, [5, 8, 40, 0], [9, 0, 5, 6], [11, 3, 21, 5]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.tier(quick=["packed rows"])
def test_chunks_have_each_new_token_once(name: str, cache_plan: Callable[..., CachePlan]) -> None:
    fields, given_first, given_size, given_starts = CASES[name]
    first, size = (np.array(x, np.int32) for x in (given_first, given_size))
    starts = None if given_starts is None else np.array(given_starts, np.int32)
    plan, base = cache_plan(B=4, unit=8, bk=16, piece=2, **fields), 100
    rows, T = (1, 26) if starts is not None else (4, 12)
    each = T // plan.unit + 2 if plan.is_paged else 1
    blocks = np.random.default_rng(0).permutation(4 * each).astype(np.int32).reshape(4, each)
    x = np.arange(1, rows * T + 1, dtype=np.float32).reshape(rows, 1, T, 1) * np.ones((1, 2, 1, 8), np.float32)
    arrays = {"key": jax.ShapeDtypeStruct((200, 2, 8, 8), np.float32)}
    made = jax.jit(lambda new: prompts(plan, new, base, arrays))(NewTokens({"key": x}, first, size, blocks, starts))
    chunk, (group,), _ = sizes(plan, list(arrays.values()))
    assert (chunk, made.tokens[0].shape[2] % group) == (8, 0)
    count, tokens, moved = int(made.count[0]), np.asarray(made.tokens[0]), chunk + group
    assert count <= most_chunks(T, 4, starts is not None, chunk) == made.token.shape[0]
    written: dict[tuple[int, int], Any] = {}
    for i in range(count):
        token = int(made.token[i])
        begin = min(max(token, 0) // group * group, tokens.shape[2] - moved)
        assert begin >= 0
        assert made.slot[i] % chunk == 0
        for slot in range(int(made.first[i]), int(made.stop[i])):
            at = int(made.block[i]), int(made.slot[i]) + slot
            assert at not in written
            assert begin <= token + slot < begin + moved
            written[at] = tokens[int(made.batch[i]), 0, token + slot, 0]
    wanted = {}
    for row in range(4):
        for index in range(size[row]):
            slot, token = first[row] + index, index + (row * T if starts is None else starts[row])
            page = slot // 8 - first[row] // 8 if plan.is_paged else 0
            at = int(blocks[row, page]) + base, int(slot % (8 if plan.is_paged else plan.S))
            wanted[at] = token + 1
    assert written == wanted


@pytest.mark.slow
def test_a_prompt_that_may_begin_and_end_in_one_chunk_of_a_ring_is_refused() -> None:
    """Two features of int4 are one byte, so that chunks have 128 slots."""
    scales = dict.fromkeys(("key_scale", "value_scale"), [1.0] * 8)
    create = functools.partial(WindowCache.create, batch=1, window=117, max_append=140, kv_heads=8, head_dim=256)
    cache = jax.eval_shape(lambda: create(codec=Quantized("int4", "head"), **scales))
    metadata = OperationMetadata(platform="tpu", interpret=True, block_q=64)
    operation: Any = OperationRegistry.create("attnops-tpu:flash", metadata)
    found = []
    for T in (129, 130):
        with target("v6e"):
            request = operation.request(jax.ShapeDtypeStruct((1, T, 8, 256), cache.dtype), cache, mask=Causal())
            found.append([str(x) for x in TPUCacheReader().not_written(operation, request)])
    assert found[0] == []
    assert "may begin and end in the same 128 slots" in found[1][0]
