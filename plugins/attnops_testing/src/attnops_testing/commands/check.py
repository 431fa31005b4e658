"""`attnops check`: whether an operation is right, feature by feature."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import jax
import typer

from attnops.dispatch.platforms import platform_of
from attnops.errors import PluginError
from attnops_cli.noise import find_devices
from attnops_cli.output import fail, print_text
from attnops_testing.cache_features import CACHE_FEATURES, combine_cache
from attnops_testing.commands.check_report import CheckReport
from attnops_testing.commands.shrink import Explained, explain
from attnops_testing.features import FEATURES, combine
from attnops_testing.limit import default_limit, limited
from attnops_testing.long import LONG
from attnops_testing.runner import NothingToCheckError, Outcome, Status, Subject
from attnops_testing.suite import SUITE, behaviours_by_name, make_cpu_devices, require_known

Check = tuple[str, Callable[[], list[Outcome]]]

# A warning is printed if a smaller share of the features is served: refused features are not checked.
COVERAGE: Final = 1 / 4

# The most failures that are explained: further ones often have the same cause.
EXPLAINED: Final = 3

_CACHE_ONLY: Final = CACHE_FEATURES.keys() - FEATURES.keys()

# The parts of the suite by section. By default a problem has several features; --all checks each alone, also in long
# problems.
_QUICK: Final = {"features": ("each_feature",), "behaviours": ("behaviour", "memory_growth"), "caches": ("caches",)}
_ALL: Final = _QUICK | {"features": ("feature",), "long": ("long",)}
_PAIRS: Final = {"none": (), "sample": ("sampled_pair",), "all": ("all_pairs",)}


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    operation: Annotated[str, typer.Argument(help="Name of the operation, or distribution:operation.")],
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Run kernels in their interpreter.")] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="Each feature alone, corners, long problems and pairs too, as pytest -m '' does."),
    ] = False,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only this feature or behaviour, or features joined by ' + '; of caches too; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    refuses: Annotated[
        list[str] | None,
        typer.Option(
            help="Must be refused, as names in `refuses` of OperationConformance; may be repeated.", metavar="NAME"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The dtype of query, key and value.", show_default="float32, else what is served")
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            help="The head dim; lengths are 320 or more, and the kernel chooses its tiles.",
            show_default="the smallest that is served",
            min=1,
        ),
    ] = None,
    pairs: Annotated[
        Literal["none", "sample", "all"] | None,
        typer.Option(help="Pairs of features; a sample has each feature.", show_default="sample with --all, else none"),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="train, prefill, decode or insert; gradients are checked in train.")
    ] = "train",
    block: Annotated[int, typer.Option(help="Queries and keys per tile; lengths are 2.5 times it.", min=4)] = 16,
    limit: Annotated[
        float | None, typer.Option(help="Seconds a check may take.", show_default="100, interpreted 300", min=1)
    ] = None,
    shrink: Annotated[
        float, typer.Option(help="Seconds to search for smaller problems in which a feature is wrong.", min=0)
    ] = 30,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print complete tracebacks.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every check.")] = False,
) -> None:
    """Run the conformance suite: each feature of the contract is right, refused with a reason, or wrong.

    Failures are explained: which features cause them, and both values, in the smallest problem that still fails.

    Values and gradients are compared with a float64 oracle, in problems that the kernel serves. By default it checks
    what pytest runs of the class OperationConformance: several features per problem. Ctrl-C ends it with a summary.

    Exits with 1 if anything is wrong, with 2 if there is no such operation or platform, or if only the core's native
    forward would be checked instead of a kernel, with 130 if it was stopped.
    """
    make_cpu_devices()
    find_devices()
    try:
        subject = Subject(
            operation=operation,
            platform=platform,
            interpret=interpret,
            mode=mode,
            block=block,
            dtype=dtype,
            head_dim=head_dim,
        )
        with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints when imported
            subject.require_kernel()
            _require_platform(subject)
            heading = _heading(subject)
            pairs = pairs or ("sample" if every else "none")
            declared = refuses or []
            require_known("--refuses", declared)
            named = None if feature is None else _named(subject, feature, declared)
            sections = named or _sections(subject, every, pairs, declared)
    except (ValueError, PluginError) as error:
        fail(error, 2)
    report = CheckReport(functools.partial(_described, subject) if json else None, verbose)
    if not json:
        print_text(heading)
    limit = default_limit(interpret) if limit is None else limit
    within = functools.partial(limited, report=report.ended)
    try:
        for section, checks in sections.items():
            by_row = section == "features" and feature is None
            report.section(section, list(FEATURES) if by_row else [name for name, _ in checks])
            for name, check in checks:
                with within(name, limit), contextlib.redirect_stdout(sys.stderr):
                    outcomes = check()
                report.add(outcomes)
            report.close()
        with within("the search for smaller problems", shrink + limit):
            report.explained = _explained(
                subject if every or feature else subject.small(4), subject, report.outcomes, shrink
            )
    except KeyboardInterrupt:
        report.stopped = True
    report.finish()
    if feature is None and (warning := _low_coverage(report.outcomes["features"])) and not report.stopped:
        print(f"attnops: {warning}", file=sys.stderr)
    raise typer.Exit(130 if report.stopped else int(report.counts[Status.WRONG] > 0))


def _require_platform(subject: Subject) -> None:
    """Make sure that the kernel can run here.

    Raises:
        NothingToCheckError: JAX has no device of the kernel's platform, and the kernel is not interpreted.
    """
    here = {platform_of(device) for device in jax.local_devices()}
    if not subject.interpret and subject.checked_platform not in here and subject.forward != "native":
        hint = "add --interpret, which runs the kernel in its interpreter"
        raise NothingToCheckError(
            f"{subject.name} is for {subject.checked_platform}, but JAX has only {', '.join(sorted(here))} here: "
            f"{'set JAX_PLATFORMS=cpu' if subject.checked_platform == 'cpu' else hint}"
        )


def _heading(subject: Subject) -> str:
    """The forward that is checked, and the sizes of the problems."""
    forward, where = subject.place
    text = f"{subject.name}: {forward} on {subject.checked_platform}"
    if subject.base.interpret:
        text += ", interpreted"
    fit, long = subject.fit, subject.long.fit
    lengths = fit.tokens(2, 0.5), long.tokens(2, 0.5)
    problems = f"problems of B{fit.B} H{fit.H} D{fit.D} {fit.dtype}, "
    if fit.own_tiles:
        problems += f"T = {lengths[0]}, in the operation's own tiles"
    else:
        problems += f"T = {lengths[0]} in tiles of {fit.block} and T = {lengths[1]} in tiles of {long.block}; "
        problems += "for larger tiles state --block"
    return "\n".join([text, *([f"  {where}"] if where else []), f"  {problems}"])


def _sections(subject: Subject, every: bool, pairs: str, refuses: Sequence[str]) -> dict[str, list[Check]]:
    return {
        section: [
            (part.name(case), functools.partial(part.check, subject, case, refuses))
            for part in map(SUITE.__getitem__, parts)
            for case in part.cases
            if every or section == "pairs" or part.quick(case, subject.interpret)
        ]
        for section, parts in {**(_ALL if every else _QUICK), "pairs": _PAIRS[pairs]}.items()
    }


def _named(subject: Subject, names: Sequence[str], refuses: Sequence[str]) -> dict[str, list[Check]]:
    """The cases of ``--feature``, by section: features, single or joined, also in long problems if there are such, and
    behaviours.

    If one of joined features exists only for caches, as in ``"paged + Causal"``, all are features of a call over one.

    Raises:
        ValueError: one is unknown, or two exclude each other.
    """
    behaviours = behaviours_by_name()
    rows = [tuple(name.strip() for name in text.split(" + ")) for text in names]
    require_known("feature", names)
    chosen = [behaviours[row[0]] for row in rows if row[0] in behaviours]
    rows = [row for row in rows if row[0] not in behaviours]
    cache_rows = [row for row in rows if set(row) <= set(CACHE_FEATURES) and set(row) & _CACHE_ONLY]
    rows = [row for row in rows if row not in cache_rows]
    for row in cache_rows:
        combine_cache(row)
    for row in rows:
        combine(row)
    long = [row for row in LONG if any(set(row) == set(named) for named in rows)]
    cases: dict[str, list[tuple[str, Any]]] = {
        "features": [("feature", row) for row in rows], "long": [("long", row) for row in long],
        "behaviours": chosen, "caches": [("caches", row) for row in cache_rows],
    }  # fmt: skip
    return {
        section: [
            (SUITE[part].name(case), functools.partial(SUITE[part].check, subject, case, refuses))
            for part, case in chosen
        ]
        for section, chosen in cases.items()
    }


def _described(subject: Subject, outcomes_by_section: dict[str, list[Outcome]]) -> dict[str, Any]:
    forward, where = subject.place
    return {
        "operation": subject.name,
        "platform": subject.checked_platform,
        "forward": subject.forward,
        "function": forward,
        "file": where,
        "problem": dataclasses.asdict(subject.fit),
    } | {section: [dataclasses.asdict(x) for x in outcomes] for section, outcomes in outcomes_by_section.items()}


def _explained(
    single: Subject, subject: Subject, outcomes_by_section: dict[str, list[Outcome]], seconds: float
) -> list[Explained]:
    """Explanations, in smaller problems, of the first wrong features, and of wrong pairs of features that are right
    alone.
    """
    wrong: dict[str, tuple[Subject, Outcome]] = {}
    for section, checked in (("features", single), ("long", subject.long), ("pairs", subject)):
        for outcome in outcomes_by_section.get(section, ()):
            if outcome.status is Status.WRONG and not wrong.keys() & {outcome.name, *outcome.name.split(" + ")}:
                wrong[outcome.name] = checked, outcome
    chosen = list(wrong.values())[:EXPLAINED] if seconds else []
    end = time.monotonic() + seconds
    explained = []
    for n, (checked, outcome) in enumerate(chosen):
        share = max(0.0, end - time.monotonic()) / (len(chosen) - n)
        with contextlib.redirect_stdout(sys.stderr):
            explained.append(explain(checked, outcome, outcome.name.split(" + "), share))
    return [x for x in explained if x is not None]


def _low_coverage(features: list[Outcome]) -> str:
    """A warning if few features were served; else empty."""
    served = sum(outcome.status is not Status.REFUSED for outcome in features)
    if served >= COVERAGE * len(features):
        return ""
    return (
        f"only {served} of {len(features)} features are served; calls with the others run forward_native, or raise, "
        f"which this check does not cover"
    )
