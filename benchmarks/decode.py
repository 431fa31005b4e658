"""Figures of decoding on a CPU: one token over dense, paged and quantised caches, against jax.nn and torch.

Run ``python benchmarks/decode.py`` (``--quick`` for a minute, ``--json FILE`` to keep the figures) on an idle machine;
torch is measured if it is installed. In each case all contenders are timed in turns, each checked first against
float64; the best time is reported, as bytes a second of the tokens that are seen, and as a share of the bandwidth at
which the same run reads the same array once. ``floor`` is a loop over the same tiles that only slices the cache and
multiplies: what XLA's products leave to gain.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.bench import describe_machine
from attnops.caches import Cache, DenseCache, PagedCache, Quantized, WindowCache
from attnops.masks import Causal, Mask, SlidingWindow

H, K, D = 32, 8, 128
WINDOW = 1024
# A timing ends after so many rounds, or so many seconds.
ROUNDS, SECONDS = 9, 4.0
# Relative to the largest output: inputs are random numbers around 0.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 4e-2}

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One token a row over caches of S tokens, of which a part is in use.

    Attributes:
        batch: B.
        length: S.
        used: tokens in use, of each row.
        dtype: of queries, keys and values.
    """

    batch: int
    length: int
    used: int
    dtype: str

    def tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query [B, 1, H, D], keys and values [B, S, K, D], float32."""
        rng = np.random.default_rng(0)
        shape = (self.batch, self.length, K, D)
        key, value = (rng.random(shape, np.float32) - np.float32(0.5) for _ in range(2))
        return rng.random((self.batch, 1, H, D), np.float32) - np.float32(0.5), key, value


def filled(cache: Cache, problem: Problem, key: np.ndarray, value: np.ndarray, used: int) -> Cache:
    """The cache with the first tokens of the problem, appended in chunks."""
    append = jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0)
    chunk = 512 if not isinstance(cache, WindowCache) else cache.max_append
    for first in range(0, used, chunk):
        part = slice(first, min(first + chunk, used))
        cache = append(cache, jnp.asarray(key[:, part], problem.dtype), jnp.asarray(value[:, part], problem.dtype))
    return cache


def paged(problem: Problem, page: int, **options: Any) -> PagedCache:
    """An empty cache whose pages lie in a random order."""
    pages = problem.batch * problem.length // page
    table = np.random.default_rng(1).permutation(pages).reshape(problem.batch, -1).astype(np.int32)
    return PagedCache.create(batch=problem.batch, pages=pages, page_size=page, max_pages=table.shape[1], table=table,
                             kv_heads=K, head_dim=D, dtype=problem.dtype, **options)  # fmt: skip


def dense(problem: Problem, **options: Any) -> DenseCache:
    """An empty cache."""
    return DenseCache.create(
        batch=problem.batch, length=problem.length, kv_heads=K, head_dim=D, dtype=problem.dtype, **options
    )


def step_over(cache: Cache, query: np.ndarray, problem: Problem, mask: Mask) -> Run:
    """The attention of one token over a cache by `flash`, compiled."""
    op = OperationRegistry.create("flash", OperationMetadata())
    q = jnp.asarray(query, problem.dtype)
    run = jax.jit(lambda q, cache: op(q, cache, mask=mask).attention_outputs).lower(q, cache).compile()
    return lambda: run(q, cache).block_until_ready()


def peers(problem: Problem, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Iterator[tuple[str, Run]]:
    """jax.nn with lengths, and torch over the visible slice."""
    q, k, v = (jnp.asarray(x, problem.dtype) for x in (query, key, value))
    used = jnp.full((problem.batch,), problem.used, jnp.int32)
    run = jax.jit(
        lambda q, k, v, used: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=used)
    ).lower(q, k, v, used).compile()  # fmt: skip
    yield "jax.nn", lambda: run(q, k, v, used).block_until_ready()
    if importlib.util.find_spec("torch"):
        import torch

        dtype = getattr(torch, problem.dtype)
        tq, tk, tv = (torch.from_numpy(x).transpose(1, 2).contiguous().to(dtype) for x in (query, key, value))
        tk, tv = tk[:, :, : problem.used], tv[:, :, : problem.used]

        def attend() -> object:
            with torch.no_grad():
                out = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, enable_gqa=True)
            return out.transpose(1, 2).float().numpy()

        yield "torch", attend


def floor(cache: DenseCache, query: np.ndarray, problem: Problem, block: int) -> Run:
    """A loop over the tiles in use that slices keys and values and multiplies: no softmax, no mask."""
    dtype = jnp.float32 if problem.dtype == "float32" else jnp.bfloat16
    q = jnp.asarray(query, dtype).reshape(problem.batch, K, H // K, D)
    tiles = -(-problem.used // block)

    def products(q: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def tile(i: jax.Array, total: jax.Array) -> jax.Array:
            b, first = i // tiles, i % tiles * block
            k, v = (lax.dynamic_slice(x, (b, 0, first, 0), (1, K, block, D))[0] for x in (key, value))
            k, v = (lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x.astype(dtype) for x in (k, v))
            k, v = lax.optimization_barrier((k, v))
            row = lax.dynamic_slice(q, (b, 0, 0, 0), (1, *q.shape[1:]))[0]
            s = lax.dot_general(row, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
            return total + lax.dot_general(s.astype(dtype), v, (((2,), (1,)), ((0,), (0,))),
                                           preferred_element_type=jnp.float32)  # fmt: skip

        return lax.fori_loop(0, problem.batch * tiles, tile, jnp.zeros((K, H // K, D), jnp.float32))

    run = jax.jit(products).lower(q, cache.store.key, cache.store.value).compile()
    return lambda: run(q, cache.store.key, cache.store.value).block_until_ready()


def reading(cache: Cache, problem: Problem) -> Run:
    """Reading the bytes of the tokens in use once: the sum of as many 32-bit words."""
    words = cache.bytes_per_token * problem.batch * problem.used // 4
    x = jnp.ones((words,), jnp.float32)
    run = jax.jit(jnp.sum).lower(x).compile()
    return lambda: run(x).block_until_ready()


def expected(problem: Problem, query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: slice) -> np.ndarray:
    """Row 0 in float64, [1, H, D]."""
    k, v = (np.asarray(jnp.asarray(x[0, seen], problem.dtype), np.float64) for x in (key, value))
    q = np.asarray(jnp.asarray(query[0, 0], problem.dtype), np.float64).reshape(K, H // K, D)
    scores = np.einsum("kgd,skd->kgs", q, k) * D**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgs,skd->kgd", weights, v).reshape(1, H, D)


def timed(contenders: dict[str, Run], truths: dict[str, tuple[np.ndarray, float]]) -> dict[str, float]:
    """The best time of each in seconds, timed in turns; those with a truth are checked first."""
    for name, (truth, tolerance) in truths.items():
        error = float(np.abs(np.asarray(contenders[name]()[0], np.float64) - truth).max() / np.abs(truth).max())  # type: ignore[index]
        if not error <= tolerance:
            raise AssertionError(f"{name} is wrong by {error:.1e} of the largest output, more than {tolerance:.0e}")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for done in range(ROUNDS):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
        if time.perf_counter() - start > SECONDS and done:
            break
    return {name: min(x) for name, x in times.items()}


def decode(problem: Problem) -> dict[str, Any]:
    """One token over each cache, jax.nn and torch."""
    query, key, value = problem.tokens()
    contenders: dict[str, Run] = {}
    per_token: dict[str, int] = {}
    made: dict[str, Cache] = {"dense": dense(problem), "paged 16": paged(problem, 16), "paged 128": paged(problem, 128)}
    if problem.dtype == "bfloat16":
        made |= {
            "int8": dense(problem, codec=Quantized("int8")),
            "int8 paged 128": paged(problem, 128, codec=Quantized("int8")),
        }
    for name, empty in made.items():
        cache = filled(empty, problem, key, value, problem.used)
        contenders[name], per_token[name] = step_over(cache, query, problem, Causal()), cache.bytes_per_token
        if name in ("dense", "int8"):
            assert isinstance(cache, DenseCache)
            contenders[f"{name} floor"] = floor(cache, query, problem, min(512, problem.length))
            contenders[f"{name} read"] = reading(cache, problem)
    contenders |= dict(peers(problem, query, key, value))
    truth = expected(problem, query, key, value, slice(0, problem.used))
    truths = {name: (truth, TOLERANCE["int8" if name.startswith("int8") else problem.dtype]) for name in
              (*made, "jax.nn", *(["torch"] if "torch" in contenders else []))}  # fmt: skip
    seconds = timed(contenders, truths)
    return {**dataclasses.asdict(problem), "seconds": seconds, "bytes per token": per_token}


def windows(batch: int, length: int, dtype: str) -> dict[str, Any]:
    """A window over a long cache, and over rings and caches of its size."""
    problem = Problem(batch, length, length, dtype)
    query, key, value = problem.tokens()
    window = SlidingWindow(WINDOW - 1, 0)
    small = dataclasses.replace(problem, length=WINDOW, used=WINDOW)
    last = slice(length - WINDOW, length)
    ring = WindowCache.create(batch=batch, window=WINDOW, max_append=512, kv_heads=K, head_dim=D, dtype=dtype)
    made: dict[str, tuple[Cache, Mask]] = {
        "window of a long cache": (filled(dense(problem), problem, key, value, length), window),
        "ring": (filled(ring, problem, key, value, length), Causal()),
        "cache of the window": (filled(dense(small), small, key[:, last], value[:, last], WINDOW), Causal()),
    }
    contenders = {name: step_over(cache, query, problem, mask) for name, (cache, mask) in made.items()}
    truth = expected(problem, query, key, value, last)
    seconds = timed(contenders, dict.fromkeys(contenders, (truth, TOLERANCE[dtype])))
    return {"batch": batch, "length": length, "dtype": dtype, "seconds": seconds}


def prompt(length: int, dtype: str) -> dict[str, Any]:
    """A whole prompt: `step` into an empty cache, and `flash` on arrays."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.random((1, length, h, D), np.float32) - 0.5, dtype) for h in (H, K, K))
    op = OperationRegistry.create("flash", OperationMetadata(mode="prefill"))
    cache = DenseCache.create(batch=1, length=length, kv_heads=K, head_dim=D, dtype=dtype)
    arrays = jax.jit(lambda q, k, v: op(q, k, v, mask=Causal()).attention_outputs).lower(q, k, v).compile()

    def into(q: jax.Array, k: jax.Array, v: jax.Array, cache: DenseCache) -> tuple[jax.Array, DenseCache]:
        out, cache = op.step(q, k, v, cache, mask=Causal())
        return out.attention_outputs, cache

    step = jax.jit(into).lower(q, k, v, cache).compile()
    contenders = {
        "flash on arrays": lambda: arrays(q, k, v).block_until_ready(),
        "step into a cache": lambda: step(q, k, v, cache)[0].block_until_ready(),
    }
    np.testing.assert_allclose(*(np.asarray(run(), np.float32) for run in contenders.values()), atol=2e-2)
    return {"length": length, "dtype": dtype, "seconds": timed(contenders, {})}


def report(found: list[dict[str, Any]], window: list[dict[str, Any]], prompts: list[dict[str, Any]]) -> None:
    """Print the tables."""
    table = Table(title="One token, H32 K8 D128, best time in ms (GB/s of the tokens seen; share of one read)")
    for column in (
        "dtype",
        "B",
        "S",
        "used",
        "contender",
        "ms",
        "GB/s",
        "of read",
        "of floor",
        "over jax.nn",
        "over torch",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "contender") else "right")
    for x in found:
        times = x["seconds"]
        for name, per_token in x["bytes per token"].items():
            kind, total = "int8" if name.startswith("int8") else "dense", per_token * x["batch"] * x["used"]
            seconds = times[name]
            table.add_row(
                x["dtype"], str(x["batch"]), f"{x['length']:,}", f"{x['used']:,}", name, f"{seconds * 1e3:,.2f}",
                f"{total / seconds / 1e9:.1f}", f"{times[f'{kind} read'] / seconds:.2f}",
                f"{times[f'{kind} floor'] / seconds:.2f}",
                *(f"{times[peer] / seconds:.1f} ×" if peer in times else "–" for peer in ("jax.nn", "torch")),
            )  # fmt: skip
    other = Table(title="Windows and prompts, best time in ms")
    for column in ("what", "dtype", "ms"):
        other.add_column(column, justify="left" if column != "ms" else "right")
    for x in window + prompts:
        size = f"B{x['batch']} S{x['length']:,}" if "batch" in x else f"{x['length']:,} tokens"
        for name, seconds in x["seconds"].items():
            other.add_row(f"{size}: {name}", x["dtype"], f"{seconds * 1e3:,.2f}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(other)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, B 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    batches, lengths = ((1,), (4096,)) if arguments.quick else ((1, 8), (4096, 32768))
    machine = describe_machine()
    print(f"{machine['processor']}, {machine['cores']} cores; {machine['versions']}")
    problems = [Problem(B, S, used, dtype) for dtype in ("float32", "bfloat16") for B in batches for S in lengths
                for used in (S, S // 2)]  # fmt: skip
    found = [decode(problem) for problem in problems]
    window = [windows(B, lengths[-1], dtype) for dtype in ("float32", "bfloat16") for B in batches]
    prompts = [prompt(lengths[0], dtype) for dtype in ("float32", "bfloat16")]
    report(found, window, prompts)
    if arguments.json:
        figures = {"machine": describe_machine(), "decode": found, "windows": window, "prompts": prompts}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
