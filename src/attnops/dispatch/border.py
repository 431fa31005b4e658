"""Calls to methods of plugins' classes: their results are checked, and a fault is reported with the class's name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import Request
from attnops.errors import PluginError, Reason, UnsupportedError, pass_interrupt, printable

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.operation import BaseOperation


def make(cls: type[BaseOperation], metadata: OperationMetadata) -> BaseOperation:
    """``cls(metadata)``.

    Raises:
        ValueError, UnsupportedError: the class refuses the metadata.
        PluginError: its ``__init__`` raised anything else, or set no ``metadata``.
    """
    try:
        operation = cls(metadata)
        kept = getattr(operation, "metadata", None)
    except (ValueError, UnsupportedError):
        raise
    except BaseException as error:
        raise _raised(cls, "__init__", error) from error
    if not isinstance(kept, OperationMetadata):
        raise _fault(cls, "__init__ left metadata unset; it must call super().__init__(metadata)")
    return operation


def environment_key(operation: BaseOperation) -> Hashable:
    """``operation.environment_key()``.

    Raises:
        PluginError: it raised, or returned an unhashable value.
    """
    cls = type(operation)
    try:
        key = operation.environment_key()
    except BaseException as error:
        raise _raised(cls, "environment_key", error) from error
    try:
        hash(key)
    except BaseException as error:
        pass_interrupt(error)
        what = f"environment_key returned a {type(key).__name__}, but must return a hashable value"
        raise _fault(cls, what) from error
    return key


def unsupported(operation: BaseOperation, request: Request) -> list[Reason]:
    """``operation.unsupported(request)``.

    Raises:
        PluginError: it raised, or returned anything but reasons.
    """
    return reasons_of(type(operation), "unsupported", lambda: operation.unsupported(request))


def reasons_of(cls: type, method: str, ask: Callable[[], Iterable[Reason] | str | None]) -> list[Reason]:
    """The reasons that ``ask`` returns, by calling a method of a class.

    Raises:
        PluginError: it raised, or returned anything but reasons.
    """
    try:
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
    except PluginError:
        raise
    except BaseException as error:
        raise _raised(cls, method, error) from error
    return reasons


def details(operation: BaseOperation, request: Request) -> tuple[str, ...]:
    """``operation.details(request)``.

    Raises:
        PluginError: it raised, or returned anything but lines of text.
    """
    cls = type(operation)
    try:
        given: object = operation.details(request)
        lines = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    except BaseException as error:
        raise _raised(cls, "details", error) from error
    texts = tuple(line for line in lines if isinstance(line, str))
    if len(texts) < len(lines):
        raise _fault(cls, f"details returned {printable(given)}, but must return or yield strings; return () for none")
    return texts


def rank(cls: type[OperationImpl], request: Request) -> Rank | RankBetween | None:
    """``cls.rank(request)``.

    Raises:
        PluginError: it raised, or returned neither a `Rank` nor None.
    """
    try:
        given: object = cls.rank(request)
    except BaseException as error:
        raise _raised(cls, "rank", error) from error
    if given is not None and not isinstance(given, (Rank, RankBetween)):
        raise _fault(cls, f"rank returned {printable(given)}, but must return an attnops.Rank, or None for never")
    return given


def _raised(cls: type, method: str, error: BaseException) -> PluginError:
    pass_interrupt(error)
    return _fault(cls, f"{method} raised {type(error).__name__}: {printable(error)}")


def _fault(cls: type, what: str) -> PluginError:
    return PluginError(f"{cls.__module__}:{cls.__qualname__}.{what}")
