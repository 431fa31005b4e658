"""`attnops score`: which attention of other libraries computes what."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnops_cli.output import fail, print_text
from attnops_testing.score.cases import Case, cases
from attnops_testing.score.environments import ADAPTERS, Library, libraries
from attnops_testing.score.judge import FAULTS, Row, Verdict, judge
from attnops_testing.score.process import run
from attnops_testing.score.report import markdown

ENVIRONMENTS: Final = Path.home() / ".cache" / "attnops" / "score"


def command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of adapters.", metavar="LIBRARY", show_default="all")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the page; PAGE/results.json keeps the results, and those of libraries not named."),
    ] = None,
    python: Annotated[Path, typer.Option(help="The Python that makes environments.")] = Path(sys.executable),
    environments: Annotated[Path, typer.Option(help="The folder of environments, of up to a GB each.")] = ENVIRONMENTS,
    adapters: Annotated[Path, typer.Option(help="The folder of adapters.")] = ADAPTERS,
    limit: Annotated[float, typer.Option(help="Seconds for a case.", min=1)] = 120.0,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Run nothing; write the page from its results.")
    ] = False,
) -> None:
    """Score other libraries' attention: right, refused, a convention, a crash, or wrong in silence.

    Each library is installed by pip in an environment of its own, and its calls run in a process there, with a time
    limit. A case is a feature of attnops' contract; results and gradients are compared with the float64 oracle.

    Exits with 2 if the arguments are invalid or an environment can't be made.
    """
    known = libraries(adapters)
    if unknown := set(names or ()) - set(known):
        fail(f"library {min(unknown)!r} is unknown; there are {', '.join(known)}", 2)
    results = None if write is None else write.with_suffix("") / "results.json"
    records: dict[str, Any] = json.loads(results.read_text()) if results is not None and results.exists() else {}
    for library in () if page_only else [known[name] for name in names or known]:
        try:
            interpreter = library.environment(environments, str(python))
        except subprocess.CalledProcessError as error:
            fail(f"{library.name}: {error.stderr.strip() or error}", 2)
        records[library.name] = score(library, interpreter, limit)
        rows = {
            case: Row(Verdict(verdict), detail) for case, (verdict, detail) in records[library.name]["rows"].items()
        }
        counts = Counter(row.verdict for row in rows.values())
        print_text(f"{library.name} {records[library.name]['version']}: "
                   f"{', '.join(f'{counts[x]} {x}' for x in Verdict if counts[x])}")  # fmt: skip
        for case, row in rows.items():
            if row.verdict in FAULTS:
                print_text(f"  {case}: {row.verdict}: {row.detail}")
        if results is not None and write is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(records, ensure_ascii=False) + "\n")
    if write is not None:
        folder = write.with_suffix("")
        write.write_text(markdown(records, known, folder, os.path.relpath(folder, write.parent)))


def score(library: Library, interpreter: Path, limit: float) -> dict[str, Any]:
    """The record of a library: its version, the date, and by case the verdict and its reason."""
    chosen: list[Case] = list(cases(library.size))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(library.name, total=len(chosen))
        outcomes = run(library.path, interpreter, chosen, limit, lambda _: progress.advance(task))
    rows = {case.name: judge(case, *outcomes[case.name], library.declared["CONVENTIONS"]) for case in chosen}
    version = next((ending["version"] for ending, _ in outcomes.values() if "version" in ending), "")
    return {
        "version": version, "date": datetime.date.today().isoformat(),
        "rows": {name: [row.verdict, row.detail] for name, row in rows.items()},
    }  # fmt: skip
