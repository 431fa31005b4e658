"""Runs an operation on features, single and combined; the outcome of each is right, refused or wrong."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import jax
import jax.numpy as jnp

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.limits import Limits
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.platforms import find_platform
from attnops.dispatch.plugins import CORE
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest
from attnops.errors import Reason, UnsupportedError, pass_interrupt, printable
from attnops.sharding import MODE_TRAIN
from attnops_testing.features import combine
from attnops_testing.fit import DTYPES, HEAD_DIMS, Fit, find_fit
from attnops_testing.pairs import all_pairs, changing, joined, proven_pairs
from attnops_testing.problem import FAST_COMPILE, Problem


class Status(enum.StrEnum):
    """The outcome of a check."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        name: the feature or behaviour that was checked; combined features are joined by " + ".
        status: right, refused, wrong or not run.
        detail: the reasons of a refusal, what is wrong, or why it was not run.
        raised: the name of the exception, if the outcome is wrong because of an exception; empty if because of a value.
        traceback: the traceback of that exception, as text.
        rules: the reasons of a refusal without their values, so that refusals for the same rule are equal.
    """

    name: str
    status: Status
    detail: str = ""
    raised: str = ""
    traceback: str = ""
    rules: str = ""


class NotRunError(Exception):
    """A check that can't be made here, or that a declaration of the operation makes pointless."""


def attempt(name: str, check: Callable[[], None]) -> Outcome:
    """Run a check. It is refused if it raises `UnsupportedError`, and wrong if it raises anything else."""
    try:
        check()
    except UnsupportedError as error:
        if not error.reasons:
            return Outcome(name, Status.WRONG, f"refused without a reason: {error}")
        return refused(name, error.reasons)
    except NotRunError as error:
        return Outcome(name, Status.NOT_RUN, str(error))
    except BaseException as error:
        pass_interrupt(error)
        if isinstance(error, AssertionError) and _is_of_the_suite(error):
            return Outcome(name, Status.WRONG, str(error) or "an assertion failed")
        kind, text = type(error).__name__, "".join(traceback.format_exception(error))
        return Outcome(name, Status.WRONG, f"{kind}: {printable(error)}", kind, text)
    return Outcome(name, Status.RIGHT)


def refused(name: str, reasons: Iterable[Reason]) -> Outcome:
    """The outcome of a refusal for these reasons."""
    reasons = list(reasons)
    rules = (f"{x.argument}: {x.limit}{f'; {x.hint}' if x.hint else ''}" for x in reasons)
    return Outcome(name, Status.REFUSED, _listed(map(str, reasons)), rules=_listed(rules))


def judged(outcome: Outcome, refuses: Collection[str], behaviour: bool = False) -> Outcome:
    """The outcome, given the names of features and behaviours that are declared as refused.

    One that is declared must not be right. A declared behaviour may also raise, since JAX itself refuses some of them.
    Outcomes with other names are returned unchanged.
    """
    if outcome.name not in refuses or outcome.status is Status.REFUSED:
        return outcome
    if outcome.status is Status.RIGHT:
        return Outcome(outcome.name, Status.WRONG, "is in `refuses`, but is right: take it out")
    if not (behaviour and outcome.raised):
        return outcome
    return Outcome(outcome.name, Status.REFUSED, f"as declared: {outcome.detail}", rules="as declared")


def _is_of_the_suite(error: AssertionError) -> bool:
    """Whether the error comes from a comparison of the suite rather than from an assertion in the code that it runs."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [module for module in modules if module.partition(".")[0] not in ("numpy", "contextlib")]
    return callers[-1].startswith("attnops_testing.")


_OTHER_REFERENCES: Final = "attnops_testing.check_against compares an operation with another reference"


class NothingToCheckError(ValueError):
    """The check would run the core's native forward instead of the kernel that was meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The operation that is checked, and how.

    Attributes:
        operation: its name, ``distribution:name``, or its class.
        platform: the platform whose forward is checked, such as "cuda"; None for this machine's.
        interpret: whether kernels run in their language's interpreter.
        mode: the runtime mode; gradients are checked in train mode only.
        block: queries and keys per tile; small, so that small problems have several tiles, or larger for a kernel whose
            lengths must be multiples of a larger number.
        dtype: the dtype of the plain problem. None: the first of float32, bfloat16 and float16 that the operation
            serves.
        head_dim: the head dim of query, key and value in the plain problem. None: the smallest of 16, 32, 64, 128 and
            256 that the operation serves. If it is stated, lengths are 2.5 times 128 tokens or more and the operation
            chooses its tiles, as in real calls: it may have kernels of its own for them.
        metadata: other fields of the metadata, such as the rules of axes.

    Raises:
        ValueError: the dtype is unknown, the head dim is less than 1, or the metadata has another platform, mode or
            interpret.
    """

    operation: str | type[OperationImpl]
    platform: str | None = None
    interpret: bool = False
    mode: str = "train"
    block: int = 16
    dtype: str | None = None
    head_dim: int | None = None
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {list(DTYPES)}")
        if self.head_dim is not None and self.head_dim < 1:
            raise ValueError(f"head_dim={self.head_dim} must be at least 1, or None for the smallest that is served")
        stated = self.metadata
        given = OperationMetadata(platform=self.platform, interpret=self.interpret, mode=self.mode)
        for name in ("platform", "interpret", "mode"):
            if getattr(stated, name) and getattr(stated, name) != getattr(given, name):
                raise ValueError(
                    f"metadata.{name}={getattr(stated, name)!r}, but {name}={getattr(self, name)!r} is checked: "
                    f"state {name} outside the metadata"
                )

    @functools.cached_property
    def cls(self) -> type[OperationImpl]:
        """The class of the operation.

        Raises:
            ValueError: no operation has the name, or it is not an operation on query, key and value.
            PluginError: the operation's plugin can't be loaded.
        """
        cls = (
            OperationRegistry.get(self.operation, self.checked_platform)
            if isinstance(self.operation, str)
            else self.operation
        )
        if not issubclass(cls, OperationImpl):
            raise ValueError(
                f"operation={self.operation!r} is not attention of query, key and value; {_OTHER_REFERENCES}"
            )
        return cls

    @functools.cached_property
    def base(self) -> OperationMetadata:
        """The metadata of every problem."""
        return self.metadata.replace(
            platform=self.platform, interpret=self.interpret, mode=self.mode, on_unsupported="error"
        )

    @property
    def checked_platform(self) -> str:
        """The platform for which the operation is checked."""
        return find_platform(self.base.platform, self.base.mesh, ())

    @property
    def forward(self) -> str:
        """The forward that is checked, such as ``"tpu"`` or ``"native"``."""
        return forward_for(self.cls, self.checked_platform)

    @property
    def name(self) -> str:
        """``distribution:operation``; the class's own name where no distribution offers it."""
        plugins = (plugin for plugin in OperationRegistry.plugins() if plugin.operation_class is self.cls)
        return next((plugin.name for plugin in plugins), self.cls.__qualname__)

    @property
    def place(self) -> tuple[str, str]:
        """The forward as ``module.Class.forward_name``, and the ``file:line`` that has it."""
        function = inspect.unwrap(getattr(self.cls, f"forward_{self.forward}"))
        try:
            where = f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
        except (TypeError, OSError):
            where = ""  # no Python source, or it is gone
        return f"{self.cls.__module__}.{self.cls.__qualname__}.forward_{self.forward}", where

    def require_kernel(self) -> None:
        """Make sure that the check does not run the core's native forward by mistake.

        Raises:
            NothingToCheckError: the class overrides no forward for the platform, such as if a plugin is not installed
                or does not load; or it does not declare that it computes attention.
        """
        if self.cls.computes != "attention":
            raise NothingToCheckError(
                f'{self.name} does not declare that it computes softmax attention, as computes = "attention" does; '
                f"{_OTHER_REFERENCES}"
            )
        native = self.forward == "native" and _is_core(self.cls.forward_native)
        if not native or self.cls.get_impl_name() == "auto":
            return
        if not _is_core(self.cls):
            raise NothingToCheckError(
                f"{self.name} on {self.checked_platform}: {self.cls.__module__}.{self.cls.__qualname__} does not "
                f"override forward_{self.checked_platform}, so that the core's forward_native would be checked; state "
                f"the platform that it serves"
            )
        if not isinstance(self.operation, str) or self.operation.startswith(f"{CORE}:"):
            return
        failed = [
            f"\n  - {plugin.name} is {plugin.state}: {plugin.cause}"
            for plugin in OperationRegistry.plugins(load=True)
            if plugin.operation_class is None and plugin.cause and plugin.distribution != CORE
        ]
        failed_here = [text for text in failed if f":{self.operation} is " in text]
        if failed_here or self.platform not in (None, "cpu"):
            raise NothingToCheckError(
                f"no installed plugin overrides forward_{self.checked_platform} for {self.operation!r}; `attnops "
                f"doctor` says whether yours loads; {CORE}:{self.operation} checks the core's own{''.join(failed)}"
            )

    @functools.cached_property
    def fit(self) -> Fit:
        """The plain problem that the operation serves; the default one if it serves none."""
        operation = self.make(self.base)
        cast = self.base.runtime_dtype
        dtypes = [self.dtype] if self.dtype else ["float32"] if cast else [d for d in DTYPES if d in self.limits.dtypes]
        plain = combine([]).problem(self.base).request(operation)

        def reasons(request: AttentionRequest) -> list[Reason]:
            return operation.reasons(request if cast is None else request.replace(dtypes=(jnp.dtype(cast).name,) * 3))

        assert isinstance(plain, AttentionRequest)
        fit = find_fit(reasons, plain, self.block, dtypes or DTYPES, (self.head_dim,) if self.head_dim else HEAD_DIMS)
        fit = dataclasses.replace(fit, dtype=self.dtype or fit.dtype)
        return fit if self.head_dim is None else dataclasses.replace(_lengthened(fit), own_tiles=True)

    @functools.cached_property
    def served(self) -> tuple[str, ...]:
        """The single features that the operation serves, without those of the plain problem; compiles nothing."""
        return tuple(name for name in changing(self.fit) if self.refusal([name]) is None)

    @functools.cached_property
    def long(self) -> Subject:
        """The subject with long problems: 2.5 tiles of at least 128 tokens, for kernels that choose their own tiles."""
        copy = dataclasses.replace(self)
        vars(copy)["fit"] = _lengthened(self.fit)  # if the operation refuses this one, every check reports that
        return copy

    def small(self, heads: int) -> Subject:
        """The subject with fewer heads, if the operation serves any number of them, and with fewer tiles if
        interpreted.

        An interpreter's time grows with heads and tiles; 1.5 tiles have empty, partial and full ones and a ragged end.
        """
        copy = dataclasses.replace(self)
        H = heads if self.fit.H == Fit.H else self.fit.H
        vars(copy)["fit"] = dataclasses.replace(self.fit, H=H, tiles=1 if self.interpret else self.fit.tiles)
        return copy

    @property
    def limits(self) -> Limits:
        """The limits that the checked forward declares."""
        return self.make(self.base)._limits(self.forward)

    @property
    def gradients(self) -> bool:
        """Whether gradients are checked."""
        return self.base.mode == MODE_TRAIN

    @property
    def compiler_options(self) -> dict[str, int] | None:
        """Options with which XLA compiles faster and optimises less; for CPUs only."""
        return FAST_COMPILE if jax.default_backend() == "cpu" else None

    def make(self, metadata: OperationMetadata) -> OperationImpl:
        """The operation, with this metadata."""
        return self.cls(metadata)

    def problem(self, names: Iterable[str], seed: int = 0, metadata: OperationMetadata | None = None) -> Problem:
        """The problem that has these features."""
        return combine(names, fit=self.fit).problem(metadata or self.base, seed)

    def reasons(self, names: Iterable[str]) -> list[Reason]:
        """Why the operation refuses these features together; compiles nothing."""
        problem = self.problem(names)
        return problem.reasons(self.make(problem.metadata))

    def check(self, names: Sequence[str]) -> Outcome:
        """Check values and gradients of a problem that has these features."""

        def check() -> None:
            problem = self.problem(names)
            problem.check(self.make(problem.metadata), self.gradients, self.compiler_options)

        return attempt(joined(names), check)

    def check_row(self, row: Sequence[str]) -> list[Outcome]:
        """Check each feature of the row, in one small program if possible."""
        return self.small(4 if "GQA" in row else 2)._check_parts(row, [(name,) for name in row], least=1)

    def check_pairs(self, row: Sequence[str]) -> list[Outcome]:
        """Check every pair that the row covers, in as few programs as possible."""
        return self._check_parts(row, proven_pairs(row), least=3)

    def _check_parts(self, row: Sequence[str], parts: Sequence[tuple[str, ...]], least: int) -> list[Outcome]:
        """The outcomes of subsets of a row's features. Refusals need no compilation.

        The other subsets run in one problem if it has at least ``least`` features; if that is wrong, or refused
        although no subset is, each subset runs by itself.
        """
        outcome_by_part = {part: self.refusal(part) for part in parts}
        served = [name for name in row if any(name in part for part in parts if outcome_by_part[part] is None)]
        together = self.check(served) if len(served) >= least else None
        for part in parts:
            if outcome_by_part[part] is None:
                right = together is not None and together.status is Status.RIGHT
                outcome_by_part[part] = Outcome(joined(part), Status.RIGHT) if right else self.check(part)
        outcomes = [outcome for outcome in outcome_by_part.values() if outcome is not None]
        wrong = any(outcome.status is Status.WRONG for outcome in outcomes)
        if together is not None and together.status is Status.WRONG and not wrong:
            outcomes.append(together)  # only their combination is wrong
        return outcomes

    def check_pair_or_others(self, pair: tuple[str, str]) -> list[Outcome]:
        """Check a pair. If it is refused, check each of its features that is served, together with the first other
        feature with which it is served.
        """
        outcomes = self.check_pairs(pair)
        if all(outcome.status is Status.REFUSED for outcome in outcomes):
            for name in pair:
                if name in self.served:
                    others = (p for p in all_pairs(self.served) if name in p and self.refusal(p) is None)
                    outcomes.append(self.check(next(others, (name,))))
        return outcomes

    def refusal(self, names: Sequence[str]) -> Outcome | None:
        """The outcome of these features together, if known without compiling: refused, or wrong."""
        reasons: list[Reason] = []

        def check() -> None:
            reasons.extend(self.reasons(names))

        outcome = attempt(joined(names), check)
        if outcome.status is Status.RIGHT:
            return refused(joined(names), reasons) if reasons else None
        return outcome


def _lengthened(fit: Fit) -> Fit:
    """The problem in tiles of 128 tokens or more, with fewer batches and heads."""
    block = max(128, 2 * fit.multiple, fit.block)
    return dataclasses.replace(fit, block=block, B=1, H=2 if fit.H == 4 else fit.H)


def _is_core(value: type | Callable[..., object]) -> bool:
    """Whether a class or a function is the core's."""
    return str(value.__module__).partition(".")[0] == CORE


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
