"""Figures on a CPU: `flash` against jax.nn and torch, `vanilla` against jax.nn, time saved by skipped tiles, memory.

``kernel`` is attnops-cpu's `flash`, if it is installed; every other `flash` here is the native one. ``products`` is the
time of only the forward pass's matrix products, without softmax and mask.

Run ``python benchmarks/cpu.py`` (``--quick`` for two minutes, ``--json FILE`` to keep the figures) on an idle machine;
torch is measured if it is installed. All contenders are checked against the float64 oracle, and then timed in turns in
one run; the best time is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnops.masks import Causal, Coverage, Mask, SlidingWindow, block_map
from attnops.operations.flash.tile_sizes import choose_problems_per_tile, choose_tiles, table_row
from attnops_testing.bench import (
    Case,
    Contender,
    Measurement,
    describe_machine,
    find,
    measure,
    one_line,
    packed_documents,
    peak_rss,
)
from attnops_testing.bench.truth import Truth

PEERS = ("jax.nn", "torch")
NATIVE = "attnops:flash"
# The operations of the causal table, and their columns.
CONTENDERS = {NATIVE: "flash"} | ({"attnops-cpu:flash": "kernel"} if importlib.util.find_spec("attnops_cpu") else {})
# The goals: flash is at least as fast as jax.nn and torch at any length; at T = 4,096 it is this many times as fast as
# jax.nn, forward and forward + backward; ...
AT_4096 = {False: 5.0, True: 7.0}
# ... with a mask it needs at most this multiple of (share of active tiles) · (time without a mask), ...
SHARE = 1.3
# ... the reference, vanilla, needs at most this multiple of jax.nn's time, ...
REFERENCE = 1.2
# ... and flash needs at most this many bytes, with temporaries that grow at most by this factor from T to 4 T.
PEAK_BYTES, GROWTH = 2e9, 4.5

# Contenders that need more memory are left out: at T = 16,384 jax.nn's scores alone are 8.6 GB in float32, and it holds
# several such arrays.
MEMORY_LIMIT = int(6e9)
# A contender is not timed a third time if its first two timings took longer than this.
MOST_SECONDS = 3
DTYPES = ("float32", "bfloat16")
PASSES = {False: "forward", True: "forward + backward"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of what is measured."""

    lengths: Sequence[int] = (1024, 2048, 4096, 8192, 16384)
    head_dims: Sequence[int] = (64, 128)
    reference_lengths: Sequence[int] = (128, 256, 512, 1024, 2048)
    sparse_length: int = 16384
    sparse_passes: Sequence[bool] = (False, True)
    long: int = 65536
    rounds: int = 4


QUICK = Sizes(lengths=(1024, 2048), head_dims=(64,), sparse_length=8192, sparse_passes=(False,), long=16384, rounds=3,
              reference_lengths=(128, 512))  # fmt: skip


def run(entries: list[tuple[Case, Contender]], sizes: Sizes, title: str) -> list[Measurement]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=len(entries) * (sizes.rounds + 1))

        def step(what: str, steps: int) -> None:
            progress.update(task, advance=steps, description=f"{title}, {what}")

        return measure(entries, rounds=sizes.rounds, most_seconds=MOST_SECONDS, progress=step)


def causal(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """flash, attnops-cpu's kernels, jax.nn and torch at each length."""
    for dtype in DTYPES:
        for head_dim in sizes.head_dims:
            for length in sizes.lengths:
                for backward, name in PASSES.items():
                    case = Case(length=length, head_dim=head_dim, dtype=dtype, mask=Causal(), backward=backward,
                                memory_limit=MEMORY_LIMIT)  # fmt: skip
                    names = CONTENDERS | {p: p for p in PEERS}
                    entries = [
                        (case, dataclasses.replace(contender, name=name))
                        for name, contender in zip(names.values(), find([*names]), strict=True)
                    ]
                    measured = run(entries, sizes, f"{dtype} D{head_dim} T{length} {name}")
                    times = {m.name: m.best for m in measured}
                    yield {
                        "dtype": dtype, "D": head_dim, "T": length, "pass": name, "seconds": times,
                        "goal": {p: AT_4096[backward] if (p, length) == ("jax.nn", 4096) else 1.0 for p in PEERS},
                        "median": {m.name: m.median for m in measured},
                        "ratio": {p: _ratio(times[p], times["flash"]) for p in PEERS},
                        "of kernel": {p: _ratio(times[p], times["kernel"]) for p in times if "kernel" in times},
                        "floor": None if backward else products_floor(case),
                        "temp_bytes": {m.name: m.temp_bytes for m in measured},
                        "not timed": {m.name: f"{m.status}: {m.reason}" for m in measured if m.status != "ok"},
                    }  # fmt: skip


def products_floor(case: Case) -> float:
    """The seconds of only the matrix products of a forward pass over the tiles that `flash` visits, with operands in
    the processor's cache.

    Tile sizes are those of `flash`, which were chosen by the speed of XLA's products on this CPU for various sizes,
    dtypes and layouts.
    """
    dtype = jnp.dtype(case.dtype)
    groups, row = case.heads // case.K, table_row(dtype == jnp.bfloat16, case.head_dim)
    block_q, block_k = choose_tiles(case.length, case.length, groups, None, None, row)
    scores = groups * block_q * block_k
    problems = choose_problems_per_tile(case.batch, case.K, scores, False, False, False, row)
    coverage = block_map(case.mask, case.shape, block_q, block_k).coverage
    tiles = round(float((coverage != Coverage.EMPTY).mean()) * coverage.shape[2] * coverage.shape[3])
    tiles *= case.batch * case.K // problems
    q = jnp.ones((problems, groups * block_q, case.head_dim), dtype)
    k = jnp.ones((problems, block_k, case.head_dim), dtype)

    def products(q: jax.Array, k: jax.Array, count: int) -> jax.Array:
        def tile(_: int, q: jax.Array) -> jax.Array:
            s = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
            out = lax.dot_general(s.astype(dtype), k, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
            return (out * 1e-6).astype(dtype)  # the next step depends on it, so that no product is left out

        return lax.fori_loop(0, count, tile, q)

    count = min(tiles, 64)
    run = jax.jit(products, static_argnums=2).lower(q, k, count).compile()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run(q, k).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best / count * tiles


def sparse(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Masks with empty tiles, and no mask. The documents' ids are traced."""
    T = sizes.sparse_length
    documents = packed_documents(16, T)
    masks: dict[str, Mask | None] = {
        "full": None,
        "causal": Causal(),
        "causal window of 1,024": Causal() & SlidingWindow(1023, 0),
        "16 documents": documents,
        "16 documents, causal": Causal() & documents,
    }
    flash = find([NATIVE])[0]
    for dtype in DTYPES:
        for backward in sizes.sparse_passes:
            cases = [Case(length=T, dtype=dtype, mask=mask, backward=backward) for mask in masks.values()]
            entries = [(case, dataclasses.replace(flash, name=name)) for case, name in zip(cases, masks, strict=True)]
            measured = run(entries, sizes, f"{dtype} T{T} {PASSES[backward]}")
            full = measured[0].best
            for m in measured:
                visited, of_full = _visited(m.case), _ratio(m.best, full)
                yield {
                    "dtype": dtype, "T": T, "pass": PASSES[backward], "mask": m.name, "seconds": m.best,
                    "visited": visited, "of full": of_full, "share": _ratio(of_full, visited), "not timed": m.reason,
                }  # fmt: skip


def reference(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The reference, `vanilla`, and jax.nn, which does the same computation, at lengths of tests and small models."""
    for backward, name in PASSES.items():
        for length in sizes.reference_lengths:
            case = Case(length=length, mask=Causal(), backward=backward)
            more = dataclasses.replace(sizes, rounds=5 * sizes.rounds)  # calls this short need more rounds
            measured = run([(case, contender) for contender in find(["vanilla", "jax.nn"])], more, f"T{length} {name}")
            times = {m.name: m.best for m in measured}
            yield {
                "dtype": case.dtype, "D": case.head_dim, "T": length, "pass": name, "seconds": times,
                "median": {m.name: m.median for m in measured}, "ratio": _ratio(times["vanilla"], times["jax.nn"]),
                "not timed": {m.name: f"{m.status}: {m.reason}" for m in measured if m.status != "ok"},
            }  # fmt: skip


def _visited(case: Case) -> float:
    """The share of flash's tiles that are not empty."""
    blocks = choose_tiles(case.length, case.length, case.heads // case.K, None, None)
    coverage = block_map(case.mask, case.shape, *blocks).coverage
    return float((coverage != Coverage.EMPTY).mean())


def memory(sizes: Sizes) -> dict[str, Any]:
    """The memory of forward and backward over a long sequence, in a separate process, and the temporaries at a quarter
    of its length.
    """
    command = [sys.executable, __file__, "--long", str(sizes.long)]
    with Console(stderr=True).status(f"T{sizes.long} forward + backward in a separate process"):
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, Any] = json.loads(child.stdout)
        short = find([NATIVE])[0].prepare(_long_case(sizes.long // 4))
    growth = _ratio(figures["temp_bytes"], short.temp_bytes)
    return figures | {"temp_bytes_quarter": short.temp_bytes, "growth": growth}


def _long_case(length: int) -> Case:
    return Case(length=length, heads=2, mask=Causal(), backward=True)


def long(length: int) -> None:
    """In a separate process, started by `memory`: print the memory."""
    case = _long_case(length)
    before = peak_rss()
    program = find([NATIVE])[0].prepare(case)
    truth = Truth(case)
    results = program.results(truth.d_out)
    peak = peak_rss()  # before the oracle allocates
    truth.check(results)
    print(json.dumps({"T": length, "peak_rss": peak, "start_rss": before, "temp_bytes": program.temp_bytes}))


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _met(met: bool | None) -> str:
    return "–" if met is None else "[green]met[/]" if met else "[red]not met[/]"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("dtype", "pass", "mask", "what") else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    console.print(f"\n[bold]{title}[/]")
    console.print(table)


def report_causal(figures: list[dict[str, Any]]) -> None:
    rows = []
    for x in figures:
        peers = [cell for p in PEERS for cell in (
            _number(x["ratio"][p], ".2f"), f"{x['goal'][p]:g}",
            _met(None if x["ratio"][p] is None else x["ratio"][p] >= x["goal"][p]))]  # fmt: skip
        times = [_number(s and s * 1e3, ",.1f") for s in (*x["seconds"].values(), x["floor"])]
        kernel = [_number(ratio, ".2f") for name, ratio in x["of kernel"].items() if name != "kernel"]
        rows.append([x["dtype"], str(x["D"]), f"{x['T']:,}", x["pass"], *times, *peers, *kernel])
    peers = [cell for p in PEERS for cell in (f"× {p}", "≥", "")]
    kernel = [f"kernel × {name}" for name in figures[0]["of kernel"] if name != "kernel"]
    columns = ["dtype", "D", "T", "pass", *figures[0]["seconds"], "products", *peers, *kernel]
    _print("Causal, B1 H8, best time in ms", columns, rows)
    notes = {f"{name} {reason}" for x in figures for name, reason in x["not timed"].items()}
    for note in sorted(notes):
        Console().print(f"Not timed: {note}", highlight=False, soft_wrap=True)


def report_reference(figures: list[dict[str, Any]]) -> None:
    rows = [
        [x["dtype"], str(x["D"]), f"{x['T']:,}", x["pass"],
         *(_number(s and s * 1e3, ",.2f") for s in x["seconds"].values()),
         _number(x["ratio"], ".2f"), _met(x["ratio"] and x["ratio"] <= REFERENCE)]
        for x in figures
    ]  # fmt: skip
    columns = ["dtype", "D", "T", "pass", "vanilla", "jax.nn", "vanilla / jax.nn", f"≤ {REFERENCE}"]
    _print("The reference, causal, B1 H8, best time in ms", columns, rows)


def report_sparse(figures: list[dict[str, Any]]) -> None:
    rows = [
        [x["dtype"], x["pass"], x["mask"], _number(x["seconds"] and x["seconds"] * 1e3, ",.1f"), f"{x['visited']:.3f}",
         _number(x["of full"], ".3f"), _number(x["share"], ".2f"), _met(x["share"] and x["share"] <= SHARE)]
        for x in figures
    ]  # fmt: skip
    columns = ["dtype", "pass", "mask", "flash", "tiles visited", "of full time", "time / tiles", f"≤ {SHARE}"]
    _print(f"Skipped tiles, B1 H8 D64, T = {figures[0]['T']:,}, best time in ms", columns, rows)


def report_memory(m: dict[str, Any]) -> None:
    rows = [
        ["peak memory of the process", f"{m['peak_rss'] / 1e6:,.0f} MB", _met(m["peak_rss"] < PEAK_BYTES)],
        ["of it Python and JAX", f"{m['start_rss'] / 1e6:,.0f} MB", ""],
        [f"temporaries at T = {m['T']:,}", f"{m['temp_bytes'] / 1e6:,.0f} MB", ""],
        [f"temporaries at T = {m['T'] // 4:,}", f"{m['temp_bytes_quarter'] / 1e6:,.0f} MB", _met(m["growth"] < GROWTH)],
    ]
    title = f"Memory, B1 H2 D64 float32, T = {m['T']:,}, causal forward + backward"
    _print(title, ["what", "measured", f"< {PEAK_BYTES / 1e9:g} GB, < {GROWTH} ×"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--only", choices=("memory", "reference", "sparse", "causal"), help="only this table")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the causal table, in place of 1k to 16k")
    parser.add_argument("--long", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.long:
        long(arguments.long)
        return
    sizes = QUICK if arguments.quick else Sizes()
    if arguments.lengths:
        sizes = dataclasses.replace(sizes, lengths=tuple(arguments.lengths))
    machine = describe_machine()
    Console().print(one_line(machine), highlight=False)
    figures: dict[str, Any] = {"machine": machine}
    sections = (
        ("memory", memory, report_memory),
        ("reference", lambda sizes: list(reference(sizes)), report_reference),
        ("sparse", lambda sizes: list(sparse(sizes)), report_sparse),
        ("causal", lambda sizes: list(causal(sizes)), report_causal),
    )
    for name, section, show in sections:
        if arguments.only not in (None, name):
            continue
        figures[name] = section(sizes)
        show(figures[name])
        if arguments.json:  # after each section, in case the run ends early
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
