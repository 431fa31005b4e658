"""Decoding over paged caches on a GPU: milliseconds of a step's attention, and its share of memory bandwidth::

    python benchmarks/gpu_decode.py --bandwidth 3350         # an H100; GB/s of this GPU's memory
    python benchmarks/gpu_decode.py --length 32768 --batch 1 --batch 64 --json decode.json
    python benchmarks/gpu_decode.py --dry                    # anywhere: small cases, Triton interpreted, nothing timed

Pages are in any order. Each case is checked against the float32 attention of `vanilla` over some of its rows. Bytes are
those of keys, values and scales of the tokens that are held. ``attnops bench --cache PagedCache`` compares libraries.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import typer
from gpu_timing import measure
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.bench.program import Ready
from attnops.caches import PagedCache, Quantized
from attnops.masks import Causal

# The most that an element may differ by, relative to the largest: of a weight rounded to 16 bits.
TOLERANCE = 2.0**-7


class Case(NamedTuple):
    """A step of decoding."""

    length: int
    batch: int
    codec: str
    page: int
    kv_heads: int
    groups: int
    head_dim: int
    dtype: str


def problem(case: Case) -> tuple[jax.Array, PagedCache]:
    """A query and a cache that is full but for a token a row, and whose tokens are random."""
    most = -(-case.length // case.page)
    table = np.random.default_rng(0).permutation(case.batch * most).reshape(case.batch, most)
    dtype = jnp.dtype(case.dtype)
    cache = PagedCache.create(
        batch=case.batch, pages=table.size, page_size=case.page, max_pages=most, kv_heads=case.kv_heads,
        head_dim=case.head_dim, dtype=dtype, codec=Quantized(case.codec) if case.codec else None, table=table,
    )  # fmt: skip

    def drawn(x: jax.Array) -> jax.Array:
        numbers = jax.random.normal(jax.random.key(x.ndim), x.shape, jnp.bfloat16)
        if x.ndim == 3:
            return (jnp.abs(numbers) / 100).astype(x.dtype)
        stored = numbers.astype(cache.store.stored_dtype) if case.codec != "int8" else (numbers * 40).astype(jnp.int8)
        return stored if stored.dtype == x.dtype else jax.lax.bitcast_convert_type(stored, x.dtype)

    names = ("key", "key_scale", "value_scale") if case.codec else ("key",)
    store = dataclasses.replace(cache.store, **{name: drawn(getattr(cache.store, name)) for name in names})
    lengths = jnp.full((case.batch,), case.length - 1, jnp.int32)
    query = jax.random.normal(jax.random.key(1), (case.batch, 1, case.kv_heads * case.groups, case.head_dim), dtype)
    return query, dataclasses.replace(cache, store=store, lengths=lengths)


def error(out: jax.Array, query: jax.Array, cache: PagedCache) -> float:
    """The largest difference from `vanilla` in the first row, relative to its largest element."""
    rows = {name: getattr(cache, name)[:1] for name in ("table", "lengths", "starts", "overflowed")}
    keys, values, positions, held = dataclasses.replace(cache, **rows).read()
    mask = Causal().at(cache.lengths[:1, None] - 1, positions)
    keys, values = (jnp.where(held[..., None, None], x, 0).astype(jnp.float32) for x in (keys, values))
    vanilla: Any = OperationRegistry.create("vanilla", OperationMetadata())
    expected = vanilla(query[:1].astype(jnp.float32), keys, values, mask=mask).attention_outputs
    return float(jnp.abs(out[:1].astype(jnp.float32) - expected).max() / jnp.abs(expected).max())


def figures(case: Case, bandwidth: float, rounds: int, dry: bool) -> dict[str, Any]:
    """A row of the table."""
    operation: Any = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", interpret=dry, on_unsupported="error")
    )
    query, cache = problem(case)
    program = jax.jit(lambda q, c: operation(q, c, mask=Causal()).attention_outputs)
    wrong = error(program(query, cache), query, cache)
    row = case._asdict() | {
        "codec": case.codec or "none",
        "status": "ok" if wrong <= TOLERANCE else f"wrong by {wrong:.2g}",
    }
    if dry or wrong > TOLERANCE:
        return row
    seconds = measure(Ready(lambda: program(query, cache), jax.block_until_ready, None, ""), rounds).kernel_seconds
    token = 2 * case.head_dim * (1 if case.codec else 2) + (8 if case.codec else 0)
    moved = case.batch * (case.length - 1) * case.kv_heads * token
    share = {"of bandwidth": round(moved / seconds / bandwidth / 1e9, 3)} if bandwidth else {}
    return row | {"ms": round(seconds * 1e3, 4), "GB/s": round(moved / seconds / 1e9)} | share


def main(
    length: Annotated[list[int] | None, typer.Option(help="Tokens a row; may repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may repeat.")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Empty, int8, float8_e4m3fn, float8_e5m2; may repeat.")
    ] = None,
    page: Annotated[int, typer.Option(help="Slots a page.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="K.")] = 8,
    groups: Annotated[int, typer.Option(help="Query heads a kv head.")] = 8,
    head_dim: Annotated[int, typer.Option(help="D.")] = 128,
    bandwidth: Annotated[float, typer.Option(help="GB/s of the GPU's memory; 0 if unknown.")] = 0,
    rounds: Annotated[int, typer.Option(help="Of timing, of which the best counts.")] = 5,
    dry: Annotated[bool, typer.Option(help="Small cases, Triton interpreted: checked, not timed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
) -> None:
    """Check and time steps of decoding."""
    if dry:
        length, batch, kv_heads, groups, head_dim = [70], [2], 1, 2, 16
    dtype = "float16" if dry else "bfloat16"
    rows = [
        figures(Case(n, B, one, page, kv_heads, groups, head_dim, dtype), bandwidth, rounds, dry)
        for one in codec or ["", "float8_e4m3fn"] for n in length or [4096, 32768, 131072] for B in batch or [1, 8, 64]
    ]  # fmt: skip
    table = Table(title="nothing is timed in a dry run" if dry else str(jax.devices()[0].device_kind))
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
