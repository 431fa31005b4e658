"""The suite for one operation, as pytest classes to subclass. Needs pytest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops.testing.behaviours import BEHAVIOURS, MEMORY, WITHOUT_PROGRAM, memory_growth
from attnops.testing.cache_features import cache_pair_rows, cache_rows
from attnops.testing.caches import check_cache_row
from attnops.testing.corners import CORNERS
from attnops.testing.features import FEATURES
from attnops.testing.long import LONG
from attnops.testing.pairs import covering_rows, joined, rows_of_each, sampled_pairs
from attnops.testing.reference import CHECKS, ReferenceProblem, ReferenceSubject
from attnops.testing.runner import Outcome, Status, Subject, attempt

if TYPE_CHECKING:
    from collections.abc import Iterable


class OperationConformance:
    """Tests that each feature of the contract, single and in pairs, is right or refused with a reason.

    ::

        class TestFlashOnTPU(OperationConformance):
            operation, platform = "flash", "tpu"
            interpret = True

    Values and gradients are compared with the float64 oracle by the tolerance rule. Problems fit the operation: their
    dtype, lengths, heads and head dims are the first that it does not refuse, see `attnops.testing.fit`. Marked
    ``slow`` are single features, pairs, corners, long problems and most memory figures, and for interpreted kernels
    most behaviours: register the marker, and deselect them with ``-m "not slow"``. The remaining tests have every
    feature, several in a problem.

    Class attributes:
        operation: the operation's name, ``distribution:name``, or its class.
        platform: see `OperationMetadata`; None for this machine's.
        interpret: whether to run kernels in their language's interpreter.
        mode: the runtime mode; gradients are checked in "train" only.
        block: queries and keys a tile, small so that small problems have several. Lengths are 2.5 times it,
            1.5 times in quick tests of interpreted kernels, except in features that change lengths, and for kernels
            whose lengths must be multiples of a larger number.
        dtype: of the plain problem. None: float32, else the first of bfloat16 and float16 that it serves.
        metadata: further fields of the metadata; features that set the same field take precedence.
        refuses: the names of the features and behaviours ("export", "second derivative") that it refuses, and no
            others; pairs as ``"GQA + Causal"`` where each feature by itself is served; ``"caches"`` for every call over
            a cache. A behaviour that is named here may also raise any exception. None: any may be refused.
        slow: the names of tests, such as "test_behaviour", whose every case is marked ``slow``.
        exhaustive: the names of tests, such as "test_all_pairs", that take too long in total with this
            operation: those that are slow are marked ``exhaustive`` too.
        every: for names of tests, a number n: of their slow cases each n-th is marked ``slow`` alone, and the others
            ``exhaustive`` too.
    """

    operation: ClassVar[str | type[OperationImpl]]
    platform: ClassVar[str | None] = None
    interpret: ClassVar[bool] = False
    mode: ClassVar[str] = "train"
    block: ClassVar[int] = 16
    dtype: ClassVar[str | None] = None
    metadata: ClassVar[OperationMetadata] = OperationMetadata()
    refuses: ClassVar[frozenset[str] | None] = None
    slow: ClassVar[frozenset[str]] = frozenset()
    exhaustive: ClassVar[frozenset[str]] = frozenset()
    every: ClassVar[Mapping[str, int]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The cases of each test, marked by what they cost."""
        name = metafunc.function.__name__
        if name in _CASES and _CASES[name][0] in metafunc.fixturenames:
            argument, cases, is_slow = _CASES[name]
            all_slow, every = name in self.slow, 0 if name in self.exhaustive else self.every.get(name, 1)
            metafunc.parametrize(
                argument,
                [
                    pytest.param(case, marks=_marks(i, every) if all_slow or is_slow(case, self.interpret) else [])
                    for i, case in enumerate(cases)
                ],
                ids=lambda case: case if isinstance(case, str) else joined(case),
            )

    @classmethod
    def subject(cls) -> Subject:
        """What is checked.

        Raises:
            NothingToCheckError: see `Subject.require_kernel`.
        """
        names = ("operation", "platform", "interpret", "mode", "block", "dtype", "metadata")
        subject = _subject(**{name: getattr(cls, name) for name in names})
        subject.require_kernel()
        return subject

    def test_each_feature(self, row: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
        """Every feature, several in a problem."""
        self._judge(self.subject().check_row(row), record_property)

    def test_feature(self, feature: str, record_property: Callable[[str, object], None]) -> None:
        """See `Subject.check`."""
        self._judge([self.subject().check([feature])], record_property)

    def test_sampled_pair(self, pair: tuple[str, str], record_property: Callable[[str, object], None]) -> None:
        """Every feature together with another; with one that is served, where that one is refused."""
        self._judge(self.subject().check_pair_or_others(pair), record_property)

    def test_long(self, row: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
        """In several tiles of 128, as kernels that choose their tiles themselves have them."""
        self._judge([self.subject().long.check(row)], record_property)

    def test_all_pairs(self, row: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
        """Every pair, several in a problem."""
        self._judge(self.subject().check_pairs(row), record_property)

    def test_caches(self, cache_row: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
        """Every feature of calls over a cache, several in a problem; see `attnops.testing.cache_features`."""
        self._judge_caches(check_cache_row(self.subject(), cache_row), record_property)

    def test_cache_pairs(self, cache_row: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
        """Every pair of features of calls over a cache, several in a problem."""
        self._judge_caches(check_cache_row(self.subject(), cache_row), record_property)

    def test_behaviour(self, behaviour: str) -> None:
        """See `attnops.testing.behaviours`."""
        outcome = attempt(behaviour, functools.partial(BEHAVIOURS[behaviour], self.subject()))
        named = behaviour in (self.refuses or ())
        assert outcome.status is not Status.WRONG or (named and outcome.raised), outcome.detail
        if self.refuses is not None:
            assert not (named and outcome.status is Status.RIGHT), (
                f"{behaviour} is in `refuses`, but is right: take it out"
            )

    def test_memory_growth(self, case: str) -> None:
        """See `attnops.testing.behaviours.memory_growth`."""
        outcome = attempt(case, functools.partial(memory_growth, self.subject(), case))
        assert outcome.status is not Status.WRONG, outcome.detail

    def _judge_caches(self, outcomes: list[Outcome], record_property: Callable[[str, object], None]) -> None:
        if "caches" not in (self.refuses or ()):
            self._judge(outcomes, record_property)
            return
        served = [outcome for outcome in outcomes if outcome.status is not Status.REFUSED]
        assert not served, f"caches is in `refuses`, but {served[0].name} is {served[0].status}: {served[0].detail}"

    def _judge(self, outcomes: list[Outcome], record_property: Callable[[str, object], None]) -> None:
        wrong = [f"{outcome.name}: {outcome.detail}" for outcome in outcomes if outcome.status is Status.WRONG]
        assert not wrong, "\n".join(wrong)
        for outcome in outcomes:
            if outcome.status is Status.REFUSED:
                record_property(f"refused {outcome.name}", outcome.detail)
            if self.refuses is None:
                continue
            if outcome.status is Status.REFUSED:
                parts = {outcome.name, *outcome.name.split(" + ")}
                assert parts & self.refuses, f"{outcome.name} is refused, but is not in `refuses`: {outcome.detail}"
            else:
                # A pair may be served that has a part which alone is not: float16 where a runtime_dtype casts it.
                assert outcome.name not in self.refuses, f"{outcome.name} is in `refuses`, but is served: take it out"


# By test: its argument, its cases, and whether a case is slow, of what is compiled and of what is interpreted.
_CASES: Final[dict[str, tuple[str, Iterable[object], Callable[[Any, bool], bool]]]] = {
    "test_each_feature": ("row", rows_of_each(), lambda row, interpret: False),
    "test_feature": ("feature", FEATURES, lambda feature, interpret: True),
    "test_sampled_pair": ("pair", sampled_pairs(), lambda pair, interpret: True),
    "test_long": ("row", LONG, lambda row, interpret: True),
    "test_all_pairs": ("row", covering_rows(), lambda row, interpret: True),
    # Of interpreted kernels only the second, which has more features than the first.
    "test_caches": ("cache_row", cache_rows(), lambda row, interpret: interpret and row != cache_rows()[1]),
    "test_cache_pairs": ("cache_row", cache_pair_rows(), lambda row, interpret: True),
    "test_behaviour": (
        "behaviour",
        BEHAVIOURS,
        lambda name, interpret: name in CORNERS or (interpret and name not in WITHOUT_PROGRAM),
    ),
    "test_memory_growth": ("case", MEMORY, lambda case, interpret: case != "Causal"),
}


def _marks(index: int, every: int) -> list[pytest.MarkDecorator]:
    """The marks of a slow case, by its index; with ``every`` = 0 all are exhaustive."""
    return [pytest.mark.slow] if every and index % every == 0 else [pytest.mark.slow, pytest.mark.exhaustive]


# One an operation, so that what a problem needs is found once.
_subject = functools.cache(Subject)


class Conformance:
    """An operation that is not softmax attention, held to a reference of its own; see `attnops.testing.check_against`.

    ::

        class TestRMSNorm(Conformance):
            operation = "rms_norm"
            problems = {"plain": lambda rng: ((rng.normal(size=(2, 8, 16)), rng.normal(size=16)), {})}

            @staticmethod
            def reference(x, weight, eps=1e-6):
                return x * (jnp.mean(x * x, -1, keepdims=True) + eps) ** -0.5 * weight

    Class attributes:
        operation, reference, platform, interpret, metadata, gradients: see
            `attnops.testing.reference.ReferenceSubject`.
        problems: by name, see `attnops.testing.reference.ReferenceProblem`.
        dtypes: those that floating-point arrays are cast to, one after the other.
        refuses: which of ``"problem dtype"`` it refuses, and no others.
    """

    operation: ClassVar[str | type[BaseOperation]]
    reference: ClassVar[Callable[..., object]]
    problems: ClassVar[Mapping[str, ReferenceProblem]]
    platform: ClassVar[str | None] = None
    interpret: ClassVar[bool] = False
    metadata: ClassVar[OperationMetadata] = OperationMetadata()
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    gradients: ClassVar[bool] = True
    refuses: ClassVar[frozenset[str]] = frozenset()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The problems, dtypes and checks of the subclass."""
        if "problem" in metafunc.fixturenames:
            metafunc.parametrize("problem", self.problems)
            metafunc.parametrize("dtype", self.dtypes)
            metafunc.parametrize("check", CHECKS)

    def test_reference(self, problem: str, dtype: str, check: str) -> None:
        """See `attnops.testing.check_against`."""
        names = ("operation", "reference", "platform", "interpret", "metadata", "gradients")
        subject = ReferenceSubject(**{name: getattr(type(self), name) for name in names})
        outcome = subject.check(self.problems[problem], check, dtype)
        assert outcome.status is not Status.WRONG, outcome.detail
        if check != "negative control":  # which is about the reference alone
            refused = f"{problem} {dtype}" in self.refuses
            assert refused == (outcome.status is Status.REFUSED), outcome.detail or "it is served: take it out"
