"""Figures of decoding rows that share a prefix, on a CPU: `flash` over a `PagedCache` whose rows were forked.

Run ``python benchmarks/shared_prefix.py`` (``--json FILE`` to keep the figures) on an idle machine. One token of each
row attends to the prefix and to 64 to 256 tokens of its own, by four programs in turns: with cascade attention and
without it, over the rows' shared pages, and over pages that no rows share. attnops-cpu, if installed, is a fifth.
Each is checked against float64 before it is timed; the best time is reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import PagedCache, PagePool, Quantized
from attnops_caches.flash import cascade
from attnops_testing import oracle
from attnops_testing.bench import describe_machine, one_line

PAGE, D = 16, 128
OWN = 256  # the most tokens of a row's own
ROUNDS = 15
# Rows, query heads, kv heads, the length of the prefix, and how tokens are stored.
CASES = (
    *((32, 32, 8, 4096, dtype) for dtype in ("float32", "bfloat16", "int8")),
    (32, 9, 3, 4096, "float32"), (8, 32, 8, 4096, "bfloat16"), (2, 32, 8, 4096, "bfloat16"),
    (8, 32, 8, 1024, "bfloat16"),
)  # fmt: skip


def caches(rows: int, kv_heads: int, prefix: int, dtype: str) -> tuple[PagedCache, PagedCache]:
    """A prompt forked to all rows, with tokens of their own; and the same tokens in pages that no rows share."""
    rng = np.random.default_rng(0)
    codec = Quantized("int8") if dtype == "int8" else None
    most = (prefix + OWN) // PAGE
    own = rng.integers(64, OWN + 1, rows).astype(np.int32)

    def empty(pages: int) -> PagedCache:
        return PagedCache.create(
            batch=rows, pages=pages, page_size=PAGE, max_pages=most, kv_heads=kv_heads, head_dim=D,
            dtype="bfloat16" if codec else dtype, codec=codec,
        )  # fmt: skip

    def tokens(length: int, batch: int) -> list[jax.Array]:
        return [jnp.asarray(rng.standard_normal((batch, length, kv_heads, D), np.float32)).astype(
            "bfloat16" if codec else dtype) for _ in range(2)]  # fmt: skip

    append = jax.jit(lambda cache, key, value, lengths: cache.append(key, value, lengths))
    first = np.where(np.arange(rows) == 0, prefix, 0).astype(np.int32)
    pool = PagePool.create(pages=most + rows * (OWN // PAGE), page_size=PAGE, rows=rows, max_pages=most).reserve(first)
    prompt = [jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in tokens(prefix, 1)]
    shared = append(empty(pool.pages).with_table(pool.table), *prompt, first)
    others = np.arange(1, rows, dtype=np.int32)
    pool, copies = pool.fork(0 * others, others)
    shared = shared.fork(0 * others, others, pool.table, copies).with_table(pool.reserve(prefix + own).table)
    new = tokens(OWN, rows)
    shared = append(shared, *new, own)
    alone = empty(rows * most).with_table(rng.permutation(rows * most).reshape(rows, most))
    return shared, append(append(alone, *prompt, np.full(rows, prefix, np.int32)), *new, own)


def program(query: jax.Array, cache: PagedCache, is_on: bool, name: str = "attnops:flash") -> Callable[[], jax.Array]:
    """The compiled call, with cascade attention or without."""
    op = OperationRegistry.create(name, OperationMetadata())
    jax.clear_caches()
    least = cascade._LEAST_SLOTS if is_on else sys.maxsize
    with mock.patch.object(cascade, "_LEAST_SLOTS", least):
        run = jax.jit(lambda q, c: op(q, c, mask=Causal()).attention_outputs).lower(query, cache).compile()
    return lambda: run(query, cache).block_until_ready()


def exact(query: jax.Array, cache: PagedCache) -> np.ndarray[Any, Any]:
    """The oracle's output, of one row after the other."""
    outs, (keys, values, _, _) = [], cache.read()
    for b, length in enumerate(np.asarray(cache.lengths)):
        row = (np.asarray(x[b : b + 1, :length]).astype(np.float64) for x in (keys, values))
        outs.append(oracle.attention(np.asarray(query[b : b + 1]).astype(np.float64), *row).out)
    return np.concatenate(outs)


def measure(rows: int, heads: int, kv_heads: int, prefix: int, dtype: str) -> dict[str, Any]:
    """The best seconds of each program."""
    shared, alone = caches(rows, kv_heads, prefix, dtype)
    query = np.random.default_rng(1).standard_normal((rows, 1, heads, D), np.float32)
    q = jnp.asarray(query).astype("float32" if dtype == "float32" else "bfloat16")
    programs = {
        "cascade": program(q, shared, True), "without": program(q, shared, False),
        "nothing shared": program(q, alone, True), "nothing shared, without": program(q, alone, False),
    }  # fmt: skip
    if importlib.util.find_spec("attnops_cpu"):
        programs["attnops-cpu"] = program(q, shared, True, "attnops-cpu:flash")
    wanted = exact(q, shared)
    for name, run in programs.items():
        worst = np.abs(np.asarray(run(), np.float64) - wanted).max()
        assert worst < (2e-6 if dtype == "float32" else 2e-3), f"{name} differs by {worst}"
    seconds = dict.fromkeys(programs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in programs.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return {"rows": rows, "heads": heads, "kv_heads": kv_heads, "prefix": prefix, "dtype": dtype, "seconds": seconds}


def report(figures: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"One token of each row, D{D}, pages of {PAGE}, best time in ms")
    columns = ("rows", "prefix", "H", "K", "dtype", "cascade", "without", "faster", "nothing shared", "of without",
               "attnops-cpu")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for x in figures:
        on, off, looked, not_looked, *cpu = x["seconds"].values()
        table.add_row(
            str(x["rows"]), f"{x['prefix']:,}", str(x["heads"]), str(x["kv_heads"]), x["dtype"], f"{on * 1e3:.1f}",
            f"{off * 1e3:.1f}", f"{off / on:.1f} ×", f"{looked * 1e3:.1f}", f"{looked / not_looked:.2f}",
            *(f"{y * 1e3:.1f}" for y in cpu),
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    print(one_line(describe_machine()))
    figures = [measure(*case) for case in CASES]
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
