"""Counts the programs of tests by file, and holds the quick tests to the bounds of `tests/budget.toml`.

A machine's speed changes how long tests take, but not what they compile. Counted are: programs that XLA is asked for
(also those that the test cache has), kernels that an interpreter runs, GPU kernels that Triton compiles, and processes
that are started. ``--budget`` fails above the bounds and names the files that grew; ``--budget-write`` writes the
counts of a run, from which the bounds follow.
"""

from __future__ import annotations

import collections
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import jax
import pytest

BUDGET: Final = Path(__file__).parents[1] / "budget.toml"
# By what an event is called: what is counted.
EVENTS: Final = {
    "/jax/core/compile/backend_compile_duration": "compiled",
    "/attnops/kernel/interpreted": "interpreted",
    "/attnops/kernel/compiled": "assembled",
}
KINDS: Final = ("compiled", "interpreted", "assembled", "processes")
# Roughly what one of each takes, by which files are ordered.
SECONDS: Final = (0.05, 1.5, 2.0, 5.0)
# The room of the bounds above the counts when they are written: a first call in a process may compile a little more.
ROOM: Final = 1.05

_HEAD: Final = """\
# What the quick tests cost, whatever the machine: see tests/support/program_budget.py and CONTRIBUTING.md.
# `make budget` writes it. A change that needs more says so in its description, and takes as much out elsewhere.

# The bounds hold for this version of JAX; another compiles other programs.
jax = "{jax}"

# `make test` fails above these.
[bounds]
"""
_FILES: Final = """
# By file: programs compiled by XLA, kernels interpreted, GPU kernels assembled, processes started.
[files]
"""

Counts = collections.Counter[str]
_now: Counts = collections.Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--budget` and `--budget-write`."""
    group = parser.getgroup("attnops")
    group.addoption("--budget", action="store_true", help="fail above the bounds of tests/budget.toml")
    group.addoption("--budget-write", action="store_true", help="write tests/budget.toml from this run")


def pytest_configure(config: pytest.Config) -> None:
    """Listen, in each process that runs tests."""
    jax.monitoring.register_event_listener(_count)
    jax.monitoring.register_event_duration_secs_listener(_count)
    sys.addaudithook(_count_process)
    if not hasattr(config, "workerinput"):  # with workers, their reports come to the process that started them
        config.pluginmanager.register(Ledger(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The costliest files first: a worker has a whole file, and none should begin with a long one at the end."""
    if not config.option.budget:
        return
    files = tomllib.loads(BUDGET.read_text())["files"]

    def seconds(item: pytest.Item) -> float:
        counts = files.get(item.nodeid.partition("::")[0], [0] * len(KINDS))
        return sum(count * each for count, each in zip(counts, SECONDS, strict=True))

    items.sort(key=lambda item: -seconds(item))


def _count(event: str, *_: object, **__: object) -> None:
    if event in EVENTS:
        _now[EVENTS[event]] += 1


def compiled() -> int:
    """The programs compiled in this test until now."""
    return _now["compiled"]


def _count_process(event: str, _: object) -> None:
    if event == "subprocess.Popen":
        _now["processes"] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What a test costs, with the fixtures that it is the first to need, travels with its last report."""
    _now.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """See `pytest_runtest_protocol`."""
    report = yield
    if call.when == "teardown":
        report.budget = dict(_now)
    return report


class Ledger:
    """Adds up the counts by file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, Counts] = collections.defaultdict(collections.Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has ended."""
        if counts := getattr(report, "budget", None):
            self.files[report.nodeid.partition("::")[0]].update(counts)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The files that cost most, and what exceeds a bound."""
        total = add_up(self.files)
        if not total:
            return
        terminalreporter.section("programs by file")
        for line in table(self.files, lines=15):
            terminalreporter.write_line(line)
        for line in self.faults():
            terminalreporter.write_line(line, red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the budget, or fail above it."""
        if self.config.option.budget_write:
            BUDGET.write_text(written(self.files))
        elif self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def faults(self) -> list[str]:
        """What exceeds a bound; nothing without ``--budget``, or with another version of JAX."""
        budget = tomllib.loads(BUDGET.read_text()) if self.config.option.budget else {}
        if budget.get("jax") != jax.__version__:
            return []
        return exceeded(self.files, budget["bounds"], budget["files"])


def add_up(files: Mapping[str, Mapping[str, int]]) -> Counts:
    """The counts of all files."""
    total: Counts = collections.Counter()
    for counts in files.values():
        total.update(counts)
    return total


def table(files: Mapping[str, Mapping[str, int]], lines: int) -> list[str]:
    """The costliest files and the total, a line each."""
    order = sorted(files, key=lambda name: -sum(files[name].values()))
    rows = [(name, files[name]) for name in order[:lines]]
    rest = {name: files[name] for name in order[lines:]}
    rows += [(f"{len(rest)} other files", add_up(rest))] if rest else []
    header = " ".join(f"{kind:>11}" for kind in KINDS)
    return [header] + [
        f"{' '.join(f'{counts.get(kind, 0):11,}' for kind in KINDS)}  {name}"
        for name, counts in [*rows, ("in all", add_up(files))]
    ]


def exceeded(
    files: Mapping[str, Mapping[str, int]], bounds: Mapping[str, int], before: Mapping[str, list[int]]
) -> list[str]:
    """A line for each kind above its bound, with the files that have more of it than before."""
    found, total = [], add_up(files)
    for index, kind in enumerate(KINDS):
        if total[kind] <= bounds[kind]:
            continue
        grown = {
            name: (before.get(name, [0] * len(KINDS))[index], counts.get(kind, 0)) for name, counts in files.items()
        }
        listed = [f"{name} {old} -> {new}" for name, (old, new) in sorted(grown.items()) if new > old] or ["no file"]
        found.append(
            f"{kind}: {total[kind]:,}, but tests/budget.toml allows {bounds[kind]:,}; more than before: "
            f"{', '.join(listed)}. Share shapes and static arguments, or assert without compiling; see CONTRIBUTING.md"
        )
    return found


def written(files: Mapping[str, Mapping[str, int]]) -> str:
    """The text of the budget of a run."""
    total = add_up(files)
    bounds = "".join(f"{kind} = {int(total[kind] * ROOM)}\n" for kind in KINDS)
    rows = (
        f'"{name}" = [{", ".join(str(counts.get(kind, 0)) for kind in KINDS)}]\n'
        for name, counts in sorted(files.items())
        if any(counts.values())
    )
    return f"{_HEAD.format(jax=jax.__version__)}{bounds}{_FILES}{''.join(rows)}"
