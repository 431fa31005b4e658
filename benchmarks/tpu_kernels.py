"""Whole attention kernels on TPUs, without a TPU: every region of the compiler's schedule times how often a problem
runs it, and the bytes that the compiled program moves outside of its kernels.

attnops-tpu is compared with JAX's ``splash_attention`` and tokamax's (``pip install tokamax``), each at the best of its
block sizes, and tokamax with both schedulers of the compiler::

    python benchmarks/tpu_kernels.py --generation v6e --problem 'causal 4k' --json out.json

Figures are thousands of bundles a head, which are cycles without stalls. "outside" is the whole program's, forward and
backward, from and to [B, T, H, D]. "end to end" adds the bundles of all heads and the cycles that these bytes need at
the bandwidth of main memory. Needs Linux on x86 and ``pip install attnops-tpu[aot]``.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer
from attnops_tpu.aot import TOPOLOGIES, devices
from attnops_tpu.collectives import scheduled
from attnops_tpu.generations import target
from attnops_tpu.memory import outside_bytes
from attnops_tpu.schedule import Regions, measure
from rich.console import Console
from rich.table import Table

HEADS: Final = 8
# (tokens, mask)
PROBLEMS: Final = {
    "causal 4k": (4096, "causal"),
    "causal 8k": (8192, "causal"),
    "causal 32k": (32768, "causal"),
    "full 4k": (4096, "full"),
    "window 1024, 16k": (16384, "window"),
    "16 documents, 16k": (16384, "documents"),
}
# Peers' code does not depend on longer lengths, but masks of NumPy arrays need memory.
PEER_LENGTH: Final = 8192
# Bytes of main memory that a core can move a cycle: the published bandwidth over the clock by which the published peak
# is that of the matrix units.
BYTES_A_CYCLE: Final = {"v5e": 546, "v5p": 790, "v6e": 937, "tpu7x": 1682}
SPLASH: Final = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
TOKAMAX: Final = "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention"
# (queries, keys, keys at a time), the best of a wider search.
BLOCKS: Final = {
    False: ((1024, 1024, 1024), (1024, 2048, 512), (2048, 1024, 512), (2048, 2048, 256), (1024, 1024, 512)),
    True: ((1024, 1024, 512), (1024, 2048, 512), (2048, 1024, 512), (2048, 1024, 1024)),
}
Trips = list[tuple[str, float, float]]


class Job(NamedTuple):
    """One compilation.

    Attributes:
        name: the contender's.
        backward: which pass.
        mask: one of the masks of `PROBLEMS`.
        T: tokens.
        head_dim: of queries, keys and values.
        blocks: block sizes; empty for the library's own choice.
        experimental: whether the compiler's other scheduler is used.
    """

    name: str
    backward: bool
    mask: str
    T: int
    head_dim: int
    blocks: tuple[int, ...] = ()
    experimental: bool = False


def jobs(name: str, backward: bool, problem: str, head_dim: int) -> Iterator[Job]:
    """A contender at each of its block sizes."""
    T, mask = PROBLEMS[problem]
    if name == "attnops-tpu":
        yield Job(name, backward, mask, T, head_dim)
        return
    for blocks in BLOCKS[backward]:
        for experimental in (False, True) if name == "tokamax" and not backward else (False,):
            # Without a mask tokamax's kernel asks for a device: the same body is in its causal kernel.
            compiled = "causal" if name == "tokamax" and mask == "full" else mask
            yield Job(name, backward, compiled, min(T, PEER_LENGTH), head_dim, blocks, experimental)


def attnops_mask(kind: str, T: int) -> Any:
    from attnops.masks import Causal, Segments, SlidingWindow

    masks = {
        "causal": Causal(),
        "window": Causal() & SlidingWindow(1023, 0),
        "documents": Causal() & Segments(np.arange(T) // 1024),
    }
    return masks[kind].bind(1, HEADS, T, T) if kind in masks else None


def attnops(job: Job) -> Callable[..., Any]:
    from attnops import OperationMetadata, OperationRegistry

    flash = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    return lambda *qkv: flash(*qkv, mask=attnops_mask(job.mask, job.T)).attention_outputs


def _peer_mask(masks: Any, job: Job) -> Any:
    T = job.T
    if job.mask == "documents":
        ids = np.arange(T) // 1024
        return masks.NumpyMask((ids[:, None] == ids) & np.tri(T, dtype=bool))
    return {"full": masks.FullMask, "causal": masks.CausalMask}[job.mask]((T, T)) if job.mask != "window" else (
        masks.LocalMask((T, T), (1023, 0), 0)
    )  # fmt: skip


def _by_head(function: Callable[..., Any], head_dim: int) -> Callable[..., Any]:
    """A function of [H, T, D], of [1, T, H, D]."""

    def called(q: Any, k: Any, v: Any) -> Any:
        out = function(*(x[0].swapaxes(0, 1) for x in (q * head_dim**-0.5, k, v)))
        return out.swapaxes(0, 1)[None]

    return called


def splash(job: Job) -> Callable[..., Any]:
    kernels, masks = (importlib.import_module(f"{SPLASH}_{part}") for part in ("kernel", "mask"))
    q, k, compute = job.blocks
    sizes = kernels.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=compute, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([_peer_mask(masks, job)] * HEADS)
    return _by_head(
        kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes), job.head_dim
    )  # fmt: skip


def tokamax(job: Job) -> Callable[..., Any]:
    kernels, masks = (importlib.import_module(f"{TOKAMAX}_{part}") for part in ("kernel", "mask"))
    q, k, compute = job.blocks
    config = kernels.SplashConfig(
        block_q=q, block_kv=k, block_kv_compute=compute, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=compute,
        use_experimental_scheduler=job.experimental,
    )  # fmt: skip
    return _by_head(kernels.make_splash_mha_single_device(_peer_mask(masks, job), config=config), job.head_dim)


CONTENDERS: Final[dict[str, Callable[[Job], Callable[..., Any]]]] = {
    "attnops-tpu": attnops,
    "splash": splash,
    "tokamax": tokamax,
}


class Counts(NamedTuple):
    """Of one head: active tiles, all and by coverage, rows of tiles, and the most active tiles of a row."""

    active: int
    full: int
    rows: int
    widest: int


def counts(mask: str, T: int, block_q: int, block_k: int, by_key: bool) -> Counts:
    from attnops.masks import Coverage, block_map

    coverage = np.asarray(block_map(attnops_mask(mask, T), (1, 1, T, T), block_q, block_k).coverage)[0, 0]
    coverage = coverage.T if by_key else coverage
    active = coverage > 0
    return Counts(
        int(active.sum()), int((coverage == Coverage.FULL).sum()), len(coverage), int(active.sum(axis=1).max())
    )


def own_trips(job: Job, generation: str) -> list[tuple[int, Trips]]:
    """The grid steps and the trips of each call of the kernel."""
    import jax
    import jax.numpy as jnp
    from attnops_tpu.flash.backend import PallasFlash
    from attnops_tpu.flash.prepare import tile_schedules
    from attnops_tpu.flash.tile_schedule import KINDS, REDUCED, unpack

    from attnops import OperationMetadata
    from attnops.kernels import FlashCall
    from attnops.masks import Coverage

    x = jax.ShapeDtypeStruct((1, job.T, HEADS, job.head_dim), jnp.bfloat16)
    mask = attnops_mask(job.mask, job.T)
    with target(generation):
        plan = PallasFlash().plan(FlashCall(OperationMetadata(platform="tpu"), x, x, x, mask=mask))  # type: ignore[arg-type]
        schedules = tile_schedules(plan, mask)
    calls = []
    every = {kind for schedule in schedules.spans for kind in schedule.kinds}
    for schedule in schedules.spans if job.backward else schedules.forward:
        entries = unpack(np.asarray(schedule.entries).reshape(-1, schedule.longest + 1)[0])
        tiles = [
            ("REDUCED" if kind == REDUCED else Coverage(kind).name, float((entries.kind == kind).sum()), 0.0)
            for kind in KINDS
            if kind in (every if job.backward else schedule.kinds)
        ]
        rows, rounds = float(entries.last.sum()), job.head_dim / 8
        drains = float(((entries.kind[1:] == 0) & (entries.kind[:-1] > 0)).sum())
        if job.backward:
            trips = [("clear dq", 1.0, rounds), ("clear dk, dv", rows, rounds), *tiles, ("write", rows, 0.0)]
            calls.append((schedule.longest, trips))
        else:
            trips = [("init", 1.0, 0.0), *tiles, ("drain", drains, 0.0), ("finish", rows, 0.0), ("clear", rows, 0.0)]
            calls.append((schedule.longest + 1, trips))
    return calls


def peer_trips(job: Job, problem: str, regions: Regions) -> tuple[int, Trips]:
    """The grid steps of a head and the trips of splash, JAX's and tokamax's."""
    q, k, _ = job.blocks
    T, mask = PROBLEMS[problem]
    n = counts(mask, T, q, k, job.backward)
    # tokamax lists the active tiles, forward; other grids have as many columns as the widest row, or all.
    has_list = job.name == "tokamax" and not job.backward
    width = -(-T // (q if job.backward else k)) if job.name == "tokamax" else n.widest
    bodies = sum(region.uses["MATMUL"] > 0 for region in regions.skipped)
    tiles: dict[int, Trips] = {
        0: [],
        1: [("tiles", float(n.active), 0.0)],
        2: [("FULL", float(n.full), 0.0), ("PARTIAL", float(n.active - n.full), 0.0)],
    }
    if bodies not in tiles:
        raise LookupError(f"{job.name} has {bodies} bodies, but 0 to 2 are known: its kernel changed")
    steps = n.active if has_list else n.rows * width
    # With at most two steps a row tokamax writes in each step.
    ends = [] if len(regions.skipped) == 1 + bodies else [("end", float(n.rows), 0.0)]
    return steps, [("init", float(n.rows), 0.0), *tiles[bodies], *ends]


def run(job: Job, generation: str) -> tuple[Regions, dict[str, Any]]:
    kernel = {
        ("attnops-tpu", False): "attnops_flash_forward",
        ("attnops-tpu", True): "attnops_flash_backward",
    }.get((job.name, job.backward), "dkv" if job.backward else "fwd")
    command = [str(Path(__file__).resolve()), "child", json.dumps(job), generation]
    schedule, said = measure(command, kernel)
    return schedule.regions, json.loads(said.strip().splitlines()[-1])


def child(job: Job, generation: str) -> None:
    """What a process of its own does: compile, and print what moves outside of the kernels."""
    import jax
    import jax.numpy as jnp

    function = CONTENDERS[job.name](job)
    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    x = jax.ShapeDtypeStruct((1, job.T, HEADS, job.head_dim), jnp.bfloat16, sharding=place)

    def gradients(*args: Any) -> Any:
        return jax.vjp(function, *args[:-1])[1](args[-1])

    with target(generation):
        traced = jax.jit(gradients).trace(x, x, x, x) if job.backward else jax.jit(function).trace(x, x, x)
        lowered = traced.lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, generation)
    moved = {"outside": outside_bytes(program), "temporaries": compiled.memory_analysis().temp_size_in_bytes}
    print(json.dumps(moved))


def whole(job: Job, problem: str, generation: str, regions: Regions) -> dict[str, float]:
    """The bundles of a head, by part."""
    calls = own_trips(job, generation) if job.name == "attnops-tpu" else [peer_trips(job, problem, regions)]
    total: dict[str, float] = {}
    for steps, trips in calls:
        for part, bundles in regions.total(steps, trips).items():
            # Once a call, for all heads.
            total[part] = total.get(part, 0.0) + (bundles / HEADS if part == "once" else bundles)
    return total


def compare(generation: str, problems: list[str], head_dims: list[int], names: list[str]) -> list[dict[str, Any]]:
    """The best job of each contender, pass and problem; a failure stops the run, unless another job succeeds."""
    cached = functools.cache(run)
    rows = []
    for problem in problems:
        for head_dim in head_dims:
            for name in names:
                for backward in (False, True):
                    found, errors = [], []
                    for job in jobs(name, backward, problem, head_dim):
                        try:
                            regions, moved = cached(job, generation)
                        except RuntimeError as error:
                            errors.append(str(error).strip().splitlines()[-1][:300])
                            continue
                        parts = whole(job, problem, generation, regions)
                        found.append({
                            "generation": generation, "problem": problem, "head_dim": head_dim, "name": name,
                            "pass": "backward" if backward else "forward", "blocks": job.blocks,
                            "experimental": job.experimental, "bundles": sum(parts.values()), "parts": parts,
                            "is_whole": PROBLEMS[problem] == (job.T, job.mask),
                        } | moved)  # fmt: skip
                    if not found:
                        raise RuntimeError(f"{name} compiled with none of its block sizes: {errors}")
                    rows.append(min(found, key=lambda row: row["bundles"]))
                    print(
                        {key: rows[-1][key] for key in ("problem", "name", "pass", "blocks", "bundles")},
                        file=sys.stderr,
                    )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each contender, with ratios of attnops-tpu's bundles to its."""
    shown = Table(title="Thousands of bundles a head, bfloat16; in brackets attnops-tpu relative to it")
    for column in (
        "TPU",
        "problem",
        "D",
        "kernel",
        "forward",
        "backward",
        "outside MB",
        "temporaries MB",
        "end to end",
    ):
        shown.add_column(column, justify="left" if column in ("problem", "kernel") else "right", no_wrap=True)
    cases = dict.fromkeys((r["generation"], r["problem"], r["head_dim"], r["name"]) for r in rows)
    own: dict[str, float] = {}
    for generation, problem, head_dim, name in cases:
        case = generation, problem, head_dim, name
        passes = {r["pass"]: r for r in rows if (r["generation"], r["problem"], r["head_dim"], r["name"]) == case}
        last = passes["backward"]
        cost = {key: row["bundles"] for key, row in passes.items()}
        if last["is_whole"] and generation in BYTES_A_CYCLE:
            cost["end"] = sum(cost.values()) * HEADS + last["outside"] / BYTES_A_CYCLE[generation]
        if name == "attnops-tpu":
            own = cost
        texts = {key: f"{x / 1e3:.1f}" + (f" ({own[key] / x:.2f})" if key in own and name != "attnops-tpu" else "")
                 for key, x in cost.items()}  # fmt: skip
        moved = [f"{last[key] / 1e6:.1f}" if last["is_whole"] else "" for key in ("outside", "temporaries")]
        shown.add_row(
            generation, problem, str(head_dim), name, texts["forward"], texts["backward"], *moved, texts.get("end", "")
        )
    return shown


def main(
    generation: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TOPOLOGIES)}; may be repeated.")] = None,
    problem: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PROBLEMS)}; may be repeated.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CONTENDERS)}; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Add up whole attention kernels on TPUs, with no TPU."""
    for name, given, known in (("--generation", generation, TOPOLOGIES), ("--problem", problem, PROBLEMS),
                               ("--only", only, CONTENDERS)):  # fmt: skip
        if not set(given or []) <= set(known):
            raise typer.BadParameter(f"{name} must be of {', '.join(known)}, not {', '.join(given or [])}")
    rows = [
        row
        for each in generation or ["v6e", "tpu7x"]
        for row in compare(each, problem or list(PROBLEMS), head_dim or [128], only or list(CONTENDERS))
    ]
    if output:
        output.write_text(json.dumps(rows, indent=1))
    console = Console(width=max(Console().width, 150))
    console.print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Job(*json.loads(sys.argv[2])), sys.argv[3])
    else:
        typer.run(main)
