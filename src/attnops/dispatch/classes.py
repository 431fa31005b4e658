"""Checks of a plugin's class when it is loaded: declarations that would be ignored, or fail later, are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from attnops.dispatch.forwards import has_forward, named_options
from attnops.dispatch.limits import Limits
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import API_VERSION, ATTENTION, BaseOperation
from attnops.dispatch.platforms import FORWARD_CHAIN
from attnops.dispatch.plugins import check_name
from attnops.errors import pass_interrupt, printable

FORWARDS: Final = frozenset().union(*FORWARD_CHAIN.values())
FIELDS: Final = frozenset(field.name for field in dataclasses.fields(OperationMetadata))

# What version 1 of the plugin API called.
OF_VERSION_1: Final = frozenset({"_reasons", "_not_written"}).union(
    *({f"cached_{name}", f"stepped_{name}"} for name in FORWARDS)
)


def check_class(loaded: object) -> tuple[str, str]:
    """Why a class can't be an operation, as (fault, wrong api_version); both empty for a valid class."""
    try:
        if not (isinstance(loaded, type) and issubclass(loaded, BaseOperation)):
            return "is not a subclass of attnops.BaseOperation", ""
        if loaded.__abstractmethods__:
            return f"does not implement {', '.join(sorted(loaded.__abstractmethods__))}", ""
        wrong_version = _wrong_version(loaded)
        if wrong_version[0] or wrong_version[1]:
            return wrong_version
        hash(loaded)
        try:
            names_of(loaded)
        except ValueError as error:
            return str(error), ""
        return _wrong_attributes(loaded) or _wrong_limits(loaded), ""
    except BaseException as error:  # such as a property of a metaclass
        pass_interrupt(error)
        return f"can't be examined: it raised {type(error).__name__}: {printable(error)}", ""


def names_of(cls: type[BaseOperation]) -> tuple[str, ...]:
    """The names that ``cls.get_impl_name`` returns.

    Raises:
        ValueError: it raised, or returned no valid names.
    """
    try:
        given: str | tuple[str, ...] = cls.get_impl_name()
        names = (given,) if isinstance(given, str) else tuple(given)
    except BaseException as error:
        pass_interrupt(error)
        text = printable(error)
        raise ValueError(f"has a get_impl_name that gave no name, but {type(error).__name__}: {text}") from error
    if not names:
        raise ValueError("has a get_impl_name that returned no name")
    for name in names:
        if wrong := check_name(name):
            raise ValueError(f"has a get_impl_name that returned a name that {wrong}")
    return names


def _wrong_version(loaded: type[BaseOperation]) -> tuple[str, str]:
    if not isinstance(loaded.api_version, int):
        return f"has api_version={loaded.api_version!r}, which must be an int", ""
    if loaded.api_version != API_VERSION:
        todo = "upgrade attnops" if loaded.api_version > API_VERSION else "upgrade the plugin"
        return "", f"has api_version={loaded.api_version}, but this attnops has api_version={API_VERSION}; {todo}"
    # A class that does not state its version has the core's.
    if old := [name for name in dir(loaded) if name in OF_VERSION_1]:
        return "", f"has {', '.join(old)} of api_version=1, which api_version=2 does not call; upgrade the plugin"
    return "", ""


def _is_attention(loaded: type[BaseOperation]) -> bool:
    from attnops.dispatch.attention import OperationImpl  # with the first class, not with the registry

    return issubclass(loaded, OperationImpl)


def _wrong_attributes(loaded: type[BaseOperation]) -> str:
    if isinstance(loaded.priority, bool) or not isinstance(loaded.priority, int):
        return f"has priority={loaded.priority!r}, which must be an int"
    if loaded.computes not in (None, ATTENTION) and (_is_attention(loaded) or not isinstance(loaded.computes, str)):
        other = "" if _is_attention(loaded) else ", or the name of another contract"
        return f"has computes={loaded.computes!r}, which must be {ATTENTION!r} or None{other}"
    if loaded.computes == ATTENTION and not _is_attention(loaded):
        return f"has computes={ATTENTION!r}, but is not a subclass of attnops.OperationImpl"
    if isinstance(loaded.reads, str) or not set(loaded.reads) <= FIELDS:
        return f"has reads={loaded.reads!r}, which must be a set of fields of OperationMetadata: {sorted(FIELDS)}"
    if _is_attention(loaded):
        readers: object = loaded.readers  # type: ignore[attr-defined]
        if not isinstance(readers, Mapping) or not set(readers) <= FORWARDS:
            return f"has readers={readers!r}, which must map forwards to readers; forwards are {sorted(FORWARDS)}"
        axes: object = loaded.option_axes  # type: ignore[attr-defined]
        if not isinstance(axes, Mapping) or not all(
            isinstance(x, str) and set(x) <= set("bhk-") for x in axes.values()
        ):
            return f"has option_axes={axes!r}, which must map options to letters of 'b', 'h', 'k' and '-'"
        from attnops.partition.options import CONTRACT

        own_options = frozenset().union(*(named_options(loaded, name) for name in (*FORWARDS, "native"))) - CONTRACT
        if wrong := sorted(set(axes) - own_options):
            return f"has option_axes for {wrong}, which must be options of its forwards that are not in the contract"
    return ""


def _wrong_limits(loaded: type[BaseOperation]) -> str:
    for cls in loaded.__mro__:
        declared = vars(cls).get("limits", {})
        if not isinstance(declared, Mapping):
            return f"has limits={declared!r}, which must map forwards to attnops.Limits"
        for forward, limits in declared.items():
            if forward not in FORWARDS:
                return f"has limits for {forward!r}, which is not a forward; use one of {sorted(FORWARDS)}"
            if not isinstance(limits, Limits):
                return f"has limits[{forward!r}]={limits!r}, which must be an attnops.Limits"
            fields = limits.attention_only()
            if fields and not _is_attention(loaded):
                return (
                    f"has limits[{forward!r}] with {', '.join(fields)}, which only a subclass of attnops.OperationImpl "
                    f"can declare; yield a Reason from unsupported instead"
                )
    for forward in loaded.limits:
        if not has_forward(loaded, forward):
            return f"has limits for {forward!r}, but does not override forward_{forward}, so that they have no effect"
    return ""
