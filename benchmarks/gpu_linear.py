"""Linear attention on a GPU: milliseconds of attnops-triton and of flash-linear-attention (FLA)::

    python benchmarks/gpu_linear.py --json linear.json
    python benchmarks/gpu_linear.py --rule gdn --contender FLA
    python benchmarks/gpu_linear.py --dry                    # anywhere: small cases, Triton interpreted, nothing timed

Rules: gdn, the gated delta rule as Qwen3-Next calls it; ssd, a decay by head without the delta rule (Mamba-2); kda,
decays by channel (Kimi Linear). D = Dv = 128, bfloat16, normalised queries and keys. A prompt begins with empty states
and returns the last ones; a single token updates float32 states, which attnops does in place. attnops-triton splits
float32 operands of products into three of bfloat16; attnops-triton-default rounds them once, as FLA does. Cases with
gradients have the forward pass too. FLA's kernels tune themselves in the first call.

Each contender (`gpu_linear_contenders.py`) runs in a separate process. All compile and check at once, then each
times its programs. The first and the last row and key head of a case are compared with `attnops_linear.reference` in
float64: ``error`` is relative to the largest element.
GB/s count each array once. ``ratio`` is the time divided by attnops-triton's. It needs attnops-triton and
attnops-testing, and ``pip install torch fla-core`` for FLA, whose gradients refuse Triton 3.4 to 3.7.0 on Hopper unless
tilelang is installed.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import gpu_process
import jax
import jax.numpy as jnp
import numpy as np
import typer
from gpu_linear_contenders import CONTENDERS, NARROW, Arrays, LinearCase, Program, drawn
from rich.console import Console
from rich.table import Table

from attnops_linear import reference
from attnops_testing.bench.case import Refused
from attnops_testing.bench.program import Ready

# The allowed error without and with gradients: of products in bfloat16.
TOLERANCE: Final = {False: 2.0**-6, True: 2.0**-5}
# By rule: key heads, value heads, and the rows and tokens of its cases, which have gradients or not.
RULES: Final[dict[str, tuple[int, int, tuple[tuple[int, int, bool], ...]]]] = {
    "gdn": (16, 32, ((1, 4096, False), (1, 16384, False), (4, 4096, False), (1, 4096, True), (4, 4096, True),
                     (1, 1, False), (64, 1, False), (256, 1, False))),
    "ssd": (32, 32, ((1, 4096, False), (1, 4096, True), (64, 1, False))),
    "kda": (32, 32, ((1, 4096, False), (64, 1, False))),
}  # fmt: skip


def all_cases(rules: list[str], dry: bool) -> list[LinearCase]:
    """The cases; small ones in a dry run."""
    cases = [LinearCase(rule, *case, *RULES[rule][:2], 128, "bfloat16") for rule in rules for case in RULES[rule][2]]
    small = (x._replace(rows=2, tokens=min(x.tokens, 40), K=2 * x.K // x.H, H=2, D=16, dtype="float32") for x in cases)
    return list(dict.fromkeys(small)) if dry else cases


@jax.jit
def _outputs(x: Arrays, state: Any) -> Any:
    return reference(**x, initial_state=state)


@jax.jit
def _gradients(x: Arrays, d_out: Any) -> Any:
    return jax.vjp(lambda x: reference(**x)[0], x)[1](d_out)[0]


def truth(given: Arrays) -> Arrays:
    """The output and the last state, or the output and the gradients, in float64, by the host: GPUs are slow at it."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        x = {name: jnp.asarray(array, jnp.float64) for name, array in given.items()}
        state, d_out = x.pop("state", None), x.pop("d_out", None)
        out, last = _outputs(x, state)
        found = {"out": out} | ({"state": last} if d_out is None else _gradients(x, d_out))
        return {name: np.asarray(array) for name, array in found.items()}


def error(case: LinearCase, given: Arrays, found: Arrays, numbers: Callable[[Any], np.ndarray]) -> float:
    """The largest difference from `truth` in the first and last row and head, relative to the array's largest one."""
    errors = []
    for b, k in {(0, 0), (case.rows - 1, case.K - 1)}:

        def part(name: str, x: Any, b: int = b, k: int = k) -> Any:
            size = 1 if name in ("query", "key") else case.H // case.K
            heads = slice(k * size, (k + 1) * size)
            return x[b : b + 1, heads] if name == "state" else x[b : b + 1, :, heads]

        for name, exact in truth({name: part(name, x) for name, x in given.items()}).items():
            actual = numbers(part(name, found[name]))
            errors.append(float(np.abs(actual - exact).max() / np.abs(exact).max()))
    return float(np.max(errors))  # NaN if one is NaN


class Checked(NamedTuple):
    """A case of a contender: its row of the table, its program, if the results are right, and the bytes it moves."""

    row: dict[str, Any]
    program: Program | None = None
    moved: int = 0


def checked(name: str, case: LinearCase, dry: bool) -> Checked:
    """Compile a contender's program, and compare its results with the oracle."""
    row: dict[str, Any] = {"name": name, **case._asdict(), "status": "ok", "reason": ""}
    try:
        given = drawn(case)
        program = CONTENDERS[name](case, given, dry)
        found = program.run()
        difference = error(case, given, found, program.numbers)
    except Refused as refusal:
        return Checked(row | {"status": "refused", "reason": str(refusal)})
    except Exception as failure:
        return Checked(row | {"status": "failed", "reason": f"{type(failure).__name__}: {failure}"})
    row["error"] = float(f"{difference:.2g}")
    if not difference <= TOLERANCE[case.gradients]:
        return Checked(row | {"status": "wrong", "reason": f"differs by {difference:.2g} of the largest element"})
    moved = sum(x.size * (2 if name in NARROW else 4) for name, x in given.items())
    moved += sum(int(np.prod(x.shape)) * (2 if name in (*NARROW, "out") else 4) for name, x in found.items())
    return Checked(row, program, moved)


def figures(this: Checked, rounds: int) -> dict[str, Any]:
    """A row of the table, with times if it was right."""
    if this.program is None:
        return this.row
    from gpu_timing import measure

    timing = measure(Ready(run=this.program.run, wait=this.program.wait, results=None, what=""), rounds)
    return this.row | {
        "device": this.program.device, "versions": this.program.versions, "ms": round(timing.kernel_seconds * 1e3, 4),
        "dispatch ms": round(timing.dispatch_seconds * 1e3, 4), "bound by dispatch": timing.is_bound_by_dispatch,
        "GB/s": round(this.moved / timing.kernel_seconds / 1e9),
    }  # fmt: skip


def work(worker: Path, name: str, cases: list[LinearCase], rounds: int, dry: bool) -> list[dict[str, Any]]:
    """The rows of a contender, in its process."""
    ready = [checked(name, LinearCase(*fields), dry) for fields in cases]
    gpu_process.wait_for_turn(worker)
    return [this.row if dry else figures(this, rounds) for this in ready]


def in_own_processes(
    names: Sequence[str], cases: list[LinearCase], settings: Arrays, minutes: int
) -> Iterator[list[dict[str, Any]]]:
    """`work` of each contender. If one fails, all its rows have the status failed, with its last line."""
    tasks = [{"name": name, "cases": cases, **settings} for name in names]
    workers = [gpu_process.Worker(__file__, task, settings["dry"] or task["name"] == "FLA") for task in tasks]
    for worker in workers:
        worker.wait_until_ready(minutes)
    for name, worker in zip(names, workers, strict=True):
        rows, reason = worker.finish(minutes)
        failed = {"name": name, "status": "failed", "reason": reason}
        yield rows or [{**failed, **case._asdict()} for case in cases]


def main(
    rule: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(RULES)}; may repeat.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CONTENDERS)}; may repeat.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of timing; the best one is reported.")] = 5,
    minutes: Annotated[int, typer.Option(help="Time limit of each contender to be ready, and to be timed.")] = 30,
    dry: Annotated[bool, typer.Option(help="Small cases, Triton interpreted: checked, not timed.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check and time calls of linear attention."""
    if worker is not None and json is not None:
        json.write_text(json_module.dumps(work(worker, **json_module.loads(worker.read_text()))))
        return
    cases, settings = all_cases(rule or list(RULES), dry), {"rounds": rounds, "dry": dry}
    by_contender = list(in_own_processes(contender or list(CONTENDERS), cases, settings, minutes))
    rows = [row for of_case in zip(*by_contender, strict=True) for row in of_case]
    ours = {LinearCase(*(row[x] for x in LinearCase._fields)): row.get("ms") for row in rows
            if row["name"] == "attnops-triton"}  # fmt: skip
    for row in rows:
        own = ours.get(LinearCase(*(row[x] for x in LinearCase._fields)))
        row |= {"ratio": round(row["ms"] / own, 2)} if own and "ms" in row else {}
    device = next((row["device"] for row in rows if "device" in row), "nothing was timed")
    table = Table(title="nothing is timed in a dry run" if dry else device)
    names = [name for name in dict.fromkeys(name for row in rows for name in row)
             if name not in ("reason", "device", "versions")]  # fmt: skip
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
