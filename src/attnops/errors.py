"""The exceptions and warnings of attnops, subclasses of the built-in ones; and `Reason`, why a request is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why an implementation can't serve a request.

    Attributes:
        argument: the argument or option at fault, such as ``"head_dim"``.
        value: the value that the call gives it.
        limit: the rule that the value breaks.
        hint: what to do instead.
    """

    argument: str
    value: Any
    limit: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.argument}={self.text}: {self.limit}{hint}"

    @property
    def text(self) -> str:
        """The value as text; also of a value that can't be printed."""
        return printable(self.value)


class UnknownOperationError(ValueError):
    """No installed distribution has an operation of this name."""


class AmbiguousOperationError(ValueError):
    """Several distributions serve one name on one platform with the same priority."""


class DuplicateOperationError(ValueError):
    """A distribution registers a second class for a name and platform that it already serves."""


class PluginError(ImportError):
    """The only distribution that has this operation is broken, incompatible or disabled."""


class UnsupportedError(NotImplementedError):
    """An implementation can't serve a request and may not, or can't, run its native forward instead.

    Attributes:
        reasons: every reason, in the order found.
    """

    def __init__(self, message: str, reasons: Sequence[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class NotDifferentiableError(NotImplementedError):
    """An implementation without a backward pass was differentiated."""


class UnsupportedWarning(UserWarning):
    """An implementation could not serve a request, so the native forward ran. Issued once for each distinct reason."""


class PluginWarning(UserWarning):
    """A distribution that provides the requested operation can't be used; another one is."""


def pass_interrupt(error: BaseException) -> None:
    """Raise a `KeyboardInterrupt` again.

    For handlers of everything that a plugin raises: exits, cancellations and exceptions of another language (pyo3's
    PanicException) are not subclasses of `Exception`.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error


def printable(value: Any) -> str:
    """``str(value)``, or a description of the value where that raises."""
    try:
        return str(value)
    except BaseException as error:
        pass_interrupt(error)
        return f"<a {type(value).__name__}, whose printing raised {type(error).__name__}>"
