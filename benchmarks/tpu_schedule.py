"""The TPU compiler's schedule of a kernel, without a TPU: bundles (cycles without stalls) per tile, the use of each
unit, spills and memory, for any generation. `tpu_kernels.py` adds up whole kernels; this script reads only the step
that computes a tile without a mask.

Flash attention: attnops-tpu compared with JAX's ``flash_attention`` and ``splash_attention``, each at the best of its
block sizes::

    python benchmarks/tpu_schedule.py                       # bfloat16, head dim 128, all generations
    python benchmarks/tpu_schedule.py --generation v6e --head-dim 64 --pass forward --json out.json --plot out.png

Any other Pallas kernel::

    python benchmarks/tpu_schedule.py --function my_module:my_function --argument 'bfloat16[8,4096,128]' --tiles 4

Needs Linux on x86 and ``pip install attnops-tpu[aot] rich typer``. Compiling takes about ten seconds per kernel.
The columns are uses of a core's units (`attnops_tpu.schedule.UNITS`); that module reads schedules of other programs.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnops_tpu.aot import TOPOLOGIES, compile_for
from attnops_tpu.schedule import UNITS, Schedule, in_tiles, measure

# Figures are for this many scores.
TILE = 512 * 512
LENGTH, HEADS = 4096, 2
PASSES = ("forward", "backward")


class Job(NamedTuple):
    """One compilation.

    Attributes:
        name: the contender's name.
        backward: which pass.
        blocks: its block sizes, queries and keys; empty for the library's own choice.
        tiles: the number of tiles of `TILE` scores that the kernel's body computes.
        kernel: a part of the kernel's name.
    """

    name: str
    backward: bool
    blocks: tuple[int, ...]
    tiles: float
    kernel: str


def jobs(backward: bool) -> Iterator[Job]:
    """Every contender at every of its block sizes."""
    kernel = "attnops_flash_backward" if backward else "attnops_flash_forward"
    yield Job("attnops-tpu", backward, (), 0, kernel)
    # The best of a wider search for each generation, and the smallest for comparison.
    sizes = ((512, 512, 512), (1024, 2048, 512), (2048, 1024, 512), (1024, 1024, 1024), (2048, 512, 512),
             (2048, 2048, 256))  # fmt: skip
    if backward:
        sizes = ((512, 512, 512), (1024, 1024, 512), (1024, 2048, 512), (2048, 1024, 512), (2048, 1024, 1024))
    for q, k, compute in sizes:
        tiles = q * k / TILE
        yield Job("splash", backward, (q, k, compute), tiles, "dkv" if backward else "splash")
    if not backward:
        for q, k in ((512, 512), (512, 1024), (1024, 512), (1024, 1024)):
            yield Job("flash_attention", backward, (q, k), q * k / TILE, "")


def attnops(job: Job, head_dim: int) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry

    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    shape = jax.ShapeDtypeStruct((1, LENGTH, HEADS, head_dim), jnp.bfloat16)
    function = functools.partial(_outputs, operation)
    return (_gradients(function), [shape] * 4) if job.backward else (function, [shape] * 3)


def _outputs(operation: Any, *qkv: Any) -> Any:
    return operation(*qkv).attention_outputs


def _gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])


def splash(job: Job, head_dim: int) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    module = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
    kernels, masks = (importlib.import_module(f"{module}_{part}") for part in ("kernel", "mask"))
    q, k, compute = job.blocks
    if job.backward:
        blocks = kernels.BlockSizes(block_q=512, block_kv=512, block_q_dkv=q, block_kv_dkv=k,
                                    block_kv_dkv_compute=compute, use_fused_bwd_kernel=True)  # fmt: skip
    else:
        blocks = kernels.BlockSizes(block_q=q, block_kv=k, block_kv_compute=compute)
    mask = masks.MultiHeadMask([masks.FullMask((LENGTH, LENGTH))] * HEADS)
    function = kernels.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, save_residuals=not job.backward
    )
    shape = jax.ShapeDtypeStruct((HEADS, LENGTH, head_dim), jnp.bfloat16)
    return (_gradients(function), [shape] * 4) if job.backward else (function, [shape] * 3)


def flash_attention(job: Job, head_dim: int) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as peer

    q, k = job.blocks
    blocks = peer.BlockSizes(block_q=q, block_k_major=k, block_k=k, block_b=1)
    shape = jax.ShapeDtypeStruct((1, HEADS, LENGTH, head_dim), jnp.bfloat16)
    return functools.partial(peer.flash_attention, block_sizes=blocks), [shape] * 3


CONTENDERS: dict[str, Callable[[Job, int], tuple[Callable[..., Any], list[Any]]]] = {
    "attnops-tpu": attnops,
    "splash": splash,
    "flash_attention": flash_attention,
}


def run(task: dict[str, Any], generation: str, kernel: str) -> tuple[Schedule, dict[str, Any]]:
    """Compile in a separate process, and read the schedule and the memory figures."""
    command = [str(Path(__file__).resolve()), "child", json.dumps(task), generation]
    schedule, printed = measure(command, kernel or None)
    return schedule, json.loads(printed.strip().splitlines()[-1])


def child(task: dict[str, Any], generation: str) -> None:
    """In a separate process: compile, and print the memory figures."""
    import jax

    if "function" in task:
        module, name = task["function"].split(":")
        sys.path.insert(0, os.getcwd())
        function = getattr(importlib.import_module(module), name)
        arguments = []
        for text in task["arguments"]:
            dtype, dims = text.rstrip("]").split("[")
            arguments.append(jax.ShapeDtypeStruct(tuple(int(n) for n in dims.split(",") if n), dtype))
        tiles = None
    else:
        job = Job(*task["job"])
        function, arguments = CONTENDERS[job.name](job, task["head_dim"])
        tiles = job.tiles or _attnops_tiles(task["head_dim"], generation)
    memory = compile_for(function, arguments, generation).memory_analysis()
    print(json.dumps({"temporaries": memory.temp_size_in_bytes, "code": memory.generated_code_size_in_bytes,
                      "tiles": tiles}))  # fmt: skip


def _attnops_tiles(head_dim: int, generation: str) -> float:
    from attnops import OperationMetadata
    from attnops_tpu.flash.tile_sizes import Problem, Work, choose
    from attnops_tpu.generations import target

    problem = Problem(T=LENGTH, S=LENGTH, G=1, D=head_dim, Dv=head_dim, itemsize=2, out_itemsize=2)

    def all_full(bq: int, bk: int, _: Any) -> Work:
        tiles = -(-LENGTH // bq) * -(-LENGTH // bk)
        return Work(tiles, tiles, 1)

    with target(generation):
        tiles = choose(OperationMetadata(), problem, all_full)
    return tiles.bq * tiles.bk / TILE


def compare(
    generations: list[str], head_dims: list[int], passes: list[str], only: list[str], workers: int
) -> list[dict[str, Any]]:
    """Each contender at the best of its block sizes."""
    work = [(g, d, p, job) for g in generations for d in head_dims for p in passes for job in jobs(p == "backward")
            if not only or job.name in only]  # fmt: skip
    rows: list[dict[str, Any]] = []

    def row_of(item: tuple[str, int, str, Job]) -> dict[str, Any]:
        generation, head_dim, name, job = item
        row = {"generation": generation, "head_dim": head_dim, "pass": name, "name": job.name, "blocks": job.blocks}
        try:
            schedule, memory = run({"job": job, "head_dim": head_dim}, generation, job.kernel)
        except (RuntimeError, LookupError) as error:
            return row | {"error": str(error).strip().splitlines()[-1][:300]}
        tiles = job.tiles or memory["tiles"]
        return row | in_tiles(schedule.body, tiles) | {"capacity": dict(schedule.capacity), "tiles": tiles,
                                                        "temporaries": memory["temporaries"]}  # fmt: skip

    with Progress(console=Console(stderr=True)) as progress, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        task = progress.add_task("compiling", total=len(work))
        for row in pool.map(row_of, work):
            progress.advance(task)
            rows.append(row)
    return rows


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each contender and case, the row with the fewest bundles; a failed row if all failed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["generation"], row["head_dim"], row["pass"], row["name"]), []).append(row)
    return [min(group, key=lambda row: row.get("bundles", float("inf"))) for group in groups.values()]


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each contender and case, with its bundles relative to splash's."""
    shown = Table(title="Bundles by 512 × 512 scores, bfloat16, nothing masked; each at its best block sizes")
    columns = ("TPU", "D", "pass", "kernel", "blocks", "bundles", "× splash", "matrix unit", *UNITS)
    for column in columns:
        shown.add_column(column, justify="left" if column in ("TPU", "pass", "kernel") else "right", no_wrap=True)
    for row in rows:
        case = (row["generation"], str(row["head_dim"]), row["pass"], row["name"], "×".join(map(str, row["blocks"])))
        if "bundles" not in row:
            shown.add_row(*case, "failed", row["error"][:40])
            continue
        peer = next((r["bundles"] for r in rows if r["name"] == "splash" and "bundles" in r
                     and all(r[key] == row[key] for key in ("generation", "head_dim", "pass"))), None)  # fmt: skip
        busy = row["MATMUL"] / row["bundles"] / row["capacity"]["MATMUL"]
        shown.add_row(
            *case, f"{row['bundles']:.0f}", f"{row['bundles'] / peer:.2f}" if peer else "", f"{busy:.0%}",
            *(f"{row[unit]:.0f}" for unit in UNITS),
        )  # fmt: skip
    return shown


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw bundles as bars, grouped by case; needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "bundles" in row]
    cases = list(dict.fromkeys((r["pass"], r["head_dim"], r["generation"]) for r in rows))
    names = list(dict.fromkeys(r["name"] for r in rows))
    figure = Figure(figsize=(2 + 0.9 * len(cases), 5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        heights = [next((r["bundles"] for r in rows if r["name"] == name
                         and (r["pass"], r["head_dim"], r["generation"]) == case), 0) for case in cases]  # fmt: skip
        axes.bar([x + 0.8 * i / len(names) for x in range(len(cases))], heights, 0.8 / len(names), label=name)
    axes.set_xticks([x + 0.4 for x in range(len(cases))], [f"{g}\nD {d}\n{p}" for p, d, g in cases])
    axes.set_ylabel("bundles by 512 × 512 scores")
    axes.legend()
    figure.savefig(path, dpi=150)


# A parameter for each option of the command line, which typer reads from the signature.
def main(
    generation: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}; may be repeated.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="forward, backward; may be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CONTENDERS)}; may be repeated.")] = None,
    function: Annotated[str, typer.Option(help="module:name of any function, in place of the comparison.")] = "",
    argument: Annotated[
        list[str] | None, typer.Option(help="The function's arguments, such as 'bfloat16[8,128]'.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="A part of the kernel's name; else the largest.")] = "",
    tiles: Annotated[float, typer.Option(help="Tiles that the kernel's body computes.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Compilations at a time.")] = 2,
    output: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="File for a picture of the comparison.")] = None,
) -> None:
    """Count the bundles of Pallas TPU kernels, with no TPU."""
    for name, given, known in (("--generation", generation, TOPOLOGIES), ("--pass", passes, PASSES),
                               ("--only", only, CONTENDERS)):  # fmt: skip
        if not set(given or []) <= set(known):
            raise typer.BadParameter(f"{name} is {', '.join(given or [])}; it must be one of {', '.join(known)}")
    if function and picture:
        raise typer.BadParameter("--plot draws the comparison, which --function replaces; leave one of them out")
    console = Console(width=max(Console().width, 190))
    generations = generation or list(TOPOLOGIES)
    if function:
        rows = []
        for name in generations:
            schedule, memory = run({"function": function, "arguments": argument or []}, name, kernel)
            for block in schedule.blocks:
                rows.append({"generation": name, "kernel": schedule.kernel} | in_tiles(block, tiles) | memory)
        shown = Table("TPU", "bundles", *UNITS, title=f"Long blocks of {function}, by tile")
        for row in rows:
            shown.add_row(row["generation"], f"{row['bundles']:.1f}", *(f"{row[unit]:.1f}" for unit in UNITS))
        console.print(shown)
    else:
        rows = compare(generations, head_dim or [128], passes or list(PASSES), only or [], workers)
        console.print(table(best_of(rows)))
    if output:
        output.write_text(json.dumps(rows, indent=1))
    if picture:
        plot(best_of(rows), picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(json.loads(sys.argv[2]), sys.argv[3])
    else:
        typer.run(main)
