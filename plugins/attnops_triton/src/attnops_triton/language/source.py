"""A kernel and its arguments."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelFunction:
    """A kernel that is a function in Triton's language or in Gluon, and its options.

    The function has three parameters: arrays, integers, and options, a `tl.constexpr`.
    """

    function: Any  # the function, a `triton.JITFunction`
    # The first argument with names in place of pointers, inputs first: nested tuples, None for absent arrays.
    arrays: tuple[Any, ...]
    sizes: tuple[Any, ...]  # the second argument with names in place of integers
    options: Any  # the third argument, a frozen dataclass; functions among its fields are `triton.JITFunction`s too
    # By array that it reads or writes through a tensor map, the block of a copy: [1, tokens, features] of an array
    # [B, tokens, heads, D], or [rows, columns] of an array whose last axis has the columns.
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def gluon(self) -> bool:
        """Whether it is written in Gluon rather than in Triton's language."""
        return bool(self.function.is_gluon())

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
        properties = map(_source_of, sorted(_modules(self.options)))
        return (*keys, *properties, repr(self.arrays), repr(self.sizes), repr(self.options), repr(self.blocks))

    @functools.cached_property
    def reachable(self) -> dict[str, Any]:
        """The functions that it calls, and itself, by name, without Triton's own; each after those that it calls.

        Raises:
            ValueError: two of them have one name.
        """
        found: dict[str, Any] = {}

        def visit(function: Any) -> None:
            if not hasattr(function, "fn") or function.fn.__module__.startswith("triton."):
                return
            for each in dis.get_instructions(function.fn):
                if each.opname == "LOAD_GLOBAL":
                    visit(function.fn.__globals__.get(each.argval))
            name = function.fn.__name__
            if found.setdefault(name, function) is not function:
                raise ValueError(f"{name} of {found[name].fn.__module__} and of {function.fn.__module__} have one name")

        for function in (*vars(self.options).values(), self.function):
            visit(function)
        return found

    @functools.cached_property
    def text(self) -> str:
        """The source of all `reachable` functions, without decorators."""
        return "\n\n".join(x.src for x in self.reachable.values())


def shape_of_map(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array as a tensor map has it: as many axes as a block."""
    if len(block) == 2:
        return math.prod(shape[:-1]), shape[-1]
    return (*shape[:2], math.prod(shape[2:]))


def _modules(options: Any) -> set[str]:
    """The modules of the classes of options and of their fields, whose properties are evaluated at compile time."""
    if not dataclasses.is_dataclass(options):
        return set()
    names = {cls.__module__ for cls in inspect.getmro(type(options))[:-1]}
    return names.union(*(_modules(x) for x in vars(options).values()))


@functools.cache
def _source_of(module: str) -> str:
    return inspect.getsource(sys.modules[module])


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
