"""Figures of decoding on a CPU: one token over dense, paged and quantised caches, against peers.

Run ``python benchmarks/decode.py`` (``--quick`` for a minute, ``--json FILE`` to keep the figures) on an idle machine.
The peers are jax.nn, and flax.nnx and torch if they are installed; they attend to plain arrays. In each case all
contenders are checked against float64, and then timed in turns. The best time is reported, also as bytes per second of
the tokens that queries see, and as a share of the bandwidth at which the same run reads the same array once. ``floor``
only slices the same cache and multiplies: XLA's copies and products allow no higher speed. ``error`` is the difference
that a codec makes to the output, by root mean squares; tokens are Gaussian.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, WindowCache
from attnops_testing.bench import (
    PEERS,
    CacheCase,
    Case,
    Contender,
    Measurement,
    Ready,
    Tokens,
    describe_machine,
    find,
    measure,
    one_line,
    operation,
    reading,
)

H, K, D = 32, 8, 128
WINDOW = 1024
INTEGERS = ("int8", "int4")
# The core's `flash`, and the plugin's.
NATIVE, KERNEL = "attnops:flash", "attnops-cpu:flash"
# The peers, each timed if it is installed.
COMPARED = ("jax.nn", "flax.nnx", "torch")
# The number of timings of each contender, and the seconds after which they end.
ROUNDS, SECONDS = 9, 2.0

Entry = tuple[str, CacheCase | Case, Contender]


@functools.cache
def has_kernel() -> bool:
    """Whether attnops-cpu can be called, installed or on the path."""
    with contextlib.suppress(ImportError):
        from attnops_cpu import CpuFlashAttention
        from attnops_cpu.library import library

        OperationRegistry.register(CpuFlashAttention, override=True)
        return library().problem is None
    return False


def tokens(batch: int, length: int, used: int, dtype: str) -> Tokens:
    """Rows with ``used`` of ``length`` slots in use; the last token is the query."""
    rows = {"lengths": (used,) * batch, "queries": (1,) * batch}
    return Tokens(**rows, slots=length, heads=H, kv_heads=K, head_dim=D, dtype=dtype)


def dense(batch: int, length: int, dtype: str, **options: Any) -> Cache:
    """The shapes of an empty cache."""
    create = functools.partial(DenseCache.create, kv_heads=K, head_dim=D, dtype=dtype, **options)
    return jax.eval_shape(lambda: create(batch=batch, length=length))


def paged(batch: int, length: int, dtype: str, page: int, **options: Any) -> Cache:
    """The shapes of an empty cache."""
    create = functools.partial(PagedCache.create, kv_heads=K, head_dim=D, dtype=dtype, **options)
    pages = length // page
    return jax.eval_shape(lambda: create(batch=batch, pages=batch * pages, page_size=page, max_pages=pages))


def best(entries: list[Entry]) -> dict[str, Measurement]:
    """Check each entry, and measure all in turns, one call per timing."""
    measured = measure([entry[1:] for entry in entries], rounds=ROUNDS, most_seconds=SECONDS, shortest=0)
    for (name, *_), m in zip(entries, measured, strict=True):
        if m.status != "ok":
            raise AssertionError(f"{name} {m.status}: {m.reason}")
    return {name: m for (name, *_), m in zip(entries, measured, strict=True)}


def seconds(measured: dict[str, Measurement]) -> dict[str, float]:
    """The best time of each entry."""
    return {name: m.best for name, m in measured.items() if m.best is not None}


def floor(case: CacheCase) -> Ready:
    """The least work of a call over a cache: slice or gather the keys and values that queries see, and multiply.

    It works in tiles, since XLA copies slices; a full float32 dense cache is used as a whole, without slices. There is
    no softmax and no mask.
    """
    cache, drawn = case.filled, case.tokens
    dtype = jnp.float32 if drawn.dtype == "float32" else jnp.bfloat16
    q = jnp.asarray(drawn.inputs[0], dtype).reshape(drawn.batch, K, H // K, D)
    q = q.swapaxes(2, 3) if dtype == jnp.float32 else q
    used = drawn.lengths[0]
    is_window = isinstance(case.mask, SlidingWindow)
    start, block = (used - WINDOW, WINDOW // 4) if is_window else (0, min(512, case.length))
    tiles = -(-(used - start) // block)
    table = cache.table if isinstance(cache, PagedCache) else None

    def load(x: jax.Array, b: jax.Array, slot: jax.Array) -> jax.Array:
        """[K, block, features] of a row; int4 as the bytes of two features."""
        if table is None:
            return lax.dynamic_slice(x, (b, 0, slot, 0), (1, K, block, x.shape[3]))[0]
        page = x.shape[2]
        numbers = lax.dynamic_slice(table, (b, slot // page), (1, block // page))[0]
        return x[numbers].swapaxes(0, 1).reshape(K, block, x.shape[-1])

    def products(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The products of q [..., K, G, D], in float32 [..., K, D, G], with k and v [..., K, n, D]. In float32 XLA is
        faster with keys as the first operand.
        """
        heads = tuple(range(q.ndim - 2))
        product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
        last, rows = q.ndim - 1, q.ndim - 2
        if dtype == jnp.float32:
            s = lax.optimization_barrier(product(k, q, (((last,), (rows,)), (heads, heads)))).swapaxes(-1, -2)
        else:
            q, k, v = lax.optimization_barrier((q, k, v))
            s = product(q, k, (((last,), (last,)), (heads, heads)))
        return product(s.astype(dtype), v, (((last,), (rows,)), (heads, heads)))

    def in_tiles(q: jax.Array, key: jax.Array, value: jax.Array | None) -> jax.Array:
        def tile(i: jax.Array, total: jax.Array) -> jax.Array:
            b, slot = i // tiles, start + i % tiles * block
            k, v = (load(x, b, slot) for x in (key, key if value is None else value))
            if value is None:  # in pages they are joined
                k, v = jnp.split(k, 2, -1)
            k, v = (lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x for x in (k, v))
            row = lax.dynamic_slice(q, (b, 0, 0, 0), (1, *q.shape[1:]))[0]
            parts = [(x,) if cache.codec is None else cache.codec.parts(x) for x in (k, v)]
            new = [products(some, k.astype(dtype), v.astype(dtype)) for some, k, v in
                   zip(jnp.split(row, len(parts[0]), -1), *parts, strict=True)]  # fmt: skip
            return total + jnp.concatenate(new, axis=-1)

        return lax.fori_loop(0, drawn.batch * tiles, tile, jnp.zeros((K, H // K, D), jnp.float32))

    is_whole = dtype == jnp.float32 and table is None and used == case.length and not is_window
    run = jax.jit(products if is_whole else in_tiles).lower(q, cache.store.key, cache.store.value).compile()
    return Ready(
        run=lambda: run(q, cache.store.key, cache.store.value), wait=jax.block_until_ready, results=None, what="floor"
    )


def decode(batch: int, length: int, used: int, dtype: str) -> dict[str, Any]:
    """One token over each cache, and the peers."""
    caches = {
        "dense": dense(batch, length, dtype),
        "paged 16": paged(batch, length, dtype, 16),
        "paged 128": paged(batch, length, dtype, 128),
    }
    if dtype == "bfloat16":
        for name in INTEGERS:
            codec = Quantized(name)
            caches |= {
                name: dense(batch, length, dtype, codec=codec),
                f"{name} paged 16": paged(batch, length, dtype, 16, codec=codec),
                f"{name} paged 128": paged(batch, length, dtype, 128, codec=codec),
            }
    first = CacheCase(tokens=tokens(batch, length, used, dtype), cache=caches["dense"])
    cases = {name: first if name == "dense" else first.over(cache) for name, cache in caches.items()}
    # Entries that read the same arrays do not follow one another, so that these are not in the processor's caches.
    entries: list[Entry] = [(name, case, operation(NATIVE)) for name, case in cases.items()]
    if has_kernel():
        entries += [(f"{name} kernel", case, operation(KERNEL)) for name, case in cases.items()]
    entries += [(name, first, PEERS[name].contender) for name in COMPARED if PEERS[name].installed]
    entries += [(f"{name} floor", case, Contender("floor", floor)) for name, case in cases.items()]
    entries += [(f"{name} read", cases[name], reading()) for name in ("dense", *INTEGERS) if name in cases]
    return {
        "batch": batch, "length": length, "used": used, "dtype": dtype, "seconds": seconds(best(entries)),
        "bytes per token": {name: case.cache.bytes_per_token for name, case in cases.items()},
        "output error": {name: output_error(cases[name], first) for name in INTEGERS if name in cases},
    }  # fmt: skip


def output_error(case: CacheCase, plain: CacheCase) -> float:
    """The root mean square of the difference that a codec makes to the output, relative to the output's."""
    op = OperationRegistry.create(NATIVE, OperationMetadata())
    query = jnp.asarray(case.tokens.inputs[0])
    found, wanted = (
        np.asarray(op(query, x.filled, mask=Causal()).attention_outputs, np.float64) for x in (case, plain)
    )
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))


def windows(batch: int, length: int, dtype: str) -> dict[str, Any]:
    """A window over a long cache, and over rings and caches of its size."""
    create = functools.partial(WindowCache.create, batch=batch, kv_heads=K, head_dim=D, dtype=dtype)
    long = tokens(batch, length, length, dtype)
    ring = jax.eval_shape(lambda: create(window=WINDOW, max_append=512))
    window = SlidingWindow(WINDOW - 1, 0)
    cases = {
        "window of a long cache": CacheCase(tokens=long, cache=dense(batch, length, dtype), mask=window),
        "ring": CacheCase(tokens=long, cache=ring),
        "cache of the window": CacheCase(
            tokens=tokens(batch, WINDOW, WINDOW, dtype), cache=dense(batch, WINDOW, dtype)
        ),
    }
    entries: list[Entry] = [(name, case, operation(NATIVE)) for name, case in cases.items()]
    if has_kernel():
        entries += [(f"{name}, attnops-cpu", case, operation(KERNEL)) for name, case in cases.items()]
    for name in ("window of a long cache", "cache of the window"):
        entries.append((f"floor of a {name}", cases[name], Contender("floor", floor)))
    return {"batch": batch, "length": length, "dtype": dtype, "seconds": seconds(best(entries))}


def step(case: Case) -> Ready:
    """`step` of a whole prompt into an empty cache."""
    op = OperationRegistry.create(NATIVE, OperationMetadata(mode="prefill"))
    cache = DenseCache.create(batch=1, length=case.length, kv_heads=K, head_dim=D, dtype=case.dtype)

    def into(q: jax.Array, k: jax.Array, v: jax.Array, cache: DenseCache) -> tuple[jax.Array, DenseCache]:
        out, cache = op.step(q, k, v, cache, mask=Causal())
        return out.attention_outputs, cache

    arguments = (*case.device_inputs, cache)
    run = jax.jit(into).lower(*arguments).compile()
    return Ready(
        run=lambda: run(*arguments), wait=jax.block_until_ready, what="flash's step",
        results=lambda d_out: {"output": np.asarray(run(*arguments)[0])},
    )  # fmt: skip


def prompt(length: int, dtype: str) -> dict[str, Any]:
    """A whole prompt: `step` into an empty cache, and `flash` on arrays."""
    case = Case(length=length, heads=H, kv_heads=K, head_dim=D, dtype=dtype, mask=Causal())
    flash = find([NATIVE])[0]
    measured = best([("flash on arrays", case, flash), ("step into a cache", case, Contender("step", step))])
    return {"length": length, "dtype": dtype, "seconds": seconds(measured)}


def _of_kernel(times: dict[str, float], name: str, kind: str) -> tuple[str, str, str]:
    """Of attnops-cpu: milliseconds, as a multiple of one read, and native's time as a multiple of it."""
    seconds = times.get(f"{name} kernel")
    if seconds is None:
        return "–", "–", "–"
    return f"{seconds * 1e3:,.2f}", f"{seconds / times[f'{kind} read']:.2f}", f"{times[name] / seconds:.1f} ×"


def report(decoding: list[dict[str, Any]], window: list[dict[str, Any]], prompts: list[dict[str, Any]]) -> None:
    """Print the tables."""
    table = Table(
        title="One token, H32 K8 D128, best time in ms (GB/s of the tokens seen; share of one read)",
        caption="flax.nnx: dot_product_attention over all slots with a mask, as in its MultiHeadAttention",
    )
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
        "error",
        "attnops-cpu ms",
        "over read",
        "over native",
        *(f"over {peer}" for peer in COMPARED),
    ):
        table.add_column(column, justify="left" if column in ("dtype", "contender") else "right")
    for x in decoding:
        times = x["seconds"]
        for name, per_token in x["bytes per token"].items():
            kind, total = name.split()[0] if name.startswith(INTEGERS) else "dense", per_token * x["batch"] * x["used"]
            seconds = times[name]
            table.add_row(
                x["dtype"], str(x["batch"]), f"{x['length']:,}", f"{x['used']:,}", name, f"{seconds * 1e3:,.2f}",
                f"{total / seconds / 1e9:.1f}", f"{times[f'{kind} read'] / seconds:.2f}",
                f"{times[f'{name} floor'] / seconds:.2f}",
                f"{x['output error'][name]:.1%}" if name in x["output error"] else "",
                *_of_kernel(times, name, kind),
                *(f"{times[peer] / seconds:.1f} ×" if peer in times else "–" for peer in COMPARED),
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
    batches, lengths = ((1,), (128, 4096)) if arguments.quick else ((1, 8), (128, 4096, 32768))
    machine = describe_machine()
    print(one_line(machine))
    decoding = [decode(B, S, used, dtype) for dtype in ("float32", "bfloat16") for B in batches for S in lengths
                for used in (S, S // 2)]  # fmt: skip
    window = [windows(B, lengths[-1], dtype) for dtype in ("float32", "bfloat16") for B in batches]
    prompts = [prompt(lengths[1], dtype) for dtype in ("float32", "bfloat16")]
    report(decoding, window, prompts)
    if arguments.json:
        figures = {"machine": describe_machine(), "decode": decoding, "windows": window, "prompts": prompts}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
