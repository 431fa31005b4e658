"""`attnops bench`: operations and peers side by side, each checked before it is timed."""

from __future__ import annotations

import json as json_module
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnops.bench import (
    Case,
    Contender,
    Measurement,
    default_memory_limit,
    describe_machine,
    find,
    measure,
    missing_peers,
    packed_documents,
)
from attnops.cli.output import fail, print_text
from attnops.cli.show import mask_with_values, needs_matplotlib
from attnops.errors import PluginWarning, UnknownOperationError
from attnops.masks import Full, Mask

# Wide enough that nothing is wrapped where the output is read by a program.
_PIPE_WIDTH: Final = 200
_STYLES: Final = {"wrong": "bold red", "failed": "red", "refused": "yellow"}


# A parameter for each option of the command line, which typer reads from the signature: most of its lines are
# their help.
def command(
    operations: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of operations, and of peers: jax.nn, torch, tokamax, ejkernel.", show_default="all installed"
        ),
    ] = None,
    batch: Annotated[int, typer.Option("-B", "--batch", help="B", min=1)] = 1,
    lengths: Annotated[
        str, typer.Option("-T", "--lengths", help="T = S, in tokens, separated by commas.")
    ] = "1024,2048,4096",
    heads: Annotated[int, typer.Option("-H", "--heads", help="H", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option("-K", "--kv-heads", help="K, a divisor of H.", show_default="H", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option("-D", "--head-dim", help="D", min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; several, separated by commas.")] = "float32",
    mask: Annotated[str, typer.Option(help='An expression of attnops.masks; "Full()" for none.')] = "Causal()",
    documents: Annotated[
        int | None,
        typer.Option(help="Pack this many documents of random lengths, by segments known at run time only.", min=1),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward/--forward", help="Time forward and backward together, or forward only.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds, in each of which everyone is timed once.", min=1)] = 5,
    most_seconds: Annotated[float, typer.Option(help="Stop timing one at a length after so long.", min=0)] = 30.0,
    memory_limit: Annotated[
        float | None, typer.Option(help="GB that one may use.", show_default="half the device's")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file; - prints it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and memory over length: .png, .svg or .pdf.")] = None,
) -> None:
    """Time operations and other libraries' attention side by side. Each is held against the float64 oracle first,
    output and gradients, and what is wrong is not timed.

    Exits with 1 if one is wrong or failed, with 2 if there is no such call or operation.
    """
    if plot is not None:
        needs_matplotlib("the plot")
    try:
        limit = default_memory_limit() if memory_limit is None else _bytes(memory_limit)
        cases = [
            Case(
                length=length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=name,
                mask=_mask(mask, documents, length), backward=backward, memory_limit=limit,
            )
            for name in _names("dtype", dtype)
            for length in _lengths(lengths)
        ]  # fmt: skip
        contenders = find(operations or None)
    except (ValueError, UnknownOperationError) as error:
        fail(error, 2)
    machine = describe_machine()
    # Whatever is amiss with an operation is in its row.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        measurements = list(_measure_all(cases, contenders, repeats, most_seconds))
    title = _title(cases[0], mask, documents, machine)
    if json is None or str(json) != "-":
        print_measurements(measurements, title)
        if operations is None and (missing := [peer.package for peer in missing_peers()]):
            print_text(f"\nNot installed, so not here: {', '.join(missing)}")
    written = json_module.dumps({"machine": machine, "measurements": [m.to_json() for m in measurements]}, indent=2)
    if json is not None and str(json) == "-":
        typer.echo(written)
    try:
        if json is not None and str(json) != "-":
            json.write_text(written + "\n")
        if plot is not None:
            from attnops.bench.plot import plot as draw

            draw(measurements, plot, title)
    except (OSError, ValueError) as error:  # matplotlib's word for an unknown suffix is ValueError
        fail(error, 2)
    raise typer.Exit(int(any(m.status in ("wrong", "failed") for m in measurements)))


def print_measurements(measurements: Sequence[Measurement], title: str) -> None:
    """Print the table, then what it has no room for."""
    columns = ("dtype", "T", "operation", "best", "median", "× fastest", "memory", "")
    print_text(f"{title}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("dtype", "operation", "") else "right")
    previous = None
    for m in measurements:
        case = m.case
        if previous is not None and previous is not case:
            table.add_row()
        fastest = min((x.best for x in measurements if x.case is case and x.best), default=None)
        table.add_row(
            "" if previous is case else case.dtype,
            "" if previous is case else f"{case.length:,}",
            m.name,
            _ms(m.best),
            _ms(m.median),
            f"{m.best / fastest:.2f}" if m.best and fastest else "",
            "" if m.temp_bytes is None else f"{m.temp_bytes / 2**20:,.1f} MiB",
            Text("" if m.status == "ok" else m.status, style=_STYLES.get(m.status, "")),
        )
        previous = case
    _console().print(table)
    _print_notes(measurements)


def _print_notes(measurements: Sequence[Measurement]) -> None:
    """Why some were not timed, once a reason; and how much was checked."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for m in measurements:
        if m.status != "ok":
            where = f"{m.case.dtype} T={m.case.length}"
            reasons.setdefault((m.name, m.status, m.reason), []).append(where)
    if reasons:
        print_text("")
    for (name, status, reason), cases in reasons.items():
        print_text(f"{name} {status} ({', '.join(cases)}): {reason}")
    checked = {m.case.length: m.checked_rows for m in measurements if m.checked_rows}
    some = [f"{rows} of {length}" for length, rows in checked.items() if rows < length]
    queries = "all queries" if not some else f"{', '.join(some)} queries of each head"
    if checked:
        print_text(f"\nChecked before timing, against float64: {queries}. Memory is in addition to inputs and outputs.")


def _measure_all(
    cases: Sequence[Case], contenders: Sequence[Contender], repeats: int, most_seconds: float
) -> Iterator[Measurement]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(contenders) * (repeats + 1))
        for case in cases:

            def step(what: str, steps: int, case: Case = case) -> None:
                progress.update(task, advance=steps, description=f"{case.dtype} T={case.length} {what}")

            entries = [(case, contender) for contender in contenders]
            yield from measure(entries, rounds=repeats, most_seconds=most_seconds, progress=step)


def _mask(text: str, documents: int | None, length: int) -> Mask | None:
    mask = mask_with_values(text)
    if documents is not None:
        segments = packed_documents(documents, length)
        return segments if isinstance(mask, Full) else mask & segments
    return None if isinstance(mask, Full) else mask


def _bytes(gigabytes: float) -> int:
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise ValueError(f"memory_limit={gigabytes} must be positive and finite; leave it out for half the device's")
    return int(gigabytes * 1e9)


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option}={text!r} names none; separate several by commas")
    return names


def _lengths(text: str) -> list[int]:
    names = _names("lengths", text)
    if not all(name.isdecimal() and int(name) for name in names):
        raise ValueError(f"lengths={text!r} must be positive numbers separated by commas, such as 1024,2048")
    return [int(name) for name in names]


def _title(case: Case, mask: str, documents: int | None, machine: dict[str, Any]) -> str:
    what = "forward and backward" if case.backward else "forward"
    shape = f"B{case.batch} H{case.heads} K{case.K} D{case.head_dim}"
    packed = "" if documents is None else f", {documents} documents"
    where = machine["processor"] if machine["devices"] == ["cpu"] else ", ".join(machine["devices"])
    return f"{what}, {shape}, {mask}{packed}; {where}, {machine['cores']} cores, JAX {machine['versions']['jax']}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.{3 if seconds < 1e-2 else 1}f} ms"


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
