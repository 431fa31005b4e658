"""What `attnops check` prints: a row for each outcome as soon as it is known, and a summary."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from attnops_cli.output import print_heading, print_json, print_table, print_text
from attnops_testing.commands.shrink import Explained
from attnops_testing.pairs import joined
from attnops_testing.runner import Outcome, Status

_COLUMNS: Final = {"features": "feature", "long": "in long problems", "behaviours": "behaviour",
                   "caches": "calls over a cache", "pairs": "pair"}  # fmt: skip
# Without --verbose, the number of a traceback's last frames that are shown; frames of these libraries are left out.
_FRAMES: Final = 2
_LIBRARIES: Final = re.compile(r'File ".*[/\\](jax|jaxlib|numpy|contextlib\.py)[/\\"]')


class CheckReport:
    """Keeps outcomes, and prints them.

    Args:
        described: a function from the outcomes to the JSON's fields about the operation; None to print for people.
        verbose: whether complete tracebacks are printed.
    """

    def __init__(self, described: Callable[[dict[str, list[Outcome]]], dict[str, Any]] | None, verbose: bool) -> None:
        self.outcomes: dict[str, list[Outcome]] = {"features": []}
        self.explained: list[Explained] = []
        self.stopped = False
        self._described, self._verbose, self._stdout = described, verbose, sys.stdout
        self._section, self._widths = "features", (0, 0)

    @property
    def counts(self) -> Counter[Status]:
        """The number of outcomes by status."""
        return Counter(outcome.status for outcomes in self.outcomes.values() for outcome in outcomes)

    def section(self, section: str, names: Sequence[str]) -> None:
        """Begin a section, whose outcomes have these names."""
        self._section, self.outcomes[section] = section, []
        if self._described is None and names:
            column = _COLUMNS[section]
            self._widths = max(map(len, (column, *names))), len(Status.REFUSED)
            print_heading(section)
            print_table((column, "result", "why"), (), self._widths)
            self._stdout.flush()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep outcomes, and print all but refusals and right pairs, which `close` prints or counts."""
        known = {x.name for x in self.outcomes[self._section]}
        if self._section == "pairs":  # a pair may be in several rows
            outcomes = [x for x in outcomes if x.name not in known or x.status is Status.WRONG]
        self.outcomes[self._section] += outcomes
        silent = {Status.REFUSED} | ({Status.RIGHT} if self._section == "pairs" else set())
        for outcome in outcomes:
            if self._described is None and outcome.status not in silent:
                first = outcome.detail.partition("\n")[0]
                print_table((), [(outcome.name, str(outcome.status), first)], self._widths)
                if outcome.traceback:
                    print_text(_indented(outcome.traceback if self._verbose else _last_frames(outcome.traceback)))
        self._stdout.flush()

    def close(self) -> None:
        """Print the section's refusals, one line per reason."""
        if self._described is not None:
            return
        by_rule: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes[self._section]:
            if outcome.status is Status.REFUSED:
                by_rule.setdefault(outcome.rules, []).append(outcome)
        for rule, outcomes in by_rule.items():
            reason = outcomes[0].detail.partition("\n")[0] if len(outcomes) == 1 else rule
            print_table(
                (), [("; ".join(dict.fromkeys(x.name for x in outcomes)), str(Status.REFUSED), reason)], self._widths
            )
        if self.outcomes.get("pairs"):
            print_text(_counted(Counter(outcome.status for outcome in self.outcomes["pairs"])))
        self._stdout.flush()

    def ended(self, outcome: Outcome) -> None:
        """Print this outcome and the summary: a check did not end in time, so that the process is stopped."""
        with contextlib.redirect_stdout(self._stdout):
            self._verbose = True
            self.add([outcome])
            self.finish()

    def finish(self) -> None:
        """Print the summary: explanations, counts, and the names of what is wrong."""
        if self._described is not None:
            stopped = {"stopped": True} if self.stopped else {}
            print_json(
                self._described(self.outcomes)
                | {"explained": [dataclasses.asdict(x) for x in self.explained]}
                | stopped
            )
            return
        for why in self.explained:
            named = f"with {joined(why.features)} alone" if why.features else "without any feature"
            if why.features == tuple(why.name.split(" + ")):
                named = "as stated"
            print_heading(f"{why.name} is wrong {named}")
            limit = "" if why.complete else "; a larger --shrink gives more seconds to find a smaller one"
            detail = _indented("\n".join(why.detail.splitlines()[:8]))
            print_text(f"{why.problem}\n{detail}\nthe smallest problem that was found{limit}")
        if self.stopped:
            self.close()
        print_text(f"\n{_counted(self.counts)}{'; stopped before the end' if self.stopped else ''}")
        wrong = dict.fromkeys(
            x.name for outcomes in self.outcomes.values() for x in outcomes if x.status is Status.WRONG
        )
        if wrong:
            print_text(f'wrong: {", ".join(wrong)}\ncheck one again with --feature "{next(iter(wrong))}"')


def _last_frames(text: str) -> str:
    """The last frames of a traceback, each with its line of source."""
    frames = re.findall(r'^  File ".*\n(?:    .*\n)*', text, re.MULTILINE)
    frames = [frame for frame in frames if not _LIBRARIES.search(frame)] or frames
    return "".join(frames[-_FRAMES:]) + "(--verbose prints the whole traceback)"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _counted(counts: Counter[Status]) -> str:
    return ", ".join(f"{counts[status]} {status}" for status in Status)
