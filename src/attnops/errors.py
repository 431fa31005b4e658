"""What attnops raises, each also the built-in exception that a caller would expect; and the reasons of a refusal."""

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
    """A gradient was asked of an implementation that has no backward pass."""


class UnsupportedWarning(UserWarning):
    """An implementation could not serve a request, so the native forward ran. Given once a distinct reason."""


class PluginWarning(UserWarning):
    """A distribution that names the operation asked for can't be used; another one serves it."""


def printable(value: Any) -> str:
    """``str(value)``, or what it is where that raises."""
    try:
        return str(value)
    except Exception as error:
        return f"<a {type(value).__name__}, whose printing raised {type(error).__name__}>"
