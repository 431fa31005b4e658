"""What is installed, as `list` and `doctor` show it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from typing import Any, Final

from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.plugins import CORE, Plugin, State, Trouble
from attnops.dispatch.registry import OperationRegistry, served_platforms
from attnops.errors import AmbiguousOperationError, DuplicateOperationError, PluginError, PluginWarning
from attnops_cli.asked import find_faults
from attnops_cli.noise import quiet

# The distribution with kernels for a platform, in addition to the core.
FOR_PLATFORM: Final = {"tpu": "attnops-tpu", "cuda": "attnops-triton", "rocm": "attnops-triton"}


@dataclasses.dataclass(frozen=True)
class Installed:
    """What is installed.

    Attributes:
        plugins: every operation of every distribution, by operation, the core's first.
        troubles: problems that are not a plugin's state, such as distributions whose metadata is broken.
        faults: faults of plugins' methods when called with a small request, each with the plugin's name.
        ambiguous: errors about names that several plugins serve with equal priority.

    The last two are empty if plugins were not loaded.
    """

    plugins: tuple[Plugin, ...]
    troubles: tuple[Trouble, ...]
    faults: tuple[tuple[str, str], ...]
    ambiguous: tuple[str, ...]


def find(load: bool, verbose: bool = False) -> Installed:
    """Look at what is installed.

    Args:
        load: whether to import every plugin, one by one, and to call its methods.
        verbose: whether to show on stderr what plugins and their libraries print; else only if a plugin fails.
    """
    with quiet(verbose) as noise, warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        OperationRegistry.refresh()
        plugins = OperationRegistry.plugins(load=load)
        faults = tuple((plugin.name, fault) for plugin in plugins for fault in find_faults(plugin))
        if any(plugin.state is State.FAILED for plugin in plugins):
            noise.show()
    usable = {plugin.operation for plugin in plugins if plugin.operation_class is not None}
    ambiguous = tuple(_ambiguous(sorted(usable))) if load else ()
    order = sorted(plugins, key=lambda plugin: (plugin.operation, plugin.distribution != CORE, plugin.distribution))
    return Installed(tuple(order), OperationRegistry.troubles(), faults, ambiguous)


def computes(plugin: Plugin) -> str | None:
    """What a plugin declares that it computes, ``"attention"`` or ``"other"``; None if it is not loaded."""
    return None if plugin.operation_class is None else plugin.operation_class.computes or "other"


def platforms(plugin: Plugin, plugins: tuple[Plugin, ...]) -> list[str] | None:
    """The platforms for which a plugin has forwards other than the core's; ["any"] if it has only a native one; None
    if it is not loaded.
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
        "computes": computes(plugin),
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
    """The errors of `OperationRegistry.get` for ambiguous names, once for all platforms of a name."""
    seen: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for operation in operations:
        for platform in PLATFORMS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PluginWarning)
                    OperationRegistry.get(operation, platform)
            except (AmbiguousOperationError, DuplicateOperationError) as error:
                key = operation, str(error).replace(f" on {platform}", "")
                seen.setdefault(key, (str(error), []))[1].append(platform)
            except PluginError:
                pass  # shown by its state
    return [message + (f" (also on {', '.join(others)})" if others else "") for message, (_, *others) in seen.values()]
