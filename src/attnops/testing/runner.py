"""Runs an operation through the features, alone and combined: each is right, refused or wrong."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import forward_for
from attnops.dispatch.platforms import find_platform
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import Reason
from attnops.errors import UnsupportedError
from attnops.sharding.modes import MODE_TRAIN
from attnops.testing.features import FEATURES, Feature, Spec, combine
from attnops.testing.problem import FAST_COMPILE, Problem

# How many features at most are combined in one problem, so that each keeps enough to act on.
ROW: Final = 5

_CHANGING: Final = [feature for feature in FEATURES.values() if combine([feature.name]) != Spec()]


class Status(enum.StrEnum):
    """What became of a check."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        name: the feature, or what else was checked; features combined are joined by " + ".
        status: see `Status`.
        detail: the reasons of a refusal, what is wrong, or why it was not run.
    """

    name: str
    status: Status
    detail: str = ""


class NotRunError(Exception):
    """A check that can't be made here, or that a declaration of the operation makes pointless."""


def attempt(name: str, check: Callable[[], None]) -> Outcome:
    """Run a check: one that raises `UnsupportedError` is refused, one that raises anything else is wrong."""
    try:
        check()
    except UnsupportedError as error:
        if not error.reasons:
            return Outcome(name, Status.WRONG, f"refused without a reason: {error}")
        return Outcome(name, Status.REFUSED, _listed(error.reasons))
    except NotRunError as error:
        return Outcome(name, Status.NOT_RUN, str(error))
    except AssertionError as error:
        return Outcome(name, Status.WRONG, str(error) or "an assertion failed")
    except Exception as error:
        return Outcome(name, Status.WRONG, f"{type(error).__name__}: {error}")
    return Outcome(name, Status.RIGHT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The operation that is checked, and how.

    Attributes:
        operation: its name, ``distribution:name``, or its class.
        platform: see `OperationMetadata`; None for this machine's.
        interpret: see `OperationMetadata`.
        mode: the runtime mode; gradients are checked in train mode alone.
        block: queries and keys a tile, small so that small problems have several.
        metadata: further fields, on top of which the above are set.
    """

    operation: str | type[OperationImpl]
    platform: str | None = None
    interpret: bool = False
    mode: str = "train"
    block: int = 16
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)

    @functools.cached_property
    def cls(self) -> type[OperationImpl]:
        """The class that is checked.

        Raises:
            ValueError, PluginError: see `OperationRegistry.get`; or it is no operation of query, key and value.
        """
        cls = OperationRegistry.get(self.operation, self.at) if isinstance(self.operation, str) else self.operation
        if not issubclass(cls, OperationImpl):
            raise ValueError(f"operation={self.operation!r} is not attention of query, key and value")
        return cls

    @functools.cached_property
    def base(self) -> OperationMetadata:
        """The metadata of every problem."""
        return self.metadata.replace(
            platform=self.platform, interpret=self.interpret, mode=self.mode, on_unsupported="error"
        )

    @property
    def at(self) -> str:
        """The platform that it is checked for."""
        return find_platform(self.base.platform, self.base.mesh, ())

    @property
    def forward(self) -> str:
        """The forward that is checked, such as ``"tpu"`` or ``"native"``."""
        return forward_for(self.cls, self.at)

    @property
    def limits(self) -> Limits:
        """What that forward declares."""
        return self.make(self.base)._limits(self.forward)

    @property
    def gradients(self) -> bool:
        """Whether gradients are checked."""
        return self.base.mode == MODE_TRAIN

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """See `attnops.testing.problem.FAST_COMPILE`; for CPUs alone."""
        return FAST_COMPILE if jax.default_backend() == "cpu" else None

    def make(self, metadata: OperationMetadata) -> OperationImpl:
        """The operation, with this metadata."""
        return self.cls(metadata)

    def problem(self, names: Iterable[str], seed: int = 0, metadata: OperationMetadata | None = None) -> Problem:
        """The problem that has these features."""
        return combine(names, self.block).problem(metadata or self.base, seed)

    def reasons(self, names: Iterable[str]) -> list[Reason]:
        """Why it refuses these features together; compiles nothing."""
        problem = self.problem(names)
        return problem.reasons(self.make(problem.metadata))

    def check(self, names: Sequence[str]) -> Outcome:
        """Values and gradients of a problem that has these features."""

        def check() -> None:
            problem = self.problem(names)
            problem.check(self.make(problem.metadata), self.gradients, self.compiler_options)

        return attempt(joined(names), check)

    def check_pairs(self, row: Sequence[str]) -> list[Outcome]:
        """Every pair that the row proves, from as few programs as can be.

        What is refused is found without compiling. The rest runs as one problem; where that is wrong, or refused
        although no pair of it is, each pair runs alone.
        """
        pairs = proven_pairs(row)
        found = {pair: self._refusal(pair) for pair in pairs}
        served = [name for name in row if any(name in pair for pair in pairs if found[pair] is None)]
        whole = None
        if len(served) > 2:
            whole = self.check(served)
        for pair in pairs:
            if found[pair] is None:
                right = whole is not None and whole.status is Status.RIGHT
                found[pair] = Outcome(joined(pair), Status.RIGHT) if right else self.check(pair)
        outcomes = [outcome for outcome in found.values() if outcome is not None]
        wrong = any(outcome.status is Status.WRONG for outcome in outcomes)
        if whole is not None and whole.status is Status.WRONG and not wrong:
            outcomes.append(whole)  # only all of them together are
        return outcomes

    def check_pair_or_alone(self, pair: tuple[str, str]) -> list[Outcome]:
        """A pair; where it is refused, each of the two that is served alone, too."""
        outcomes = self.check_pairs(pair)
        if all(outcome.status is Status.REFUSED for outcome in outcomes):
            outcomes += [self.check([name]) for name in pair]
        return outcomes

    def _refusal(self, names: Sequence[str]) -> Outcome | None:
        found: list[Reason] = []

        def check() -> None:
            found.extend(self.reasons(names))

        outcome = attempt(joined(names), check)
        if outcome.status is Status.RIGHT:
            return Outcome(joined(names), Status.REFUSED, _listed(found)) if found else None
        return outcome


def joined(names: Sequence[str]) -> str:
    """The name of features combined."""
    return " + ".join(names) or "plain"


def proven_pairs(row: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs that a problem with all features of the row proves."""
    trivial = {name for name in row if FEATURES[name].trivial}
    return [pair for pair in itertools.combinations(row, 2) if not trivial or trivial & set(pair)]


def all_pairs() -> Iterator[tuple[str, str]]:
    """Every pair of features of different groups; what the plain problem has anyway makes no pair."""
    for a, b in itertools.combinations(_CHANGING, 2):
        if a.group != b.group:
            yield a.name, b.name


def sampled_pairs() -> list[tuple[str, str]]:
    """Pairs in which every feature occurs: each with one from as far off in the table as can be."""
    names = [feature.name for feature in _CHANGING]
    half = len(names) // 2
    found: list[tuple[str, str]] = []
    for i, name in enumerate(names[:half]):
        partners = (names[half + (i + shift) % (len(names) - half)] for shift in range(len(names)))
        used = {partner for _, partner in found}
        free = [p for p in partners if FEATURES[p].group != FEATURES[name].group]
        found.append((name, next((p for p in free if p not in used), free[0])))
    paired = {name for pair in found for name in pair}
    first = FEATURES["GQA"]
    return found + [(first.name, name) for name in names if name not in paired]


@functools.cache
def covering_rows() -> tuple[tuple[str, ...], ...]:
    """Combinations of at most `ROW` features in which every pair is proven, each by the first that has it.

    Greedy all-pairs testing (Cohen et al. 1997, "The AETG system"), seeded by nothing: always the same rows.
    """
    missing = dict.fromkeys(all_pairs())
    order = {name: i for i, name in enumerate(FEATURES)}
    rows = []
    while missing:
        row = list(next(iter(missing)))
        while len(row) < ROW:
            groups = {FEATURES[name].group for name in row}
            candidates = [f for f in _CHANGING if f.group not in groups]
            gains = {f.name: _gain(row, f, missing, order) for f in candidates}
            best = max(gains, key=lambda name: gains[name], default=None)
            if best is None or not gains[best]:
                break
            row.append(best)
        row.sort(key=order.__getitem__)
        for pair in proven_pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(row))
    return tuple(rows)


def _gain(row: Sequence[str], feature: Feature, missing: dict[tuple[str, str], None], order: dict[str, int]) -> int:
    """How many missing pairs the row proves with the feature and not without."""
    if feature.trivial:
        return 0  # it would take away what the others prove
    trivial = [name for name in row if FEATURES[name].trivial]
    partners = trivial or row
    return sum(tuple(sorted((name, feature.name), key=order.__getitem__)) in missing for name in partners)


def _listed(reasons: Iterable[Reason]) -> str:
    return "; ".join(dict.fromkeys(str(reason) for reason in reasons))
