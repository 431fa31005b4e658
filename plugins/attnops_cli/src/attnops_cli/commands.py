"""The commands of installed distributions: entry points of the group ``attnops.commands``.

An entry point's name is the command's name, and its value a function that typer turns into a command. Only the command
that runs is imported; ``--help`` imports all.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import importlib_metadata

from attnops.dispatch.plugins import COMMANDS as GROUP
from attnops.dispatch.plugins import is_imported, normalize
from attnops.errors import pass_interrupt, printable

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

# The distribution of this project that has a command, except attnops-cli.
HOMES: Final = {
    "bench": "attnops-testing",
    "check": "attnops-testing",
    "demo": "attnops-lm",
    "new": "attnops-testing",
    "serve": "attnops-lm",
    "tune": "attnops-triton",
}

Command = TypeVar("Command")
# The entry points by command, then by distribution.
Declared = Mapping[str, Mapping[str, "EntryPoint"]]


class CommandError(Exception):
    """A command does not exist or can't be used; the message says why, and what to do."""


def installed() -> Declared:
    """The commands of all distributions, sorted by name. None is imported.

    A distribution whose metadata can't be read has none; `attnops list` reports it.
    """
    by_command: dict[str, dict[str, EntryPoint]] = {}
    for distribution in importlib_metadata.distributions():
        try:
            if GROUP in (distribution.read_text("entry_points.txt") or ""):
                owner = normalize(distribution.metadata["Name"])
                if is_imported(owner, distribution):
                    for entry_point in distribution.entry_points.select(group=GROUP):
                        by_command.setdefault(entry_point.name, {})[owner] = entry_point
        except Exception:
            continue
    return dict(sorted(by_command.items()))


def load(name: str, declared: Declared, make: Callable[[Any], Command]) -> Command:
    """Import a command's function, and return ``make(function)``.

    Raises:
        CommandError: there is no such command, several distributions have it, or the import or ``make`` fails.
    """
    owners = declared.get(name, {})
    if not owners:
        raise CommandError(_missing(name, declared))
    if len(owners) > 1:
        raise CommandError(f"{name!r} is a command of {' and of '.join(sorted(owners))}: uninstall all but one of them")
    ((owner, entry_point),) = owners.items()
    try:
        return make(entry_point.load())
    except BaseException as error:
        pass_interrupt(error)
        raise CommandError(
            f"attnops {name} is a command of {owner} that can't be used: {entry_point.value} raised "
            f"{type(error).__name__}: {printable(error)}; install {owner} again, or see python -c "
            f"'import {entry_point.module}'"
        ) from error


def _missing(name: str, declared: Declared) -> str:
    if name in HOMES:
        return f"attnops {name} is a command of {HOMES[name]}: pip install {HOMES[name]}"
    near = difflib.get_close_matches(name, {*declared, *HOMES})
    if not near:
        return f"there is no command {name!r}; there are {', '.join(declared)}"
    meant = [x if x in declared else f"{x} (pip install {HOMES[x]})" for x in near]
    return f"there is no command {name!r}; did you mean {' or '.join(meant)}?"
