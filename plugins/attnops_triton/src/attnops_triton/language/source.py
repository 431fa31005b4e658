"""Kernels as Triton source: unused features are left out, and what differs between calls of a model is an argument."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """A kernel's text; kernels with equal texts are equal.

    Attributes:
        name: the name of the function.
        pointers: names of its first parameters, pointers, inputs first.
        integers: names of the other parameters, integers.
        text: the source of the function, without a decorator, and of the functions that it calls.
        gluon: whether it is written in Gluon rather than in Triton's language.
        scratch: bytes of scratch memory per program; the last pointer is to that of all programs.
    """

    name: str
    pointers: tuple[str, ...]
    integers: tuple[str, ...]
    text: str
    gluon: bool = False
    scratch: int = 0


class SourceWriter:
    """The lines of a kernel.

    Attributes:
        lines: the lines of the function.
        integers: the integer arguments, by parameter.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.integers: dict[str, int] = {}
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

    def integer(self, name: str, value: int) -> str:
        """Add an integer parameter with this argument, and return its name; so the text does not depend on the
        value.
        """
        if self.integers.setdefault(name, int(value)) != value or not 0 <= value < 2**31:
            raise ValueError(f"{name}={value}, and {self.integers[name]} before: must be one value of 32 bits")
        return name

    def fresh(self) -> str:
        """An unused variable name."""
        self._fresh += 1
        return f"t{self._fresh}"

    def kernel(self, name: str, pointers: list[str], functions: str = "") -> KernelSource:
        """The kernel of all lines; ``functions`` is the text of those that it calls."""
        head = f"def {name}({', '.join([*pointers, *self.integers])}):"
        return KernelSource(name, tuple(pointers), tuple(self.integers), functions + "\n".join([head, *self.lines, ""]))


def number(x: float) -> str:
    """A number as Triton source."""
    if isinstance(x, float) and x - x != 0:
        return f'float("{x}")'
    return repr(x)
