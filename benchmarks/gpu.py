"""attnops-triton compared with cuDNN, Pallas's Mosaic kernel, torch, FlexAttention, tokamax and ejkernel on one GPU,
each in a separate process::

    python benchmarks/gpu.py --json gpu.json            # D 64, 128, 256; four masks; 1k to 16k tokens
    python benchmarks/gpu.py --head-dim 128 --length 4096 --contender attnops-triton --contender cuDNN
    python benchmarks/gpu.py --dtype float16 --contender attnops-triton --contender Mosaic
    python benchmarks/gpu.py --dry                      # anywhere: small cases, Triton interpreted, nothing timed

Every output and gradient is compared with the float64 oracle before anything is timed. Each case has 16k tokens: the
shorter the sequences, the larger the batch. Documents are packed, four per sequence, and causal; peers without segments
get a dense mask. A window has 1,024 tokens. The time on the GPU and the time to start a call are separate figures.
The processes compile and check their programs at the same time, in several threads each; then each times its own, one
process after another. JAX does not preallocate the GPU's memory.
Needs JAX for CUDA and ``pip install attnops-triton attnops-testing torch``; `GPU.md` says what to run first.
"""

from __future__ import annotations

import functools
import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import gpu_process
import typer
from rich.console import Console
from rich.table import Table

from attnops_testing.bench import installed_versions

TOKENS: Final = 16384
WIDTH: Final = 2048  # heads times head dim
WINDOW: Final = 1024
# By name, the share of scores that are not masked, given the length.
MASKS: Final = {
    "full": lambda T: 1.0,
    "causal": lambda T: 0.5,
    "documents": lambda T: 0.125,
    "window": lambda T: min(0.5, WINDOW / T),
}
NAMES: Final = (
    "attnops-triton", "attnops-triton-unordered", "cuDNN", "Mosaic", "FlexAttention", "torch", "tokamax", "ejkernel",
)  # fmt: skip
THREADS: Final = 8


def measure_one(
    turn: Callable[[], None], name: str, cases: list[dict[str, Any]], rounds: int, dry: bool
) -> dict[str, Any]:
    """The rows of one contender, in this process; ``turn`` waits until it may time its programs."""
    import dataclasses
    from concurrent.futures import ThreadPoolExecutor, wait

    import jax
    import numpy as np
    from gpu_contenders import CONTENDERS, USES_TORCH
    from gpu_timing import measure as time_program

    from attnops.masks import Causal, Segments, SlidingWindow
    from attnops_testing.bench.case import Case
    from attnops_testing.bench.measure import measure

    def mask_of(kind: str, length: int) -> Any:
        documents = Causal() & Segments(np.arange(length) // max(1, length // 4))
        window = Causal() & SlidingWindow(WINDOW - 1, 0)
        return {"full": None, "causal": Causal(), "documents": documents, "window": window}[kind]

    contender, rows = CONTENDERS[name](dry), []
    like: dict[tuple[Any, ...], Case] = {}  # the first case of each shape, whose inputs the others have
    kinds, ready = [], []
    for fields in cases:
        kinds.append(fields.pop("mask_kind"))
        case = Case(**fields, mask=mask_of(kinds[-1], fields["length"]))
        first = like.setdefault((*case.shape, case.K, case.head_dim, case.dtype), case)
        for array in ("inputs", "d_out"):
            vars(case)[array] = getattr(first, array)
        if name not in USES_TORCH:
            vars(case)["device_inputs"] = first.device_inputs
        ready.append(case)
    with ThreadPoolExecutor(THREADS) as others, ThreadPoolExecutor(1 if name in USES_TORCH else THREADS) as pool:
        expected = [others.submit(lambda case=case: case.truth.expected) for case in ready]
        prepared = [pool.submit(contender.prepare, case) for case in ready]
        # Compilers use the host, and their autotuning the GPU, so they would disturb what is timed.
        wait((*prepared, *expected))
    checked = []
    for case, program in zip(ready, prepared, strict=True):
        compiled = dataclasses.replace(contender, prepare=lambda _, program=program: program.result())
        checked += measure([(case, compiled)], rounds=0)
    turn()
    for found, kind, program in zip(checked, kinds, prepared, strict=True):
        case, row = found.case, found.to_json() | {"mask_kind": kind, "teraflops": None}
        if found.status == "ok" and not dry:
            timing = time_program(program.result(), rounds)
            row |= dataclasses.asdict(timing) | {
                "is_bound_by_dispatch": timing.is_bound_by_dispatch,
                "teraflops": products(case.backward) * case.batch * case.heads * case.length**2 * case.head_dim
                * MASKS[kind](case.length) * 2 / timing.kernel_seconds / 1e12,
            }  # fmt: skip
        rows.append(row)
    if name in USES_TORCH:
        try:
            import torch  # type: ignore[import-not-found, unused-ignore]

            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        except ImportError:
            device = ""
    else:
        device = jax.devices()[0].device_kind
    return {"device": device, "rows": rows}


def products(backward: bool) -> int:
    """The number of matrix products of a call: 2 in the forward pass, 7 in both passes."""
    return 7 if backward else 2


def in_own_processes(
    names: Sequence[str], cases: list[dict[str, Any]], rounds: int, dry: bool, minutes: int
) -> Iterator[dict[str, Any]]:
    """`measure_one` of each contender. If one fails, all its rows have the status failed, with its last line."""
    workers = []
    for name in names:
        task = {"name": name, "cases": cases, "rounds": rounds, "dry": dry}
        workers.append(gpu_process.Worker(__file__, task, dry or name in ("FlexAttention", "torch")))
        if dry:  # one after another: nothing is timed, and hosts without a GPU have less memory
            workers[-1].wait_until_ready(minutes)
    for worker in workers:
        worker.wait_until_ready(minutes)
    for name, worker in zip(names, workers, strict=True):
        result, error = worker.finish(minutes)
        failed = {"name": name, "status": "failed", "reason": error, "teraflops": None}
        yield result or {"device": "", "rows": [case | failed for case in cases]}


def all_cases(
    head_dims: tuple[int, ...], lengths: tuple[int, ...], kinds: list[str], dry: bool, groups: int = 1,
    dtype: str = "bfloat16",
) -> list[dict[str, Any]]:  # fmt: skip
    """The fields of each case.

    Raises:
        ValueError: groups do not divide the query heads.
    """
    heads = {D: 2 if dry else WIDTH // D for D in head_dims}
    for D, H in heads.items():
        if H % groups:
            raise ValueError(f"groups={groups} must be a divisor of {H}, the query heads at head_dim={D}")
    return [
        {
            "length": T, "batch": 1 if dry else max(1, TOKENS // T), "heads": heads[D], "head_dim": D,
            "kv_heads": heads[D] // groups, "dtype": "float32" if dry else dtype,
            "mask_kind": kind, "backward": backward,
        }
        for D in head_dims
        for T in lengths
        for kind in kinds
        for backward in (False, True)
    ]  # fmt: skip


def table_of(title: str, rows_by_name: dict[str, list[dict[str, Any]]]) -> Table:
    """A line for each case, a column for each contender; * marks figures that are bound by the host's dispatch."""
    table = Table(title=title)
    for column in ("D", "T", "mask", "pass", *rows_by_name):
        table.add_column(column, justify="left" if column in ("mask", "pass") else "right")
    for rows in zip(*rows_by_name.values(), strict=True):
        first = rows[0]
        cells = [
            row["status"] if row["teraflops"] is None else f"{row['teraflops']:.0f}{'*' * row['is_bound_by_dispatch']}"
            for row in rows
        ]
        passes = "both" if first["backward"] else "forward"
        table.add_row(str(first["head_dim"]), str(first["length"]), first["mask_kind"], passes, *cells)
    return table


def main(
    head_dim: Annotated[list[int] | None, typer.Option(help="May repeat.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="In tokens; may repeat.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(MASKS)}; may repeat.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Query heads per kv head.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    contender: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(NAMES)}; may repeat.")] = None,
    rounds: Annotated[int, typer.Option(help="Timings of each case.")] = 5,
    minutes: Annotated[int, typer.Option(help="Time limit of each contender to be ready, and to be timed.")] = 30,
    dry: Annotated[bool, typer.Option(help="Small cases, Triton interpreted: checked, not timed.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check, time and print."""
    if worker is not None and json is not None:
        turn = functools.partial(gpu_process.wait_for_turn, worker)
        json.write_text(json_module.dumps(measure_one(turn, **json_module.loads(worker.read_text()))))
        return
    try:
        cases = all_cases(
            tuple(head_dim or ((16,) if dry else (64, 128, 256))),
            tuple(length or ((48,) if dry else (1024, 2048, 4096, 8192, 16384))), mask or list(MASKS), dry,
            groups, dtype,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names, results = contender or NAMES, {}
    for name, result in zip(names, in_own_processes(names, cases, rounds, dry, minutes), strict=True):
        results[name] = result
        rows_by_name, devices = ({name: x[field] for name, x in results.items()} for field in ("rows", "device"))
        rows = [row for each in rows_by_name.values() for row in each]
        device = next((name for name in devices.values() if name not in ("", "cpu")), "cpu")
        if json:  # a run that is stopped leaves what it has
            document = {
                "device": device,
                "devices": devices,
                "dry": dry,
                "versions": installed_versions(),
                "rows": rows,
            }
            json.write_text(json_module.dumps(document, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table_of("nothing is timed in a dry run" if dry else f"TFLOP/s on {device}", rows_by_name))
    for reason in dict.fromkeys(f"{r['name']}: {r['status']}: {r['reason']}" for r in rows if r["status"] != "ok"):
        console.print(reason)
    raise typer.Exit(int(any(row["status"] == "wrong" for row in rows)))


if __name__ == "__main__":
    typer.run(main)
