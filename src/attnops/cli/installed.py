"""What is installed, as `list` and `doctor` show it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from typing import Any

from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.plugins import CORE, Plugin
from attnops.dispatch.registry import OperationRegistry, served_platforms
from attnops.errors import AmbiguousOperationError, DuplicateOperationError, PluginError, PluginWarning


@dataclasses.dataclass(frozen=True)
class Installed:
    """What is installed.

    Attributes:
        plugins: every operation of every distribution, by operation, the core's first.
        unreadable: distributions whose metadata is broken, so that their operations are not known.
        ambiguous: names that several serve equally well; empty where the plugins are not loaded.
    """

    plugins: tuple[Plugin, ...]
    unreadable: tuple[str, ...]
    ambiguous: tuple[str, ...]


def find(load: bool) -> Installed:
    """Look at what is installed.

    Args:
        load: import every plugin, one by one; what they print goes to stderr. Without it none is imported, and
            whether a name is ambiguous is not known.
    """
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        OperationRegistry.refresh()
        plugins = OperationRegistry.plugins(load=load)
    unreadable = tuple(str(warning.message) for warning in caught if warning.category is PluginWarning)
    ambiguous = tuple(_ambiguous(sorted({plugin.operation for plugin in plugins}))) if load else ()
    order = sorted(plugins, key=lambda plugin: (plugin.operation, plugin.distribution != CORE, plugin.distribution))
    return Installed(tuple(order), unreadable, ambiguous)


def platforms(plugin: Plugin, plugins: tuple[Plugin, ...]) -> list[str] | None:
    """The platforms that a plugin has forwards of its own for, not the core's; ["any"] for a native one alone.

    None: it is not loaded, so they are not known.
    """
    cls = plugin.operation_class
    if cls is None:
        return None
    cores = (p.operation_class for p in plugins if p.distribution == CORE and p.operation == plugin.operation)
    core = next(cores, None)
    base = core if core is not None and core is not cls and issubclass(cls, core) else None
    served = served_platforms(cls, base)
    return [platform for platform in PLATFORMS if platform in served] or ["any"]


def describe(plugin: Plugin, plugins: tuple[Plugin, ...]) -> dict[str, Any]:
    """A plugin's fields, for a program to read."""
    cls = plugin.operation_class
    return {
        "operation": plugin.operation,
        "platforms": platforms(plugin, plugins),
        "distribution": plugin.distribution,
        "version": plugin.version,
        "state": str(plugin.state),
        "name": plugin.name,
        "target": plugin.target,
        "priority": None if cls is None else cls.priority,
        "cause": plugin.cause,
        "traceback": plugin.traceback,
    }


def _ambiguous(operations: list[str]) -> list[str]:
    """What `OperationRegistry.get` says of each name that several serve equally well, once for all its platforms."""
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for operation in operations:
        for platform in PLATFORMS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PluginWarning)
                    OperationRegistry.get(operation, platform)
            except (AmbiguousOperationError, DuplicateOperationError) as error:
                key = operation, str(error).replace(f" on {platform}", "")
                found.setdefault(key, (str(error), []))[1].append(platform)
            except PluginError:
                pass  # its state says so
    return [
        message + (f" (likewise on {', '.join(others)})" if others else "") for message, (_, *others) in found.values()
    ]
