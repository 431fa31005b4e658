"""The conformance suite as one table, which both `attnops check` and `OperationConformance` run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import jax

from attnops_testing.behaviours import BEHAVIOURS, MEMORY, memory_growth
from attnops_testing.cache_features import CACHE_FEATURES, cache_pair_rows, cache_rows
from attnops_testing.caches import cache_name, check_cache_row
from attnops_testing.corners import CORNERS
from attnops_testing.features import FEATURES
from attnops_testing.long import LONG
from attnops_testing.pairs import covering_rows, joined, rows_of_each, sampled_pairs
from attnops_testing.runner import Outcome, Subject, attempt, judged


@dataclasses.dataclass(frozen=True)
class SuitePart:
    """One group of checks of the suite.

    Attributes:
        listed: a function that returns its cases: names, or tuples of names of features to be combined.
        run: checks a case.
        name: the name of a case.
        quick: a function of a case and of whether kernels are interpreted; whether the case runs by default.
        group: a name in ``refuses`` that stands for all of its cases.
    """

    listed: Callable[[], Collection[Any]]
    run: Callable[[Subject, Any], list[Outcome]]
    name: Callable[[Any], str] = lambda case: case if isinstance(case, str) else joined(case)
    quick: Callable[[Any, bool], bool] = lambda case, interpret: False
    group: str = ""

    @functools.cached_property
    def cases(self) -> Collection[Any]:
        """The cases, computed at first use."""
        return self.listed()

    def check(self, subject: Subject, case: Any, refuses: Collection[str] = ()) -> list[Outcome]:
        """The outcomes of a case; ``refuses`` has the names of features and behaviours that are declared as refused."""
        outcomes = self.run(subject, case)
        every = self.group in refuses
        names = {outcome.name for outcome in outcomes} if every else refuses
        return [judged(outcome, names, behaviour=self.cases is BEHAVIOURS) for outcome in outcomes]


def make_cpu_devices() -> None:
    """Have JAX show the CPU as four devices, for meshes, unless the user set a number or JAX has started."""
    unset = jax.config.jax_num_cpu_devices < 0  # type: ignore[attr-defined]
    if unset and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", 4)


def _feature(subject: Subject, case: str | Sequence[str]) -> list[Outcome]:
    return [subject.check([case] if isinstance(case, str) else case)]


def _behaviour(subject: Subject, case: str) -> list[Outcome]:
    return [attempt(case, functools.partial(BEHAVIOURS[case], subject))]


def _memory(subject: Subject, case: str) -> list[Outcome]:
    return [attempt(f"memory, {case}", functools.partial(memory_growth, subject, case))]


# By name; `OperationConformance` has a test for each.
SUITE: Final = {
    # Every feature, several per problem. Below: each by itself, and each together with another that is served.
    "each_feature": SuitePart(rows_of_each, Subject.check_row, quick=lambda row, interpret: True),
    "feature": SuitePart(lambda: FEATURES, _feature),
    "sampled_pair": SuitePart(sampled_pairs, Subject.check_pair_or_others),
    # With several tiles of 128, for kernels that choose their own tiles.
    "long": SuitePart(
        lambda: LONG, lambda subject, row: _feature(subject.long, row), lambda row: f"long: {joined(row)}"
    ),
    "all_pairs": SuitePart(covering_rows, Subject.check_pairs),
    "behaviour": SuitePart(lambda: BEHAVIOURS, _behaviour, quick=lambda name, interpret: name not in CORNERS),
    "memory_growth": SuitePart(lambda: MEMORY, _memory, "memory, {}".format, lambda case, interpret: case == "Causal"),
    # Every feature of calls over a cache, several per problem. For interpreted kernels only the second row by default,
    # which has more features than the first.
    "caches": SuitePart(
        cache_rows, check_cache_row, cache_name,
        lambda row, interpret: not interpret or row == cache_rows()[1], "caches",
    ),
    "cache_pairs": SuitePart(cache_pair_rows, check_cache_row, cache_name, group="caches"),
}  # fmt: skip


def behaviours_by_name() -> dict[str, tuple[str, str]]:
    """By name, the part of the suite and the case."""
    parts = ("behaviour", "memory_growth")
    return {SUITE[part].name(case): (part, case) for part in parts for case in SUITE[part].cases}


def require_known(what: str, names: Iterable[str]) -> None:
    """Raise a `ValueError` that lists all known names if one is unknown; names may be joined by " + "."""
    known = {**FEATURES, **CACHE_FEATURES, **behaviours_by_name(), "caches": None}
    for name in (name.strip() for text in names for name in text.split(" + ")):
        if name not in known:
            near = difflib.get_close_matches(name, known)
            meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(f"{what} {name!r} is unknown; {meant}there are {', '.join(known)}")
