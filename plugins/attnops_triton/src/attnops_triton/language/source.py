"""Kernels as Triton source, written for one plan: shapes are literals, and only what the plan needs is there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's text; equal texts are one kernel.

    Attributes:
        name: the function's.
        parameters: pointers, inputs first.
        text: the function, without its decorator.
    """

    name: str
    parameters: tuple[str, ...]
    text: str


class Writer:
    """Lines with their indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1
        self._fresh = 0

    def __call__(self, *lines: str) -> None:
        """Add lines."""
        self.lines += ["    " * self._depth + line for line in lines]

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A loop or a condition, around what is added inside."""
        self(head)
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self) -> str:
        """A name that is not in use."""
        self._fresh += 1
        return f"t{self._fresh}"

    def kernel(self, name: str, parameters: list[str]) -> Kernel:
        """The function of all lines."""
        head = f"def {name}({', '.join(parameters)}):"
        return Kernel(name, tuple(parameters), "\n".join([head, *self.lines, ""]))


def number(x: float) -> str:
    """A number as Triton reads it."""
    if isinstance(x, float) and x - x != 0:
        return f'float("{x}")'
    return repr(x)
