"""`attnops check`: whether an operation is right, feature by feature."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnops.cli.output import fail, print_heading, print_json, print_table, print_text
from attnops.dispatch.platforms import platform_of
from attnops.errors import PluginError
from attnops.testing.behaviours import BEHAVIOURS, MEMORY, memory_growth
from attnops.testing.features import FEATURES
from attnops.testing.runner import Outcome, Status, Subject, attempt, covering_rows, joined, sampled_pairs

Check = tuple[str, Callable[[], list[Outcome]]]


def command(
    operation: Annotated[str, typer.Argument(help="Name of the operation, or distribution:operation.")],
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Run kernels in their interpreter.")] = False,
    pairs: Annotated[
        Literal["none", "sample", "all"],
        typer.Option(help="Features combined: none, a sample that has each of them, or every pair."),
    ] = "sample",
    mode: Annotated[
        str, typer.Option(help="train, prefill, decode or insert; gradients are checked in train.")
    ] = "train",
    block: Annotated[int, typer.Option(help="Queries and keys a tile; lengths are 2.5 times it.", min=4)] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every check.")] = False,
) -> None:
    """Run the conformance suite: each feature of the contract is right, refused with a reason, or wrong.

    Values and gradients are compared with a float64 oracle. Exits with 1 if anything is wrong, with 2 if there is no
    such operation.
    """
    try:
        subject = Subject(operation=operation, platform=platform, interpret=interpret, mode=mode, block=block)
        with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints when imported
            heading = _heading(subject)
    except (ValueError, PluginError) as error:
        fail(error, 2)
    if not json:
        print_text(heading)
    sections = {
        "features": [(name, _one(subject, name)) for name in FEATURES],
        "behaviours": [*_behaviours(subject), *_memory(subject)],
        "pairs": _pairs(subject, pairs),
    }
    with _progress(sum(map(len, sections.values()))) as step:
        found = {section: [x for check in checks for x in _run(check, step)] for section, checks in sections.items()}
    counts = Counter(outcome.status for outcomes in found.values() for outcome in outcomes)
    if json:
        described = {section: [dataclasses.asdict(x) for x in outcomes] for section, outcomes in found.items()}
        print_json({"operation": operation, "platform": subject.at, "forward": subject.forward} | described)
    else:
        _print(found, counts)
    if counts[Status.WRONG]:
        raise typer.Exit(1)


def _heading(subject: Subject) -> str:
    cls = subject.cls
    text = f"{cls.__module__}.{cls.__name__}.forward_{subject.forward} on {subject.at}"
    here = {platform_of(device) for device in jax.local_devices()}
    if subject.base.interpret:
        return f"{text}, interpreted"
    if subject.at not in here:
        text += f" (this machine has {', '.join(sorted(here))} alone: a kernel needs --interpret here)"
    return text


def _one(subject: Subject, name: str) -> Callable[[], list[Outcome]]:
    return lambda: [subject.check([name])]


def _behaviours(subject: Subject) -> Iterator[Check]:
    for name, behaviour in BEHAVIOURS.items():
        yield name, functools.partial(_attempt, name, functools.partial(behaviour, subject))


def _memory(subject: Subject) -> Iterator[Check]:
    for case in MEMORY:
        name = f"memory, {case}"
        yield name, functools.partial(_attempt, name, functools.partial(memory_growth, subject, case))


def _attempt(name: str, check: Callable[[], None]) -> list[Outcome]:
    return [attempt(name, check)]


def _pairs(subject: Subject, which: str) -> list[Check]:
    rows = {"none": (), "sample": sampled_pairs(), "all": covering_rows()}[which]
    found: dict[str, Outcome] = {}

    def check(row: tuple[str, ...]) -> list[Outcome]:
        # A pair may be in several rows; the first that has it counts, unless a later one is wrong.
        fresh = [x for x in subject.check_pairs(row) if x.name not in found or x.status is Status.WRONG]
        found.update((x.name, x) for x in fresh)
        return fresh

    return [(joined(row), functools.partial(check, row)) for row in rows]


def _run(check: Check, step: Callable[[str], None]) -> list[Outcome]:
    name, run = check
    step(name)
    with contextlib.redirect_stdout(sys.stderr):
        return run()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            progress.update(task, description=name, advance=int(started))
            started = True

        yield step


def _print(found: dict[str, list[Outcome]], counts: Counter[Status]) -> None:
    for section in ("features", "behaviours"):
        print_heading(section)
        print_table((section[:-1], "result", "why"), [_row(outcome) for outcome in found[section]])
    if pairs := found["pairs"]:
        print_heading("pairs")
        refused = {outcome.name for outcome in found["features"] if outcome.status is Status.REFUSED}
        telling = [
            outcome
            for outcome in pairs
            if outcome.status is Status.WRONG
            or (outcome.status is Status.REFUSED and not refused & set(outcome.name.split(" + ")))
        ]
        right = sum(outcome.status is Status.RIGHT for outcome in pairs)
        print_text(f"{right} of {len(pairs)} are right")
        if telling:
            print_table(("pair", "result", "why"), [_row(outcome) for outcome in telling])
    print_text("\n" + ", ".join(f"{counts[status]} {status}" for status in Status))


def _row(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.name, str(outcome.status), outcome.detail.partition("\n")[0]
