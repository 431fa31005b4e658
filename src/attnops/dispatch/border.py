"""Calls to methods of plugins' classes: their results are checked, and a fault is reported with the class's name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import Request
from attnops.errors import PluginError, Reason, UnsupportedError, pass_interrupt, printable

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.operation import BaseOperation

Given = TypeVar("Given")


def make(cls: type[BaseOperation], metadata: OperationMetadata) -> BaseOperation:
    """``cls(metadata)``.

    Raises:
        ValueError, UnsupportedError: the class refuses the metadata.
        PluginError: its ``__init__`` raised anything else, or set no ``metadata``.
    """
    operation = _asked(cls, "__init__", lambda: cls(metadata), (ValueError, UnsupportedError))
    kept = _asked(cls, "__init__", lambda: getattr(operation, "metadata", None))
    if not isinstance(kept, OperationMetadata):
        raise _fault(cls, "__init__ left metadata unset; it must call super().__init__(metadata)")
    return operation


def environment_key(operation: BaseOperation) -> Hashable:
    """``operation.environment_key()``.

    Raises:
        PluginError: it raised, or returned an unhashable value.
    """
    cls = type(operation)
    key = _asked(cls, "environment_key", operation.environment_key)
    try:
        hash(key)
    except BaseException as error:
        pass_interrupt(error)
        what = f"environment_key returned a {type(key).__name__}, but must return a hashable value"
        raise _fault(cls, what) from error
    return key


def reasons_of(cls: type, method: str, ask: Callable[[], Iterable[Reason] | str | None]) -> list[Reason]:
    """The reasons that ``ask`` returns, by calling a method of a class.

    Raises:
        PluginError: it raised, or returned anything but reasons.
    """

    def checked() -> list[Reason]:
        given = ask()
        if given is None or isinstance(given, str):
            what = f"{method} returned {given!r}, but must return or yield attnops.Reason; return () for none"
            raise _fault(cls, what)
        reasons = list(given)
        for reason in reasons:
            if not isinstance(reason, Reason):
                what = f"{method} gave {printable(reason)!r} ({type(reason).__name__}), but must give attnops.Reason"
                raise _fault(cls, what)
            str(reason)
        return reasons

    return _asked(cls, method, checked, (PluginError,))


def details(operation: BaseOperation, request: Request) -> tuple[str, ...]:
    """``operation.details(request)``.

    Raises:
        PluginError: it raised, or returned anything but lines of text.
    """
    cls = type(operation)
    given: object = _asked(cls, "details", lambda: operation.details(request))
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    lines = _asked(cls, "details", lambda: tuple(several))
    texts = tuple(line for line in lines if isinstance(line, str))
    if len(texts) < len(lines):
        raise _fault(cls, f"details returned {printable(given)}, but must return or yield strings; return () for none")
    return texts


def rank(cls: type[OperationImpl], request: Request) -> Rank | RankBetween | None:
    """``cls.rank(request)``.

    Raises:
        PluginError: it raised, or returned neither a `Rank` nor None.
    """
    given: object = _asked(cls, "rank", lambda: cls.rank(request))
    if given is not None and not isinstance(given, (Rank, RankBetween)):
        raise _fault(cls, f"rank returned {printable(given)}, but must return an attnops.Rank, or None for never")
    return given


def _asked(cls: type, method: str, ask: Callable[[], Given], passed: tuple[type[BaseException], ...] = ()) -> Given:
    """What ``ask`` returns; raises a `PluginError` where it raises anything but ``passed``."""
    try:
        return ask()
    except passed:
        raise
    except BaseException as error:
        pass_interrupt(error)
        raise _fault(cls, f"{method} raised {type(error).__name__}: {printable(error)}") from error


def _fault(cls: type, what: str) -> PluginError:
    return PluginError(f"{cls.__module__}:{cls.__qualname__}.{what}")
