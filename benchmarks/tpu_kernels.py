"""The cost of whole attention kernels for TPUs, estimated without a TPU: for every region of the compiler's schedule,
its bundles (instruction words) times the number of times that a problem runs it; and the bytes that the compiled
program moves outside of its kernels.

attnops-tpu is compared with tokamax's splash attention and flywheel-tpu's flash attention, each at the best of its
block sizes and options, and with ``--only splash`` with JAX's ``splash_attention``::

    python benchmarks/tpu_kernels.py --generation v6e --problem 'causal 4k' --json out.json

A peer's kernel has the same code for every length, so each of its candidates (`BLOCKS`, and tokamax's options) is
compiled for a causal mask of 4,096 tokens, and the bundles of each problem are estimated from that. Then the best
candidate of the forward pass, and the best two within 5% of the backward pass, are compiled for the problem itself.
Every result is kept in the ``--json`` file, and a run with the same file continues where the last one ended; results of
other versions of the code are measured again. Block sizes that the compiler refuses are left out. Any other failure
stops the run, such as a peer's changed interface. flywheel has no backward pass for windows and documents.

Figures are thousands of bundles (cycles without stalls) per head. "outside" is the bytes that the whole program moves
outside of kernels, forward and backward, from and to [B, T, H, D]. "code" is the bundles of the code of the forward
and of the backward kernel, each once: a kernel of 55 thousand was 3.4 times slower on a v6e than one of 35 thousand.
"end to end" is the sum of the bundles of all heads and of the cycles that these bytes need at the bandwidth of main
memory; for a peer, with the backward candidate whose sum is smallest. "of peak" are the products of visible scores
(four operations a score and feature forward, ten backward) as a share of the published peak. Needs Linux on x86, Python
3.12 and ``pip install -r benchmarks/requirements-tpu.txt``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import tpu_flywheel
import typer
from rich.console import Console
from rich.table import Table
from tpu_contenders import (
    BATCH,
    CONTENDERS,
    DIAGONAL,
    HEADS,
    REDUCTION,
    SCHEDULER,
    KernelJob,
    bundles_per_head,
    child,
    pairs,
    traced,
)

from attnops_tpu.aot import TOPOLOGIES
from attnops_tpu.schedule import Region, Regions, measure

# (tokens, mask)
PROBLEMS: Final = {
    "causal 4k": (4096, "causal"),
    "causal 8k": (8192, "causal"),
    "causal 32k": (32768, "causal"),
    "full 4k": (4096, "full"),
    "window 1024, 16k": (16384, "window"),
    "window 4096, 32k": (32768, "wide window"),
    "16 documents, 16k": (16384, "documents"),
    # Measured for attnops-tpu only.
    "32 packed sequences, 8k": (8192, "packed"),
    "1 of 8 blocks of 512, 16k": (16384, "blocks"),
    "full 16k": (16384, "full"),
}
SCREENED: Final = (4096, "causal")
# HBM bytes per cycle and core: the published bandwidth divided by the clock at which the matrix units reach the
# published peak.
BYTES_A_CYCLE: Final = {"v5e": 546, "v5p": 790, "v6e": 937, "tpu7x": 1682}
# Block sizes (queries, keys, keys at a time) of splash by whether the pass is backward: the best of a wider search on
# v6e. The forward search had {1024, 2048} × {1024, 2048}, 4096 × 1024 and some of 512, with 256, 512 or 1024 keys at a
# time.
BLOCKS: Final = {
    False: ((1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 512), (2048, 2048, 512), (512, 1024, 512)),
    True: ((1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 512), (2048, 1024, 1024), (512, 1024, 512)),
}
# Block sizes, options and layouts that tokamax's own tables, which were measured on v6e and tpu7x, have for D 128.
LAYOUTS: Final = {"v6e": " shh", "tpu7x": " hsh"}
TOKAMAX: Final = {
    False: (((1024, 1024, 1024), DIAGONAL), ((1024, 1024, 512), SCHEDULER), ((2048, 2048, 512), SCHEDULER)),
    True: (((1024, 1024, 1024), REDUCTION), ((2048, 2048, 512), REDUCTION)),
}
# The same of flywheel: its own choice and the best of its tables, forward for a causal mask.
FLYWHEEL: Final = {False: ((), (2048, 2048, 256, 256)), True: ((1024, 1024, 1024, 1024),)}
# Operations of the matrix units a cycle and core, at the published peak.
PEAK: Final = {"v5e": 1 << 17, "v5p": 1 << 17, "v6e": 1 << 19, "tpu7x": 1 << 19}
# A candidate is compiled for a problem if its estimate is at most this many times the best; by whether the pass is
# backward, at most this many candidates are. Backward has two, since the one with fewer bundles may move more bytes.
MARGIN: Final = 1.05
FINALISTS: Final = {False: 1, True: 2}
DEFAULT: Final = ["attnops-tpu", "tokamax", "flywheel"]
# How the compiler refuses a block size. Anything else stops the run: a peer's interface has changed, or the script is
# wrong.
REFUSALS: Final = ("RESOURCE_EXHAUSTED", "exceeded scoped vmem", "Ran out of memory", "Register allocation failed",
                   "should be a multiple")  # fmt: skip


def candidates(name: str, backward: bool, generation: str, head_dim: int, T: int, mask: str) -> Iterator[KernelJob]:
    """A peer at each of its block sizes and options."""
    if name == "flywheel":
        for tiles in FLYWHEEL[backward] if mask == "causal" else FLYWHEEL[backward][:1]:
            yield KernelJob(generation, name, backward, mask, T, head_dim, tiles)
        return
    for blocks, option in TOKAMAX[backward] if name == "tokamax" else ((each, "") for each in BLOCKS[backward]):
        layouts = LAYOUTS.get(generation, "") if option == SCHEDULER else ""
        yield KernelJob(generation, name, backward, mask, T, head_dim, blocks, option + layouts)


class Results:
    """The results of all jobs, kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.by_job: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
        # The name of each contender's kernel in its last program, by which the compiler knows what to dump.
        self.kernels: dict[tuple[str, bool, bool], str] = {}
        for key, result in self.by_job.items():
            if "kernel" in result:
                self.kernels[_kind(KernelJob(*json.loads(key)[0]))] = result["kernel"]

    def get(self, job: KernelJob) -> dict[str, Any]:
        """The kernel's regions and the bytes outside of it, or the reason why it doesn't compile."""
        key = json.dumps([job, version(job)])
        if key in self.by_job:
            return self.by_job[key]
        print(f"compiling {job}", file=sys.stderr, flush=True)
        result = self.by_job[key] = self._measured(job)
        if self.path is not None:
            temporary = self.path.with_suffix(".part")
            temporary.write_text(json.dumps(self.by_job, indent=1))
            temporary.replace(self.path)
        return result

    def _measured(self, job: KernelJob) -> dict[str, Any]:
        command = [str(Path(__file__).resolve()), "child", json.dumps(job)]
        kernel = _kind(job)
        try:
            if kernel not in self.kernels:
                self.kernels[kernel] = run(command)["kernel"]
            try:
                schedule, text = measure(command, only=self.kernels[kernel])
            except LookupError:  # the kernel has another name in this program
                self.kernels[kernel] = run(command)["kernel"]
                schedule, text = measure(command, only=self.kernels[kernel])
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            return {"error": str(error).strip()[-500:]}
        result = json.loads(text.strip().splitlines()[-1]) | {"regions": dataclasses.asdict(schedule.regions)}
        if job.name == "flywheel":
            depths = [(depth, len(list(run))) for depth, run in itertools.groupby(schedule.depths)]
            result["outline"] = {"depths": depths, "spans": [span[:3] for span in schedule.spans]}
        return result


def _kind(job: KernelJob) -> tuple[str, bool, bool]:
    """Kernels of the same kind have the same name; flywheel has another kernel for documents."""
    return job.name, job.backward, job.mask == "documents"


def run(command: list[str]) -> dict[str, Any]:
    """The output of a child process. It writes no dumps: dumps of a whole program multiply the compiler's time."""
    import os
    import subprocess

    from attnops_tpu.aot import environment

    done = subprocess.run([sys.executable, *command], env={**os.environ, **environment()}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@functools.cache
def version(job: KernelJob) -> str:
    """What a result depends on: the versions of packages, and for attnops-tpu a hash of the program's text."""
    versions = [importlib.metadata.version(package) for package in ("jax", "libtpu")]
    if job.name == "attnops-tpu":
        program = re.sub(r"0x[0-9a-f]+", "", str(traced(job).jaxpr))  # without addresses
        versions.append(hashlib.sha256(program.encode()).hexdigest()[:12])
    elif job.name != "splash":
        versions.append(importlib.metadata.version({"flywheel": "flywheel-tpu"}.get(job.name, job.name)))
    return " ".join(versions)


def bundles(job: KernelJob, result: dict[str, Any]) -> dict[str, float]:
    """The bundles per head, by part of the kernel."""
    if job.name == "flywheel":
        x = result["outline"]
        parts = tpu_flywheel.counted(job, tpu_flywheel.Outline(x["depths"], [tuple(span) for span in x["spans"]]))
        return parts | {"once": parts["once"] / HEADS, "padding": 0.0}
    x = result["regions"]
    skipped = tuple(Region(r["bundles"], tuple(r["loops"]), r["uses"]) for r in x["skipped"])
    return bundles_per_head(job, Regions(x["once"], x["step"], skipped))


def code(result: dict[str, Any]) -> int:
    """The bundles of a kernel's code, each once."""
    if "outline" in result:
        return sum(n for _, n in result["outline"]["depths"])
    x = result["regions"]
    return x["once"] + x["step"] + sum(r["bundles"] + sum(r["loops"]) for r in x["skipped"])


def finalists(
    results: Results, name: str, backward: bool, generation: str, head_dim: int, problem: str
) -> list[KernelJob]:
    """The jobs that are compiled for the problem itself, or estimated."""
    T, mask = PROBLEMS[problem]
    if name == "attnops-tpu":
        return [KernelJob(generation, name, backward, mask, T, head_dim)]
    if name == "flywheel" and mask != "causal":
        served = not backward or mask == "full"
        return list(candidates(name, backward, generation, head_dim, T, mask)) if served else []
    estimates, errors = {}, []
    for job in candidates(name, backward, generation, head_dim, *SCREENED):
        if job.option == DIAGONAL and mask != "causal":
            continue
        result = results.get(job)
        if "error" in result:
            errors.append(result["error"])
        else:
            candidate = job._replace(T=T, mask=mask)
            estimates[candidate] = sum(bundles(candidate, result).values())
    if not estimates:
        raise RuntimeError(f"{name} compiled with none of its block sizes: {errors}")
    least = min(estimates.values())
    best = sorted((job for job in estimates if estimates[job] <= MARGIN * least), key=lambda job: estimates[job])
    return best[: FINALISTS[backward]]


def measured(
    results: Results, name: str, generation: str, head_dim: int, problem: str, is_estimate: bool
) -> dict[str, Any]:
    """A row of the table: a contender's best passes."""
    row: dict[str, Any] = {"generation": generation, "problem": problem, "head_dim": head_dim, "name": name}
    passes: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    T, mask = PROBLEMS[problem]
    for backward in (False, True):
        key = "backward" if backward else "forward"
        for job in finalists(results, name, backward, generation, head_dim, problem):
            # Estimated bytes are those of the screened problem, for so many tokens.
            screened = is_estimate and mask in {"tokamax": ("causal", "full"), "flywheel": ("causal",)}.get(name, ())
            result = results.get(job._replace(T=SCREENED[0], mask=SCREENED[1]) if screened else job)
            if "error" in result:
                continue
            parts, times = bundles(job, result), T / SCREENED[0] if screened else 1
            passes[backward].append({
                "blocks": job.blocks, "option": job.option, "bundles": sum(parts.values()), "parts": parts,
                "padding": parts["padding"] / sum(parts.values()), "outside": times * result["outside"],
                "temporaries": times * result["temporaries"], "code": code(result),
            })  # fmt: skip
        if passes[backward]:
            row[key] = best = min(passes[backward], key=lambda each: each["bundles"])
            operations = (10 if backward else 4) * pairs(mask, T) * head_dim
            best["share"] = operations / best["bundles"] / PEAK[generation] if generation in PEAK else None
        elif name != "flywheel":
            raise RuntimeError(f"{name} compiled with none of its best block sizes for {problem}")
    if generation in BYTES_A_CYCLE and passes[True]:
        heads = HEADS * BATCH.get(mask, 1)
        sums = [(row["forward"]["bundles"] + each["bundles"]) * heads + each["outside"] / BYTES_A_CYCLE[generation]
                for each in passes[True]]  # fmt: skip
        row["end"] = min(sums)
    row["temporaries"] = min((each["temporaries"] for each in passes[True]), default=None)
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each contender. Peers' lines have attnops-tpu's figures divided by theirs in brackets."""
    shown = Table(title="Thousands of bundles per head, bfloat16; in brackets attnops-tpu relative to it")
    for column in ("TPU", "problem", "D", "kernel", "forward", "backward", "of peak", "outside MB", "temporaries MB",
                   "padding", "code", "end to end"):  # fmt: skip
        shown.add_column(column, justify="left" if column in ("problem", "kernel") else "right", no_wrap=True)
    ours: dict[str, float] = {}
    for row in rows:
        passes = [row[key] for key in ("forward", "backward") if key in row]
        cost = {key: row[key]["bundles"] for key in ("forward", "backward") if key in row}
        if "end" in row:
            cost["end"] = row["end"]
        if row["name"] == "attnops-tpu":
            ours = cost
        texts = {key: f"{x / 1e3:.1f}" + (f" ({ours[key] / x:.2f})" if key in ours and row["name"] != "attnops-tpu"
                                          else "") for key, x in cost.items()}  # fmt: skip
        moved = ["" if x is None else f"{x / 1e6:.1f}" for x in
                 (row["backward"]["outside"] if "backward" in row else None, row["temporaries"])]  # fmt: skip
        shown.add_row(
            row["generation"], row["problem"], str(row["head_dim"]), row["name"], texts["forward"],
            texts.get("backward", ""), " + ".join(f"{x['share']:.0%}" for x in passes if x["share"]), *moved,
            f"{row['forward']['padding']:.1%}" if row["forward"]["padding"] else "",
            " + ".join(f"{x['code'] / 1e3:.1f}" for x in passes), texts.get("end", ""),
        )  # fmt: skip
    return shown


def main(
    generation: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}; may be repeated.")
    ] = None,
    problem: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PROBLEMS)}; may be repeated.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CONTENDERS)}; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Keeps each result; a later run continues it.")] = None,
    is_estimate: Annotated[
        bool, typer.Option("--estimate", help="Peers' causal kernels are compiled for 4,096 tokens only.")
    ] = False,
) -> None:
    """Add up whole attention kernels on TPUs, with no TPU."""
    for name, given, known in (("--generation", generation, TOPOLOGIES), ("--problem", problem, PROBLEMS),
                               ("--only", only, CONTENDERS)):  # fmt: skip
        if not set(given or []) <= set(known):
            raise typer.BadParameter(f"{name} is {', '.join(given or [])}; it must be one of {', '.join(known)}")
    results = Results(output)
    console = Console(width=max(Console().width, 150))
    rows = []
    for each in generation or ["v6e", "tpu7x"]:
        for D in head_dim or [128]:
            for case in problem or list(PROBLEMS):
                names = ["attnops-tpu"] if PROBLEMS[case][1] in (*BATCH, "blocks") else only or DEFAULT
                compared = [measured(results, name, each, D, case, is_estimate) for name in names]
                console.print(table(compared))
                rows += compared
    console.print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        fields = json.loads(sys.argv[2])
        child(KernelJob(*fields[:6], tuple(fields[6]), fields[7]))
    else:
        typer.run(main)
