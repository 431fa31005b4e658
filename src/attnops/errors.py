"""What attnops raises. Each is also the built-in exception that a caller would expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnops.dispatch.request import Reason


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
