"""Figures of attnops-cpu's kernel over caches, beside native `flash` and one read of the same bytes, on one core.

Run ``taskset -c 0 python benchmarks/cpu_decode.py``. Queries over full caches, H 32, K 8, D 128: one token a row,
chunks of prompts, and a server's step of packed rows, one of them a chunk of 128 tokens. All three are timed in turns,
by processor time, which other programs on the machine change least; the best of each is reported.
`decode.py` has the same by the clock, on all cores, with peers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import DenseCache, PagedCache, Quantized, Rows
from attnops_cpu import CpuFlashAttention

H, K, D = 32, 8, 128
ROUNDS: Final = 7
CHUNK: Final = 128
# Batch, slots, what is stored, slots of a page (0: dense), and queries a row (0: packed rows, of 1 and `CHUNK` tokens).
CASES: Final = (
    (1, 128, "float32", 0, 1), (1, 128, "bfloat16", 0, 1), (1, 128, "int8", 0, 1), (1, 32768, "float32", 0, 1),
    (1, 32768, "bfloat16", 0, 1), (1, 32768, "int8", 0, 1), (1, 32768, "int4", 0, 1), (8, 4096, "float32", 16, 1),
    (8, 4096, "bfloat16", 16, 1), (8, 4096, "int8", 16, 1), (8, 4096, "int4", 16, 1), (8, 4096, "bfloat16", 128, 1),
    (8, 4096, "float32", 16, 0), (8, 4096, "bfloat16", 16, 0), (8, 4096, "int8", 16, 0), (1, 4096, "float32", 16, 128),
    (1, 4096, "bfloat16", 16, 128), (1, 4096, "int8", 16, 128), (1, 4096, "float32", 16, 512),
    (1, 4096, "bfloat16", 16, 512), (1, 4096, "int8", 16, 512),
)  # fmt: skip


def filled(B: int, S: int, stored: str, page: int) -> Any:
    """A full cache of random numbers, its pages in a random order."""
    options: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D}
    options["dtype"] = jnp.float32 if stored == "float32" else jnp.bfloat16
    options |= {"codec": Quantized(stored)} if "int" in stored else {}
    rng, cache = np.random.default_rng(0), None
    if page:
        table = rng.permutation(B * S // page).reshape(B, -1)
        cache = PagedCache.create(pages=table.size, page_size=page, max_pages=S // page, table=table, **options)
    else:
        cache = DenseCache.create(length=S, **options)

    def drawn(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, x.shape, np.int8))
        if x.ndim < 4:  # scales
            return jnp.full(x.shape, 0.01, jnp.float32)
        numbers = rng.standard_normal(x.shape, np.float32)
        return jnp.asarray(numbers if x.dtype == jnp.float32 else numbers.astype(jnp.bfloat16).view(np.uint16))

    arrays = {name: drawn(x) for name, x in cache.store._blocks().items()}
    store: Any = dataclasses.replace(cache.store, **arrays)
    return dataclasses.replace(cache, store=store, lengths=jnp.full((B,), S, jnp.int32))


def seconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The best processor time of each call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats):
                jax.block_until_ready(call())
            best[name] = min(best[name], (time.process_time() - start) / repeats)
    return best


def case(B: int, S: int, stored: str, page: int, T: int) -> str:
    """A row of the table."""
    cache = filled(B, S, stored, page)
    shape, options = (B, T, H, D), {}
    if not T:
        shape = (1, B - 1 + CHUNK, H, D)
        options["rows"] = Rows(np.append(np.arange(B), B - 1 + CHUNK), np.arange(B))
    query = jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32)).astype(cache.dtype)
    calls: dict[str, Callable[[], Any]] = {}
    for name in ("attnops-cpu:flash", "attnops:flash"):
        op: Any = OperationRegistry.create(name, OperationMetadata(on_unsupported="error"))
        run = (
            jax.jit(lambda q, c, op=op: op(q, c, mask=Causal(), **options).attention_outputs)
            .lower(query, cache)
            .compile()
        )
        calls[name] = lambda run=run: run(query, cache)
    kernel, native = (np.asarray(call(), np.float32) for call in calls.values())
    assert np.abs(kernel - native).max() < (1e-5 if stored == "float32" else 2e-2) * np.abs(native).max()
    words = jnp.ones((B * S * cache.bytes_per_token // 4,), jnp.float32)
    read = jax.jit(jnp.sum).lower(words).compile()
    best = seconds(calls | {"read": lambda: read(words)}, max(1, 20000 // (B * S * max(T, 1))))
    mine, theirs = best["attnops-cpu:flash"], best["attnops:flash"]
    where = f"pages of {page}" if page else "dense"
    queries = T or f"1, one row {CHUNK}"
    return (f"| {stored} | {B} | {S:,} | {where} | {queries} | {mine * 1e3:.2f} | {mine / best['read']:.2f} | "
            f"{theirs / mine:.1f} × |")  # fmt: skip


def main() -> None:
    """Print the table."""
    OperationRegistry.register(CpuFlashAttention, override=True)
    print(
        "| stored | B | S | cache | queries | ms | over one read | native over it |\n|---|--:|--:|---|--:|--:|--:|--:|"
    )
    for given in CASES:
        print(case(*given), flush=True)


if __name__ == "__main__":
    main()
