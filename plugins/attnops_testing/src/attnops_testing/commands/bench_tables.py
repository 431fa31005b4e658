"""The tables of `attnops bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from attnops_cli.output import print_text, printer
from attnops_testing.bench import Case, Measurement
from attnops_testing.bench.truth import is_large

_STYLES: Final = {"wrong": "bold red", "failed": "red", "refused": "yellow"}


def print_measurements(measurements: Sequence[Measurement], title: str) -> None:
    """Print the table, then details for which it has no column."""
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
            milliseconds(m.best),
            milliseconds(m.median),
            f"{m.best / fastest:.2f}" if m.best and fastest else "",
            "" if m.temp_bytes is None else f"{m.temp_bytes / 2**20:,.1f} MiB",
            status_text(m),
        )
        previous = case
    printer().print(table)
    print_reasons(measurements)
    _print_checked(measurements)


def print_reasons(measurements: Sequence[Measurement]) -> None:
    """Print why contenders were not timed, one line per reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for m in measurements:
        if m.status != "ok":
            reasons.setdefault((m.name, m.status, m.reason), []).append(m.case.label)
    if reasons:
        print_text("")
    for (name, status, reason), cases in reasons.items():
        print_text(f"{name} {status} ({', '.join(cases)}): {reason}")


def _print_checked(measurements: Sequence[Measurement]) -> None:
    """Print which queries were compared with the oracle."""
    checked = {m.case.length: m.checked_rows for m in measurements if m.checked_rows}
    some = [f"{rows} of {length}" for length, rows in checked.items() if rows < length]
    queries = "all queries" if not some else f"{', '.join(some)} queries of each head"
    large = sorted(
        {m.case.length for m in measurements if m.checked_rows and isinstance(m.case, Case) and is_large(m.case)}
    )
    if large:
        queries += f"; with {', '.join(map(str, large))} tokens only in the first and last batch and kv head"
    if checked:
        print_text(f"\nChecked before timing, against float64: {queries}. Memory is in addition to inputs and outputs.")


def status_text(m: Measurement) -> Text:
    """The status in its colour; empty for "ok"."""
    return Text("" if m.status == "ok" else m.status, style=_STYLES.get(m.status, ""))


def milliseconds(seconds: float | None) -> str:
    """A time for people to read; empty for None."""
    return "" if seconds is None else f"{seconds * 1e3:,.{3 if seconds < 1e-2 else 1}f} ms"
