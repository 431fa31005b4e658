"""`attnops check`: whether an operation is right, feature by feature."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnops.cli.output import fail, print_heading, print_json, print_table, print_text
from attnops.cli.shrink import Explained, explain
from attnops.dispatch.platforms import platform_of
from attnops.errors import PluginError
from attnops.testing.behaviours import BEHAVIOURS, MEMORY, memory_growth
from attnops.testing.cache_features import CACHE_FEATURES, cache_rows, combine_cache
from attnops.testing.caches import cache_name, check_cache_row
from attnops.testing.features import FEATURES, combine
from attnops.testing.long import LONG
from attnops.testing.pairs import covering_rows, joined, sampled_pairs
from attnops.testing.runner import Outcome, Status, Subject, attempt

Check = tuple[str, Callable[[], list[Outcome]]]

# A warning is printed where fewer of the features are served: what is refused is not checked.
COVERAGE: Final = 1 / 4

# So many failures are explained: others often have the same cause.
EXPLAINED: Final = 3

_OF_CACHES: Final = CACHE_FEATURES.keys() - FEATURES.keys()


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    operation: Annotated[str, typer.Argument(help="Name of the operation, or distribution:operation.")],
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Run kernels in their interpreter.")] = False,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only this feature or behaviour, or features joined by ' + '; of caches too; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of query, key and value.", show_default="float32, else what is served")
    ] = None,
    pairs: Annotated[
        Literal["none", "sample", "all"],
        typer.Option(help="Features combined: none, a sample that has each of them, or every pair."),
    ] = "sample",
    mode: Annotated[
        str, typer.Option(help="train, prefill, decode or insert; gradients are checked in train.")
    ] = "train",
    block: Annotated[int, typer.Option(help="Queries and keys a tile; lengths are 2.5 times it.", min=4)] = 16,
    shrink: Annotated[
        float, typer.Option(help="Seconds in which smaller problems are tried where a feature is wrong.", min=0)
    ] = 30,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every check.")] = False,
) -> None:
    """Run the conformance suite: each feature of the contract is right, refused with a reason, or wrong.

    What is wrong is explained: by which features, in the smallest problem that still fails, with both values.

    Values and gradients are compared with a float64 oracle, in problems that the kernel serves. Exits with 1 if
    anything is wrong, with 2 if there is no such operation, or only the core's native forward where a kernel was
    asked for.
    """
    try:
        subject = Subject(
            operation=operation, platform=platform, interpret=interpret, mode=mode, block=block, dtype=dtype
        )
        with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints when imported
            subject.require_kernel()
            heading = _heading(subject)
            sections = _sections(subject, pairs) if feature is None else _named(subject, feature)
    except (ValueError, PluginError) as error:
        fail(error, 2)
    if not json:
        print_text(heading)
    with _progress(sum(map(len, sections.values()))) as step:
        found = {section: [x for check in checks for x in _run(check, step)] for section, checks in sections.items()}
    counts = Counter(outcome.status for outcomes in found.values() for outcome in outcomes)
    explained = _explained(subject, found, shrink)
    if json:
        print_json(_described(subject, found) | {"explained": [dataclasses.asdict(x) for x in explained]})
    else:
        _print(found, counts, explained)
    if feature is None and (warning := _low_coverage(found["features"])):
        print(f"attnops: {warning}", file=sys.stderr)
    if counts[Status.WRONG]:
        raise typer.Exit(1)


def _heading(subject: Subject) -> str:
    """What is checked, and on which problems."""
    forward, where = subject.place
    text = f"{subject.name}: {forward} on {subject.at}"
    here = {platform_of(device) for device in jax.local_devices()}
    if subject.base.interpret:
        text += ", interpreted"
    elif subject.at not in here:
        text += f" (this machine has only {', '.join(sorted(here))}: a kernel needs --interpret here)"
    fit, long = subject.fit, subject.long.fit
    lengths = fit.tokens(2, 0.5), long.tokens(2, 0.5)
    problems = (
        f"problems of B{fit.B} H{fit.H} D{fit.D} {fit.dtype}, T = {lengths[0]} in tiles of {fit.block} and "
        f"T = {lengths[1]} in tiles of {long.block}"
    )
    return "\n".join([text, *([f"  {where}"] if where else []), f"  {problems}; for larger tiles state --block"])


def _sections(subject: Subject, pairs: str) -> dict[str, list[Check]]:
    return {
        "features": [(name, _one(subject, [name])) for name in FEATURES],
        "long": _long(subject, LONG),
        "behaviours": [*_behaviours(subject), *_memory(subject)],
        "caches": _caches(subject, cache_rows()),
        "pairs": _pairs(subject, pairs),
    }


def _named(subject: Subject, names: Sequence[str]) -> dict[str, list[Check]]:
    """The cases of ``--feature``: features, single or joined, in long problems where these are checked; behaviours.

    Features of which one is of caches only, such as ``"paged + Causal"``, are those of a call over a cache.

    Raises:
        ValueError: one is unknown, or two exclude each other.
    """
    rows = [tuple(name.strip() for name in text.split(" + ")) for text in names]
    behaviours = dict([*_behaviours(subject), *_memory(subject)])
    others = {name: check for name, check in behaviours.items() if (name,) in rows}
    rows = [row for row in rows if row[0] not in others]
    of_caches = [row for row in rows if set(row) <= set(CACHE_FEATURES) and set(row) & _OF_CACHES]
    rows = [row for row in rows if row not in of_caches]
    for row in of_caches:
        combine_cache(row)
    for row in rows:
        if len(row) == 1 and row[0] not in FEATURES and (near := difflib.get_close_matches(row[0], behaviours)):
            raise ValueError(f"behaviour {row[0]!r} is unknown; did you mean {' or '.join(map(repr, near))}?")
        combine(row)
    return {
        "features": [(joined(row), _one(subject, row)) for row in rows],
        "long": _long(subject, [row for row in LONG if any(set(row) == set(named) for named in rows)]),
        "behaviours": list(others.items()),
        "caches": _caches(subject, of_caches),
    }


def _long(subject: Subject, rows: Sequence[tuple[str, ...]]) -> list[Check]:
    return [(f"long: {joined(row)}", _one(subject.long, row)) for row in rows]


def _caches(subject: Subject, rows: Sequence[tuple[str, ...]]) -> list[Check]:
    return [(cache_name(row), functools.partial(check_cache_row, subject, row)) for row in rows]


def _described(subject: Subject, found: dict[str, list[Outcome]]) -> dict[str, Any]:
    forward, where = subject.place
    return {
        "operation": subject.name,
        "platform": subject.at,
        "forward": subject.forward,
        "function": forward,
        "file": where,
        "problem": dataclasses.asdict(subject.fit),
    } | {section: [dataclasses.asdict(x) for x in outcomes] for section, outcomes in found.items()}


def _explained(subject: Subject, found: dict[str, list[Outcome]], seconds: float) -> list[Explained]:
    """The first features that are wrong, and pairs of features that are right by themselves, in smaller problems."""
    wrong: dict[str, tuple[Subject, Outcome]] = {}
    for section, at in (("features", subject), ("long", subject.long), ("pairs", subject)):
        for outcome in found.get(section, ()):
            if outcome.status is Status.WRONG and not wrong.keys() & {outcome.name, *outcome.name.split(" + ")}:
                wrong[outcome.name] = at, outcome
    chosen = list(wrong.values())[:EXPLAINED] if seconds else []
    end = time.monotonic() + seconds
    explained = []
    for n, (at, outcome) in enumerate(chosen):
        share = max(0.0, end - time.monotonic()) / (len(chosen) - n)
        with contextlib.redirect_stdout(sys.stderr):
            explained.append(explain(at, outcome, outcome.name.split(" + "), share))
    return [x for x in explained if x is not None]


def _low_coverage(features: list[Outcome]) -> str:
    """What to say where little was served; empty where enough was."""
    served = sum(outcome.status is not Status.REFUSED for outcome in features)
    if served >= COVERAGE * len(features):
        return ""
    return (
        f"only {served} of {len(features)} features are served; whatever else a call asks for runs forward_native, "
        f"or raises, which this check does not cover"
    )


def _one(subject: Subject, names: Sequence[str]) -> Callable[[], list[Outcome]]:
    return lambda: [subject.check(names)]


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
    """The pairs, drawn among the features that are served."""
    rows: Sequence[tuple[str, ...]] = ()
    if which != "none":
        served = [name for name in subject.served if name in FEATURES]
        rows = sampled_pairs(served) if which == "sample" else covering_rows(served)
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


_HEADINGS: Final = {"features": "feature", "long": "in long problems", "behaviours": "behaviour",
                    "caches": "calls over a cache"}  # fmt: skip


def _print(found: dict[str, list[Outcome]], counts: Counter[Status], explained: Sequence[Explained]) -> None:
    for section, column in _HEADINGS.items():
        if found.get(section):
            print_heading(section)
            print_table((column, "result", "why"), [_row(outcome) for outcome in found[section]])
    if pairs := found.get("pairs"):
        print_heading("pairs")
        print_text(_counted(Counter(outcome.status for outcome in pairs)))
        telling = [outcome for outcome in pairs if outcome.status in (Status.WRONG, Status.REFUSED)]
        if telling:
            print_table(("pair", "result", "why"), [_row(outcome) for outcome in telling])
    for why in explained:
        named = f"with {joined(why.features)} alone" if why.features else "without any feature"
        if why.features == tuple(why.name.split(" + ")):
            named = "as stated"
        print_heading(f"{why.name} is wrong {named}")
        limit = "" if why.complete else "; --shrink has more seconds to look for a smaller one"
        print_text(f"{why.problem}\n{_indented(why.detail)}\nthe smallest problem that was found{limit}")
    print_text(f"\n{_counted(counts)}")
    wrong = dict.fromkeys(x.name for outcomes in found.values() for x in outcomes if x.status is Status.WRONG)
    if wrong:
        print_text(f'wrong: {", ".join(wrong)}\ncheck one again with --feature "{next(iter(wrong))}"')


def _indented(text: str) -> str:
    """At most the first lines of a text, such as that of an exception."""
    return "\n".join(f"  {line}" for line in text.splitlines()[:8])


def _counted(counts: Counter[Status]) -> str:
    return ", ".join(f"{counts[status]} {status}" for status in Status)


def _row(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.name, str(outcome.status), outcome.detail.partition("\n")[0]
