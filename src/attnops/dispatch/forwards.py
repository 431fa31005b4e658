"""Which forward of a class serves a platform, and the arguments and options that its signature names."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from attnops.dispatch.platforms import FORWARD_CHAIN, PLATFORMS
from attnops.typing import Function, PyTree

if TYPE_CHECKING:
    from attnops.dispatch.operation import BaseOperation

FunctionType = TypeVar("FunctionType", bound=Function)


def fallback(forward: FunctionType) -> FunctionType:
    """Marks a forward of `BaseOperation` that calls the next one of its platform's chain."""
    forward.is_fallback = True  # type: ignore[attr-defined]
    return forward


def forward_for(cls: type[BaseOperation], platform: str) -> str:
    """The forward of ``cls`` that serves a platform, by name: the first of its chain that is overridden."""
    return next((name for name in FORWARD_CHAIN[platform] if has_forward(cls, name)), "native")


def has_forward(cls: type[BaseOperation], forward: str) -> bool:
    """Whether ``cls``, or a class that it inherits from, overrides a forward."""
    return not hasattr(getattr(cls, f"forward_{forward}"), "is_fallback")


@functools.cache
def named_options(cls: type[BaseOperation], forward: str) -> frozenset[str]:
    """The options that a forward's signature names."""
    return keyword_options(getattr(cls, f"forward_{forward}"))


@functools.cache
def keyword_options(function: Function) -> frozenset[str]:
    """The options that a function's signature names, one by one or as ``**options: Unpack[AttentionOptions]``."""
    names: set[str] = set()
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            names.update(_unpacked(function, p.annotation))
        elif p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty):
            names.add(p.name)
    return frozenset(names)


def check_named(function: Function, options: Mapping[str, object]) -> None:
    """Raise a `TypeError` for an option that a function does not name, as Python does for named parameters."""
    if unknown := options.keys() - keyword_options(function):
        named = sorted(keyword_options(function))
        raise TypeError(f"{function.__qualname__} has no option {sorted(unknown)[0]!r}; it has {named}")


def _unpacked(function: Function, annotation: object) -> Iterable[str]:
    """The keys of ``Unpack[a TypedDict]``, of typing or typing_extensions; none for other annotations."""
    annotation = _evaluated(function, annotation)
    if not str(typing.get_origin(annotation)).endswith(".Unpack"):
        return ()
    options: Any = _evaluated(function, typing.get_args(annotation)[0])
    keys: Any = typing.get_origin(options) or options  # a generic TypedDict has the origin
    return keys.__required_keys__ | keys.__optional_keys__


def _evaluated(function: Function, annotation: object) -> object:
    """An annotation, evaluated if it is text, as in modules with `from __future__ import annotations`."""
    text = getattr(annotation, "__forward_arg__", annotation)
    if not isinstance(text, str):
        return annotation
    inside = ("__wrapped__", "__partialmethod__", "_partialmethod", "func")  # decorators, partial and partialmethod
    while inner := next((getattr(function, name) for name in inside if hasattr(function, name)), None):
        function = inner
    try:
        return eval(text, function.__globals__)
    except Exception as error:
        if "Unpack" not in str(annotation):
            return None  # a name that only type checkers import
        raise TypeError(
            f"{function.__qualname__} of {function.__module__} has **options: {text}, but {error}; define it in the "
            f"module, or import it outside of `if TYPE_CHECKING`, since the dispatcher reads which options there are"
        ) from error


@functools.cache
def all_options(cls: type[BaseOperation]) -> frozenset[str]:
    """The options that at least one forward of ``cls`` names."""
    return frozenset().union(*(named_options(cls, forward_for(cls, platform)) for platform in PLATFORMS))


@functools.cache
def positional_names(cls: type[BaseOperation]) -> tuple[str, ...]:
    """The required positional arguments of `forward_native`."""
    parameters = list(inspect.signature(cls.forward_native).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty)


def by_position(
    cls: type[BaseOperation], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, PyTree]]:
    """The positional arguments of a call, including those given by name, and its options."""
    names, options = positional_names(cls), dict(kwargs)
    given = list(args)
    for name in names[len(args) :]:
        if name not in options:
            break
        given.append(options.pop(name))
    for name in names:
        if name in options and names.index(name) < len(args):
            raise TypeError(f"{cls.__name__} got its argument {name!r} twice, by position and by name")
        if name in options:
            raise TypeError(f"{cls.__name__} lacks its argument {names[len(given)]!r}; its arguments are {list(names)}")
    return tuple(given), options
