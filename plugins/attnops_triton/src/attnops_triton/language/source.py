"""Kernels as Triton source, written for one plan: shapes are literals, and unused features are left out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's text; kernels with equal texts are equal.

    Attributes:
        name: of the function.
        parameters: names of pointers, inputs first.
        text: of the function, without a decorator.
    """

    name: str
    parameters: tuple[str, ...]
    text: str


class Writer:
    """The lines of a kernel."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1
        self._fresh = 0

    def __call__(self, *lines: str) -> None:
        """Add lines at the current indentation."""
        self.lines += ["    " * self._depth + line for line in lines]

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A loop or a condition; lines that are added in the context are indented."""
        self(head)
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self) -> str:
        """An unused variable name."""
        self._fresh += 1
        return f"t{self._fresh}"

    def kernel(self, name: str, parameters: list[str]) -> Kernel:
        """The kernel of all lines."""
        head = f"def {name}({', '.join(parameters)}):"
        return Kernel(name, tuple(parameters), "\n".join([head, *self.lines, ""]))


def number(x: float) -> str:
    """A number as Triton source."""
    if isinstance(x, float) and x - x != 0:
        return f'float("{x}")'
    return repr(x)
