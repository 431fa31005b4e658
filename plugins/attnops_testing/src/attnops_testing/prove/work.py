"""What steps of `attnops prove` do, each in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax

from attnops.dispatch.platforms import platform_of
from attnops_cli.doctor import examine
from attnops_testing.bench import describe_machine, find, measure
from attnops_testing.prove.cases import TimedCase
from attnops_testing.prove.plan import absent_peers, plan
from attnops_testing.prove.step import Ending
from attnops_testing.runner import Outcome, Status, Subject
from attnops_testing.suite import SUITE, make_cpu_devices

Answer = tuple[Ending, str, Any]


def find_machine(operations: Sequence[str], every: bool, limit: float | None) -> Answer:
    """The machine, what `attnops doctor` finds, and the steps that prove its operations."""
    platform = platform_of(jax.devices()[0])
    report = examine()
    try:
        steps = plan(platform, operations, every, limit)
    except ValueError as error:
        return Ending.WRONG, str(error), None
    value = {
        "machine": describe_machine(),
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "peers": absent_peers(platform),
        "steps": [dataclasses.asdict(step) for step in steps],
    }  # fmt: skip
    return Ending.RIGHT, "", value


def check(
    operation: str, part: str, case: Any, mode: str, dtype: str | None = None, head_dim: int | None = None
) -> Answer:
    """The outcomes of a case of the conformance suite."""
    make_cpu_devices()
    case = case if isinstance(case, str) else tuple(case)
    subject = Subject(operation=operation, mode=mode, dtype=dtype, head_dim=head_dim)
    outcomes = SUITE[part].check(subject, case)
    return _worst(outcomes), _details(outcomes), [dataclasses.asdict(outcome) for outcome in outcomes]


def check_problem(module: str, operation: str, problem: str, every: bool) -> Answer:
    """The outcomes of a problem of another contract's suite: values and gradients under `jax.jit`, or every check."""
    options = {} if every else {"checks": ("jit",)}
    outcomes = importlib.import_module(module).check(operation, [problem], **options)
    return _worst(outcomes), _details(outcomes), [dataclasses.asdict(outcome) for outcome in outcomes]


def measure_times(case: dict[str, Any], contenders: Sequence[str]) -> Answer:
    """The times of operations and peers in one case, in turns, after each was compared with the oracle."""
    timed = TimedCase(**case)
    made = timed.make()
    found = find(contenders)
    entries = [(made, contender) for contender in (*found, *timed.further)]
    # Over a cache each timing is one call, as in `attnops bench`.
    measured = measure(entries, most_seconds=3.0, shortest=0.0 if timed.cache else 0.01)
    ours = [m for m in measured if not m.is_peer]
    wrong = [m for m in ours if m.status in ("wrong", "failed")]
    detail = "; ".join(f"{m.name}: {m.reason}" for m in wrong)
    return (Ending.WRONG if wrong else Ending.RIGHT), detail, [m.to_json() for m in measured]


def _worst(outcomes: Sequence[Outcome]) -> Ending:
    """Wrong if one is; otherwise right if one is."""
    statuses = {outcome.status for outcome in outcomes}
    return Ending(next(s for s in (Status.WRONG, Status.RIGHT, Status.REFUSED, Status.NOT_RUN) if s in statuses))


def _details(outcomes: Sequence[Outcome]) -> str:
    worst = _worst(outcomes)
    chosen = [x for x in outcomes if x.status == worst.value and x.detail]
    return "\n".join(f"{x.name}: {x.detail}" for x in chosen)
