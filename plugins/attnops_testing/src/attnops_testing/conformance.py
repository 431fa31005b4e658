"""The suite for one operation, as pytest classes to subclass. Needs pytest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops_testing.limit import default_limit, limited
from attnops_testing.pairs import joined
from attnops_testing.reference import CHECKS, ReferenceProblem, ReferenceSubject
from attnops_testing.runner import Outcome, Status, Subject
from attnops_testing.suite import SUITE, make_cpu_devices, require_known


class OperationConformance:
    """Tests that each feature of the contract, single and in pairs, is right or refused with a reason.

    ::

        class TestFlashOnTPU(OperationConformance):
            operation, platform = "flash", "tpu"
            interpret = True

    Values and gradients are compared with the float64 oracle by the tolerance rule. Problems fit the operation: their
    dtype, lengths, heads and head dims are the first that it does not refuse (`attnops_testing.fit`). Tests of single
    features, pairs, corners, long problems and most memory figures are marked ``slow``: register the marker, and
    deselect them with ``-m "not slow"``. The remaining tests check every feature, several per problem, and every
    behaviour, such as "vmap", "shard_map" and "export"; `attnops check` runs the same.

    Class attributes:
        operation: the operation's name, ``distribution:name``, or its class.
        platform: the platform whose forward is checked, such as "cuda"; None for this machine's.
        interpret: whether to run kernels in their language's interpreter.
        mode: the runtime mode; gradients are checked only in "train".
        block: queries and keys per tile; small, so that small problems have several tiles. Lengths are 2.5 times it, or
            1.5 times in quick tests of interpreted kernels, except in features that change lengths, and for kernels
            whose lengths must be multiples of a larger number.
        dtype: the dtype of the plain problem. None: the first of float32, bfloat16 and float16 that the operation
            serves.
        metadata: other fields of the metadata; features that set the same field take precedence.
        refuses: the names of features and behaviours (such as "export" or "second derivative") that the operation
            refuses with a reason. A behaviour named here may also raise any exception. ``"caches"`` stands for every
            call over a cache. Names in this set must not be right; others may be refused too, unless ``strict``.
        strict: whether a feature that is refused must be in ``refuses``; so must a pair whose features are served
            singly, as ``"GQA + Causal"``.
        limit: seconds per case; by default 100, or 300 in an interpreter. A case that needs more is reported with its
            stack, and ends the run.
        slow: the names of tests, such as "test_behaviour", and of cases, such as "vmap", that are marked ``slow`` too.
        exhaustive: the names of tests, such as "test_all_pairs", that need too much time in total for this operation:
            their slow cases are marked ``exhaustive`` too.
        every: by name of a test, a number n: each n-th of its slow cases is marked only ``slow``, the others
            ``exhaustive`` too.
    """

    operation: ClassVar[str | type[OperationImpl]]
    platform: ClassVar[str | None] = None
    interpret: ClassVar[bool] = False
    mode: ClassVar[str] = "train"
    block: ClassVar[int] = 16
    dtype: ClassVar[str | None] = None
    metadata: ClassVar[OperationMetadata] = OperationMetadata()
    refuses: ClassVar[frozenset[str]] = frozenset()
    strict: ClassVar[bool] = False
    limit: ClassVar[float | None] = None
    slow: ClassVar[frozenset[str]] = frozenset()
    exhaustive: ClassVar[frozenset[str]] = frozenset()
    every: ClassVar[Mapping[str, int]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse declarations that would have no effect.

        Raises:
            ValueError: a name is unknown.
        """
        super().__init_subclass__(**kwargs)
        tests = [name for name in dir(cls) if name.startswith("test_")]
        if isinstance(cls.refuses, str):
            raise ValueError(f"{cls.__name__}.refuses={cls.refuses!r} must be a set of names")
        require_known(f"{cls.__name__}.refuses", cls.refuses)
        for field in ("exhaustive", "every"):
            if unknown := sorted(set(getattr(cls, field)) - set(tests)):
                raise ValueError(f"{cls.__name__}.{field} names {unknown}, but there are {tests}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each test with its cases, marked by their cost."""
        name = metafunc.function.__name__
        part = SUITE.get(name.removeprefix("test_"))
        if part is None or "case" not in metafunc.fixturenames:
            return
        make_cpu_devices()
        every = 0 if name in self.exhaustive else self.every.get(name, 1)

        def marks(index: int, case: Any) -> list[pytest.MarkDecorator]:
            if part.quick(case, self.interpret) and not {name, part.name(case)} & self.slow:
                return []
            return [pytest.mark.slow, *([] if every and index % every == 0 else [pytest.mark.exhaustive])]

        cases = [pytest.param(case, marks=marks(i, case)) for i, case in enumerate(part.cases)]
        metafunc.parametrize("case", cases, ids=lambda case: case if isinstance(case, str) else joined(case))

    @pytest.fixture(autouse=True)
    def _in_time(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Run each case within `limit`, and add its refusals to pytest's report as properties."""
        self._properties = request.node.user_properties
        seconds = default_limit(self.interpret) if self.limit is None else self.limit
        with limited(request.node.name, seconds, functools.partial(_failed, request.node)):
            yield

    @classmethod
    def subject(cls) -> Subject:
        """The operation that is checked.

        Raises:
            NothingToCheckError: the core's native forward would be checked instead of a kernel.
        """
        names = ("operation", "platform", "interpret", "mode", "block", "dtype", "metadata")
        subject = _subject(**{name: getattr(cls, name) for name in names})
        subject.require_kernel()
        return subject

    def _check(self, part: str, case: Any) -> None:
        outcomes = SUITE[part].check(self.subject(), case, self.refuses)
        wrong = [
            f"{outcome.name}: {outcome.detail}\n{outcome.traceback}".strip()
            for outcome in outcomes
            if outcome.status is Status.WRONG
        ]
        assert not wrong, "\n".join(wrong)
        properties: list[tuple[str, str]] = getattr(self, "_properties", [])
        strict = self.strict and part not in ("behaviour", "memory_growth")
        for outcome in outcomes:
            if outcome.status is Status.REFUSED:
                properties.append((f"refused {outcome.name}", outcome.detail))
                named = {outcome.name, *outcome.name.split(" + "), SUITE[part].group} & {*self.refuses}
                assert named or not strict, f"{outcome.name} is refused, but is not in `refuses`: {outcome.detail}"


def _test(part: str) -> Callable[[OperationConformance, Any], None]:
    """The test method of a part of the suite."""

    def test(self: OperationConformance, case: Any) -> None:
        self._check(part, case)

    test.__name__, test.__doc__ = f"test_{part}", f'A case of "{part}" in `attnops_testing.suite`.'
    return test


for _part in SUITE:
    setattr(OperationConformance, f"test_{_part}", _test(_part))


def _failed(item: pytest.Item, outcome: Outcome) -> None:
    """Report a case that did not end, and end the run as pytest does."""
    if capture := item.config.pluginmanager.getplugin("capturemanager"):
        capture.suspend_global_capture(in_=True)
    text = f"{outcome.detail}; a larger `limit` allows more\n{outcome.traceback}"
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
    item.ihook.pytest_runtest_logreport(report=report)
    item.config.hook.pytest_sessionfinish(session=item.session, exitstatus=1)


# One subject per operation, so that its fit is determined once.
_subject = functools.cache(Subject)


class Conformance:
    """Checks an operation that is not softmax attention against a reference, as `attnops_testing.check_against` does.

    ::

        class TestRMSNorm(Conformance):
            operation = "rms_norm"
            problems = {"plain": lambda rng: ((rng.normal(size=(2, 8, 16)), rng.normal(size=16)), {})}

            @staticmethod
            def reference(x, weight, eps=1e-6):
                return x * (jnp.mean(x * x, -1, keepdims=True) + eps) ** -0.5 * weight

    Class attributes:
        operation, reference, platform, interpret, metadata, gradients: as the arguments of
            `attnops_testing.check_against`.
        problems: by name, functions of a `numpy.random.Generator` that draw the arguments and options of a call.
        dtypes: floating-point arrays are cast to each of these in turn.
        refuses: the ``"problem dtype"`` names that the operation refuses; it must refuse these and no others.
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
        """Parametrise the test with the problems, dtypes and checks of the subclass."""
        if "problem" in metafunc.fixturenames:
            metafunc.parametrize("problem", self.problems)
            metafunc.parametrize("dtype", self.dtypes)
            metafunc.parametrize("check", CHECKS)

    def test_reference(self, problem: str, dtype: str, check: str) -> None:
        """One check of a problem in a dtype, as `attnops_testing.check_against` describes it."""
        names = ("operation", "reference", "platform", "interpret", "metadata", "gradients")
        subject = ReferenceSubject(**{name: getattr(type(self), name) for name in names})
        outcome = subject.check(self.problems[problem], check, dtype)
        assert outcome.status is not Status.WRONG, outcome.detail
        if check != "negative control":  # which checks only the reference
            refused = f"{problem} {dtype}" in self.refuses
            why = outcome.detail or f"{problem} {dtype} is in `refuses`, but is served: take it out"
            assert refused == (outcome.status is Status.REFUSED), why
