"""How the commands print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["fail", "print_heading", "print_json", "print_table", "print_text", "printer", "showable"]

# Wide enough that nothing is truncated or wrapped if a program reads the output.
_PIPE_WIDTH = 200

_STYLES = {
    "loaded": "green",
    "failed": "bold red",
    "incompatible": "red",
    "disabled": "yellow",
    "discovered": "dim",
}


# Replacements for characters that the terminal can't show; "?" for any other.
_ASCII = str.maketrans({
    "·": ".", "▒": "+", "█": "#", "×": "x", "≥": ">=", "≤": "<=", "≠": "!=", "–": "-", "−": "-", "…": "...",
    "→": "->", "∞": "inf", "²": "2", "●": "*", "○": "o", "±": "+-", "µ": "u", "Σ": "sum", "’": "'",
})  # fmt: skip


def showable(text: str) -> str:
    """``text`` with characters that stdout can show, such as ASCII only in the locale "C"."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def print_text(text: str) -> None:
    """Print ``text`` as it is: no markup, no wrapping."""
    printer().print(Text(showable(text)), soft_wrap=True)


def print_heading(text: str) -> None:
    """Print the heading of a section."""
    printer().print(Text(f"\n{showable(text)}", style="bold"), soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int] = ()) -> None:
    """Print a table; a cell that is a plugin's state is coloured.

    Args:
        columns: the headings; empty for rows of a table whose headings are printed already.
        rows: the cells.
        widths: the widths of the first columns, at most a third of the line each, if a table is printed in pieces.
    """
    rows = list(rows)
    console = printer()
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for i in range(len(columns or rows[0])):
        width = min(widths[i], console.width // 3) if i < len(widths) else None
        table.add_column(showable(columns[i]) if columns else "", overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(showable(cell), style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON for a program to read; sets are sorted."""
    typer.echo(json.dumps(value, indent=2, default=sorted))


def fail(error: Exception | str, status: int) -> NoReturn:
    """Print what is wrong, without a traceback, and exit."""
    print(f"attnops: {error}", file=sys.stderr)
    raise typer.Exit(status)


def printer() -> Console:
    """A console that prints to stdout, as wide as the terminal or as COLUMNS says."""
    console = Console(highlight=False)
    known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if known else Console(highlight=False, width=_PIPE_WIDTH)
