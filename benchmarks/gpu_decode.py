"""Decoding over paged caches on a GPU: milliseconds of a step's attention, and its share of memory bandwidth::

    python benchmarks/gpu_decode.py --bandwidth 3350         # an H100; GB/s of this GPU's memory
    python benchmarks/gpu_decode.py --length 32768 --batch 1 --batch 64 --json decode.json
    python benchmarks/gpu_decode.py --codec float8_e4m3fn --scales tensor --page 256
    python benchmarks/gpu_decode.py --dry                    # anywhere: small cases, Triton interpreted, nothing timed

It compares attnops-triton with FlashInfer, vLLM's unified kernel and FlashAttention, if they are installed; each
contender runs in a separate process (`gpu_decode_contenders.py`). Pages are in any order. Before a case is timed, two
of its rows and kv heads are compared with the float64 oracle. Bytes are those of keys, values and scales of the tokens
in the cache.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import gpu_process
import numpy as np
import typer
from gpu_decode_contenders import CONTENDERS, DecodeCase, Step
from rich.console import Console
from rich.table import Table

from attnops_testing import attention
from attnops_testing.bench.case import Refused
from attnops_testing.bench.program import Ready

# The allowed difference of an element relative to the largest one: the rounding error of weights in 16 bits.
TOLERANCE: Final = 2.0**-7


def error(step: Step, out: Any, case: DecodeCase) -> float:
    """The largest difference from the oracle relative to its largest element, in the first and last row and head."""
    errors = []
    for b, k in {(0, 0), (case.batch - 1, case.kv_heads - 1)}:
        query, keys, values, actual = step.part(out, b, k)
        exact = attention(query[None, None], keys[None, :, None], values[None, :, None]).out[0, 0]
        errors.append(float(np.abs(actual - exact).max() / np.abs(exact).max()))
    return float(np.max(errors))  # NaN if one is NaN


def figures(name: str, case: DecodeCase, bandwidth: float, rounds: int, dry: bool) -> dict[str, Any]:
    """A row of the table."""
    row = {"name": name} | case._asdict() | {"codec": case.codec or "none", "status": "ok", "reason": ""}
    try:
        step = CONTENDERS[name](case, dry)
        difference = error(step, step.wait(step.run()), case)
    except Refused as refusal:
        return row | {"status": "refused", "reason": str(refusal)}
    except Exception as failure:
        return row | {"status": "failed", "reason": f"{type(failure).__name__}: {failure}"}
    if not difference <= TOLERANCE:
        return row | {"status": "wrong", "reason": f"differs by {difference:.2g} of the largest element"}
    if dry:
        return row
    from gpu_timing import measure

    timing = measure(Ready(run=step.run, wait=step.wait, results=None, what=""), rounds)
    seconds = timing.kernel_seconds
    token = 2 * case.head_dim * (1 if case.codec else 2) + 8 * (case.scales == "token_head")
    moved = case.batch * (case.length - 1) * case.kv_heads * token
    share = {"of bandwidth": round(moved / seconds / bandwidth / 1e9, 3)} if bandwidth else {}
    return row | {
        "device": step.device, "ms": round(seconds * 1e3, 4), "bound by dispatch": timing.is_bound_by_dispatch,
        "GB/s": round(moved / seconds / 1e9),
    } | share  # fmt: skip


def in_its_own_process(
    name: str, cases: list[DecodeCase], settings: dict[str, Any], minutes: int
) -> list[dict[str, Any]]:
    """`figures` of all cases in a separate process. If it fails, all rows have the status failed and its last line."""
    task = {"name": name, "cases": cases, "settings": settings}
    rows, reason = gpu_process.run(__file__, task, settings["dry"] or not name.startswith("attnops"), minutes)
    if not reason:
        return rows  # type: ignore[no-any-return]
    return [{"name": name} | case._asdict() | {"status": "failed", "reason": reason} for case in cases]


def main(
    length: Annotated[list[int] | None, typer.Option(help="Tokens per row; may repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may repeat.")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Empty, int8, float8_e4m3fn, float8_e5m2; may repeat.")
    ] = None,
    scales: Annotated[
        str, typer.Option(help="Scales of codecs: token_head, or tensor, for FlashInfer.")
    ] = "token_head",
    page: Annotated[int, typer.Option(help="Slots per page; FlashAttention-2 needs multiples of 256.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="K.")] = 8,
    groups: Annotated[int, typer.Option(help="Query heads per kv head.")] = 8,
    head_dim: Annotated[int, typer.Option(help="D.")] = 128,
    contender: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CONTENDERS)}; may repeat.")] = None,
    bandwidth: Annotated[float, typer.Option(help="GB/s of the GPU's memory; 0 if unknown.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds of timing; the best one is reported.")] = 5,
    minutes: Annotated[int, typer.Option(help="Time limit of each contender.")] = 30,
    dry: Annotated[bool, typer.Option(help="Small cases, Triton interpreted: checked, not timed.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check and time steps of decoding."""
    if worker is not None and json is not None:
        task = json_module.loads(worker.read_text())
        rows = [figures(task["name"], DecodeCase(*fields), **task["settings"]) for fields in task["cases"]]
        json.write_text(json_module.dumps(rows))
        return
    if dry:
        length, batch, kv_heads, groups, head_dim = [70], [2], 1, 2, 16
    dtype = "float16" if dry else "bfloat16"
    cases = [
        DecodeCase(n, B, one, scales if one else "", page, kv_heads, groups, head_dim, dtype)
        for one in codec or ["", "float8_e4m3fn"] for n in length or [4096, 32768, 131072] for B in batch or [1, 8, 64]
    ]  # fmt: skip
    settings = {"bandwidth": bandwidth, "rounds": rounds, "dry": dry}
    by_contender = [in_its_own_process(name, cases, settings, minutes) for name in contender or CONTENDERS]
    rows = [row for case_rows in zip(*by_contender, strict=True) for row in case_rows]
    device = next((row["device"] for row in rows if "device" in row), "nothing was timed")
    table = Table(title="nothing is timed in a dry run" if dry else device)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("reason", "device")))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    console = Console(width=200 if not sys.stdout.isatty() else None)
    console.print(table)
    for reason in dict.fromkeys(f"{row['name']}: {row['status']}: {row['reason']}" for row in rows if row["reason"]):
        console.print(reason)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")
    raise typer.Exit(int(any(row["status"] == "wrong" for row in rows)))


if __name__ == "__main__":
    typer.run(main)
