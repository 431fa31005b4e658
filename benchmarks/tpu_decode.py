"""The static schedule of the TPU kernel over caches, without a TPU, for one token a row over pages: R, the bundles of
the loop over a tile of keys, divided by the cycles in which the tile's useful bytes come from main memory::

    python benchmarks/tpu_decode.py                                       # v5e, v6e and tpu7x
    python benchmarks/tpu_decode.py --generation v6e --page 16 --kv-heads 1 --json out.json

A bundle is a cycle where nothing stalls. The loop is of tiles that are whole and have nothing to mask; the issue of
transfers and the loop's own bundles are included. At R below 1 the kernel is not bound by computation. No TPU ran it.

Needs Linux on x86 and ``pip install attnops-tpu[aot]``. Compiling takes some ten seconds a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from attnops_tpu.aot import compile_for
from attnops_tpu.schedule import Schedule, Span, measure
from rich.console import Console
from rich.table import Table

# Bytes of main memory a cycle and core.
BYTES: Final = {"v4": 651, "v5e": 546, "v5p": 790, "v6e": 937, "tpu7x": 1682}
SLOTS: Final = 1 << 17
ROWS: Final = 8
KERNEL: Final = "attnops_ragged"


class Case(NamedTuple):
    """What is compiled: slots a page, kv heads, query heads of each, and the head dim."""

    page: int
    kv_heads: int
    groups: int
    head_dim: int = 128


def child(case: Case, generation: str) -> None:
    """What a process of its own does: compile, and print the keys of a tile and its buffers."""
    import jax
    import jax.numpy as jnp
    from attnops_tpu.generations import target
    from attnops_tpu.ragged.attention import make_plan

    from attnops import OperationMetadata, OperationRegistry
    from attnops.caches import Cache, PagedCache
    from attnops.kernels import FlashCall
    from attnops.masks import Causal

    page, K, G, D = case
    # Larger than vector memory, in which the compiler would keep it.
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=ROWS, pages=ROWS * SLOTS // page, page_size=page, max_pages=SLOTS // page,
                                  kv_heads=K, head_dim=D)
    )  # fmt: skip
    metadata = OperationMetadata(platform="tpu", on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    query = jax.ShapeDtypeStruct((ROWS, 1, K * G, D), jnp.bfloat16)

    def run(query: jax.Array, cache: Cache) -> jax.Array:
        return operation(query, cache, mask=Causal()).attention_outputs

    compile_for(run, (query, cache), generation)
    keys = jax.ShapeDtypeStruct((ROWS, SLOTS, K, D), jnp.bfloat16)
    with target(generation):
        plan = make_plan(FlashCall(metadata, query, keys, keys), cache, False)
    print(json.dumps({"keys": plan.bk, "units": plan.units, "buffers": plan.buffers}))


def loop(schedule: Schedule) -> int:
    """Bundles of the loop over tiles, for one whose transfer and computation are in straight-line code."""
    # Of a tile's two bodies the one that masks is longer, and follows the other.
    inner = [span for span in schedule.spans if span.depth == 2]
    masked = max(inner, key=lambda span: span.stop - span.start)
    plain = next(span for span in inner if span.stop == masked.start)
    around = min(
        (x for x in schedule.spans if x.depth == 1 and x.start < plain.start and masked.stop <= x.stop),
        key=lambda span: span.stop - span.start,
    )
    # A new piece of the table is taken once in 128 pages.
    pieces = sum(x.stop - x.start for x in outermost(inner) if around.start < x.start and x.stop <= plain.start)
    return (masked.start - around.start) - pieces + (around.stop - masked.stop)


def outermost(spans: list[Span]) -> list[Span]:
    """Those that are in no other."""
    return [x for x in spans if not any(y != x and y.start <= x.start and x.stop <= y.stop for y in spans)]


def figures(case: Case, generation: str) -> dict[str, Any]:
    """A line of the table."""
    schedule, said = measure([str(Path(__file__).resolve()), "child", json.dumps(case), generation], KERNEL)
    tile = json.loads(said.strip().splitlines()[-1])
    bundles, token = loop(schedule), 2 * case.kv_heads * case.head_dim * 2
    useful = tile["keys"] * token
    return {
        "generation": generation, **case._asdict(), "keys": tile["keys"], "bundles": bundles,
        "R": bundles / (useful / BYTES[generation]), "transfers": 2 * tile["units"],
        "smallest": case.page * token // 2, "in flight": (tile["buffers"] - 1) * useful,
        "kernel": schedule.bundles,
    }  # fmt: skip


def main(
    generation: Annotated[list[str], typer.Option()] = ["v5e", "v6e", "tpu7x"],  # noqa: B006
    page: Annotated[list[int], typer.Option()] = [16, 64, 256],  # noqa: B006
    kv_heads: Annotated[list[int], typer.Option()] = [8, 1],  # noqa: B006
    groups: Annotated[list[int], typer.Option()] = [4],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print R and what goes with it."""
    lines = [
        figures(Case(p, k, g), of) for of in generation for k in kv_heads for g in groups for p in page
    ]  # fmt: skip
    table = Table("", *list(lines[0])[1:])
    for line in lines:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in line.values()))
    Console(width=140).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Case(*json.loads(sys.argv[2])), sys.argv[3])
    else:
        typer.run(main)
