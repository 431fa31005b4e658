"""The smallest problem in which an operation is still wrong, for `attnops check`."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp

from attnops.errors import pass_interrupt
from attnops.masks import Mask
from attnops_testing.features import FEATURES, Spec, combine
from attnops_testing.fit import Fit
from attnops_testing.problem import Problem
from attnops_testing.runner import Outcome, Status, Subject, attempt

# The sizes that are tried, the smallest first; lengths also as multiples of what a kernel needs.
SIZES: Final = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Explained:
    """Why a check is wrong.

    Attributes:
        name: the name of the check.
        features: the features without which it is not wrong; empty if the plain problem is wrong.
        problem: a description of the smallest problem that was found, such as ``"B1 T2 S2 H1 K1 D1 float32"``.
        detail: what is wrong in it: the result, both values, and the limit; or the exception.
        complete: whether everything smaller was tried before the time was over.
    """

    name: str
    features: tuple[str, ...]
    problem: str
    detail: str
    complete: bool


def explain(
    subject: Subject, outcome: Outcome, names: Sequence[str], seconds: float, clock: Clock = time.monotonic
) -> Explained | None:
    """Look for the smallest problem in which the same result is still wrong, or the same exception is raised.

    Args:
        subject: the operation.
        outcome: the outcome of the check that is wrong.
        names: the features of its problem.
        seconds: the time after which no further problem is tried.
        clock: tells the time in seconds.

    Returns:
        The explanation; None if the problem, run by itself, is not wrong in that way.
    """
    search = _Search(subject, _kind(outcome), clock, clock() + seconds)
    spec = _sized(combine(names, fit=subject.fit))
    detail = search.wrong(spec)
    if detail is None:
        return None
    best = _Best(tuple(names), spec, detail)
    while True:
        smaller = search.first(_smaller(best, subject.fit))
        if smaller is None:
            return Explained(
                outcome.name, best.names, _described(search.problem(best.spec)), best.detail, not search.is_late
            )
        best = smaller


@dataclasses.dataclass(frozen=True)
class _Best:
    """The smallest problem so far: its features, its description, and what is wrong."""

    names: tuple[str, ...]
    spec: Spec
    detail: str


class _Search:
    """Tries problems until the time is over."""

    def __init__(self, subject: Subject, kind: str, clock: Clock, end: float) -> None:
        self._subject, self._kind, self._clock, self._end = subject, kind, clock, end
        self._tried: set[str] = set()
        self.is_late = False

    def problem(self, spec: Spec) -> Problem:
        return spec.problem(self._subject.base)

    def first(self, candidates: Iterator[tuple[tuple[str, ...], Spec]]) -> _Best | None:
        """The first candidate that is wrong in the same way; None if none is, or the time is over."""
        for names, spec in candidates:
            if (text := repr(spec)) in self._tried:
                continue
            if self._clock() >= self._end:
                self.is_late = True
                return None
            self._tried.add(text)
            detail = self.wrong(spec)
            if detail is not None:
                return _Best(names, spec, detail)
        return None

    def wrong(self, spec: Spec) -> str | None:
        """What is wrong with a problem, if it is wrong in the same way; a problem that can't be made is not."""
        subject = self._subject
        try:
            problem = self.problem(spec)
            operation = subject.make(problem.metadata)
            if problem.reasons(operation):
                return None
        except BaseException as error:
            pass_interrupt(error)
            return None
        gradients = subject.gradients and not self._kind.startswith(("attention_", "logsumexp", "max_"))
        outcome = attempt("", lambda: problem.check(operation, gradients, subject.compiler_options))
        same = outcome.status is Status.WRONG and _kind(outcome) == self._kind
        return outcome.detail if same else None


def _kind(outcome: Outcome) -> str:
    """In what way a check is wrong: the exception, or the result, such as "gradient of key"."""
    return outcome.raised or re.split(r"\[| is | has ", outcome.detail, maxsplit=1)[0]


def _sized(spec: Spec) -> Spec:
    """The same problem with its lengths in tokens."""
    fit = Fit(block=spec.block, multiple=spec.multiple)
    return dataclasses.replace(spec, T=(0, fit.tokens(*spec.T)), S=(0, fit.tokens(*(spec.S or spec.T))))


def _smaller(best: _Best, fit: Fit) -> Iterator[tuple[tuple[str, ...], Spec]]:
    """Problems that are smaller in one respect, a feature or a size; the smallest first."""
    spec = best.spec
    yield from _without_a_feature(best, fit)
    groups = {FEATURES[name].group for name in best.names}
    yield from ((best.names, smaller) for smaller in _much_smaller(spec, "lengths" in groups))
    for B in range(1, spec.B):
        yield best.names, dataclasses.replace(spec, B=B)
    heads = {(H, K) for H in SIZES for K in SIZES if H % K == 0 and K <= spec.K and H <= spec.H}
    if "heads" not in groups:
        heads = {(H, K) for H, K in heads if H == K}
    for H, K in sorted(heads - {(spec.H, spec.K)}):
        yield best.names, dataclasses.replace(spec, H=H, K=K)
    if spec.Dv is not None:
        yield best.names, dataclasses.replace(spec, Dv=None)
    for D in SIZES:
        if spec.D > D:
            yield best.names, dataclasses.replace(spec, D=D, Dv=spec.Dv and min(spec.Dv, 2 * D))
    yield from ((best.names, smaller) for smaller in _shorter(spec, "lengths" in groups))


def _without_a_feature(best: _Best, fit: Fit) -> Iterator[tuple[tuple[str, ...], Spec]]:
    """The problem without one of its features, in the sizes that are left."""
    spec = best.spec
    sizes = {name: getattr(spec, name) for name in ("T", "S", "B", "H", "K", "D", "Dv")}
    plain_sizes: dict[str, dict[str, Any]] = {
        "heads": {"K": spec.H},
        "lengths": dict.fromkeys("TS", max(spec.T, spec.S or spec.T)),
        "head_dim": {"D": fit.D, "Dv": None},
    }
    for name in best.names:
        names = tuple(other for other in best.names if other != name)
        changes = sizes | plain_sizes.get(FEATURES[name].group, {})
        yield names, dataclasses.replace(combine(names, fit=fit), **changes)


def _much_smaller(spec: Spec, differ: bool) -> Iterator[Spec]:
    """The problem with all sizes but the heads reduced at once, which saves trying them one by one."""
    assert spec.S is not None
    for n in (2, 4, 16) if spec.multiple == 1 else (spec.multiple, 2 * spec.multiple):
        T, S = ((0, 2 * n if differ and x > other else n) for x, other in ((spec.T, spec.S), (spec.S, spec.T)))
        for D in sorted({D for D in (1, 16, spec.D) if D <= spec.D}):
            if T <= spec.T and S <= spec.S:
                yield dataclasses.replace(spec, B=1, D=D, Dv=spec.Dv and 2 * D, T=T, S=S)


def _shorter(spec: Spec, differ: bool) -> Iterator[Spec]:
    """The problem with fewer tokens; T and S differ only if a feature makes them."""
    assert spec.S is not None
    T, S = int(spec.T[1]), int(spec.S[1])
    lengths = sorted({size * multiple for size in SIZES for multiple in (1, spec.multiple)})
    if not differ:
        yield from (dataclasses.replace(spec, T=(0, n), S=(0, n)) for n in lengths if n < T)
        return
    yield from (dataclasses.replace(spec, T=(0, n)) for n in lengths if n < T and (n > S) == (T > S))
    yield from (dataclasses.replace(spec, S=(0, n)) for n in lengths if n < S and (n > T) == (S > T))


def _described(problem: Problem) -> str:
    """Shapes, dtypes and options of a problem."""
    B, H, T, S = problem.shape
    K, D = problem.key.shape[2:]
    Dv = problem.value.shape[3]
    options = {name: x for name, x in problem.options.items() if x is not None and x is not False}
    options |= {"dropout_prob": problem.metadata.dropout_prob} if problem.metadata.dropout_prob else {}
    named = [f"{name}={_value(value)}" for name, value in options.items() if name != "dropout_key"]
    dtypes = dict.fromkeys(jnp.dtype(x.dtype).name for x in (problem.query, problem.key, problem.value))
    if problem.metadata.layout != "BTHD":
        named.append(f"layout={problem.metadata.layout}")
    return ", ".join([f"B{B} T{T} S{S} H{H} K{K} D{D} Dv{Dv} {'/'.join(dtypes)}", *named])


def _value(value: Any) -> str:
    if isinstance(value, Mask) or not hasattr(value, "shape"):
        return repr(value)  # str of a mask is a picture
    return f"{jnp.dtype(value.dtype).name}{list(value.shape)}"
