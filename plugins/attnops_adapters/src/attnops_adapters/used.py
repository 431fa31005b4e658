"""A temporary replacement of a framework's function, safe if several threads replace and restore it in any order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from attnops import OperationMetadata

# The name of an operation, and its metadata.
Used: TypeAlias = tuple[str, OperationMetadata]


class Stack:
    """The operations in use. The last one serves calls; without any, the framework's function does."""

    def __init__(self, default: Used) -> None:
        self._default = default
        self._entries: list[list[Used]] = []  # each in a list, so that equal ones differ by identity
        self._lock = threading.Lock()
        self._original: Any = None

    @property
    def last(self) -> Used:
        """The operation that serves calls, and its metadata."""
        entries = self._entries
        return entries[-1][0] if entries else self._default

    @contextlib.contextmanager
    def pushed(self, used: Used, module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
        """A context in which ``module.name`` is ``function``, and `last` is ``used`` unless another is pushed later."""
        entry = [used]
        with self._lock:
            if not self._entries:
                self._original = getattr(module, name)
                setattr(module, name, function)
            self._entries = [*self._entries, entry]
        try:
            yield
        finally:
            with self._lock:
                self._entries = [x for x in self._entries if x is not entry]
                if not self._entries:
                    setattr(module, name, self._original)


def checked_metadata(fields: dict[str, Any]) -> OperationMetadata:
    """The metadata with these fields, for an adapter; the framework determines the layout.

    Raises:
        ValueError: the layout is given, or a field is outside its range.
    """
    if "layout" in fields:
        raise ValueError(f"layout={fields['layout']!r} must not be given: the framework determines it; leave it out")
    return OperationMetadata(**fields)
