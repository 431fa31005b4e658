"""Kernels as Triton source: unused features are left out, and what differs between calls of a model is an argument."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class KernelFunction:
    """A kernel that is a function in Triton's language, and its options.

    The function has three parameters: arrays, integers, and options, a `tl.constexpr`.

    Attributes:
        function: the function, a `triton.JITFunction`.
        arrays: the first argument with names in place of pointers, inputs first: nested tuples, None for absent arrays.
        sizes: the second argument with names in place of integers.
        options: the third argument, a frozen dataclass; functions among its fields are `triton.JITFunction`s too.
    """

    function: Any
    arrays: tuple[Any, ...]
    sizes: tuple[Any, ...]
    options: Any
    gluon = False
    scratch = 0

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.function.fn.__name__)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's parameters."""
        return tuple(self.function.arg_names)

    @functools.cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the arrays, inputs first."""
        return tuple(_leaves(self.arrays))

    @functools.cached_property
    def integers(self) -> tuple[str, ...]:
        """Names of the integers."""
        return tuple(_leaves(self.sizes))

    def arguments(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The function's arguments, with values by name in place of names."""
        return _filled(self.arrays, values), _filled(self.sizes, values), self.options

    @property
    def key(self) -> tuple[str, ...]:
        """What the code depends on, for all functions that it calls."""
        given = vars(self.options).values()
        keys = [x.cache_key for x in (self.function, *given) if hasattr(x, "cache_key")]
        properties = inspect.getsource(inspect.getmodule(type(self.options)))  # type: ignore[arg-type]
        return (*keys, properties, repr(self.arrays), repr(self.sizes), repr(self.options))

    @functools.cached_property
    def reachable(self) -> dict[str, Any]:
        """The functions that it calls, and itself, by name, without Triton's own; each after those that it calls."""
        found: dict[str, Any] = {}

        def visit(function: Any) -> None:
            if not hasattr(function, "fn") or function.fn.__module__.startswith("triton."):
                return
            for name in function.fn.__code__.co_names:
                visit(function.fn.__globals__.get(name))
            found[function.fn.__name__] = function

        for function in (*vars(self.options).values(), self.function):
            visit(function)
        return found

    @property
    def text(self) -> str:
        """The source of all `reachable` functions, without decorators."""
        sources = (inspect.getsource(x.fn) for x in self.reachable.values())
        return "\n\n".join(source[re.search(r"^def ", source, re.MULTILINE).start() :] for source in sources)  # type: ignore[union-attr]


def _leaves(names: Any) -> Iterator[str]:
    for name in names:
        if isinstance(name, tuple):
            yield from _leaves(name)
        elif name is not None:
            yield name


def _filled(names: Any, values: dict[str, Any]) -> Any:
    if not isinstance(names, tuple):
        return None if names is None else values[names]
    filled = [_filled(name, values) for name in names]
    return type(names)(*filled) if hasattr(names, "_fields") else tuple(filled)


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """A kernel's text; kernels with equal texts are equal. It has the members of `KernelFunction` that others use.

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

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's parameters."""
        return (*self.pointers, *self.integers)

    def arguments(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The function's arguments, from values by name."""
        return tuple(values[name] for name in self.parameters)

    @property
    def key(self) -> tuple[str, ...]:
        """What the code depends on."""
        return (self.text,)


AnyKernel: TypeAlias = KernelSource | KernelFunction


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
