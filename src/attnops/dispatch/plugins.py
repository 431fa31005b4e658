"""Distributions with operations: found by entry points, loaded on demand, isolated from each other, and reported."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import threading
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NamedTuple

from attnops.errors import pass_interrupt, printable

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint
    from importlib_metadata._meta import IDistribution

    from attnops.dispatch.operation import BaseOperation

GROUP: Final = "attnops.operations"
COMMANDS: Final = "attnops.commands"  # of the command line: see `attnops_cli.commands`
SOURCES: Final = "attnops.sources"  # see `attnops_cli.sources`
CORE: Final = "attnops"

NO_AUTOLOAD: Final = "ATTNOPS_NO_AUTOLOAD is set"

# The distribution whose entry point is being imported, and the entry's top-level package. A class of that package that
# registers itself during the import belongs to the distribution; a class of another package does not.
_loading: ContextVar[tuple[str, str]] = ContextVar("attnops_loading", default=("", ""))


class State(enum.StrEnum):
    """The state of a plugin."""

    DISCOVERED = "discovered"  # installed, not imported yet
    LOADED = "loaded"
    DISABLED = "disabled"  # by ATTNOPS_DISABLE or ATTNOPS_NO_AUTOLOAD
    INCOMPATIBLE = "incompatible"  # its api_version, or a requirement that is not met
    FAILED = "failed"  # its import raised, or its target is not an operation


class Trouble(NamedTuple):
    """A problem of the installation that is not the state of a plugin.

    Attributes:
        what: the problem, as a sentence.
        remedy: what to do about it.
    """

    what: str
    remedy: str


@dataclasses.dataclass(eq=False)
class Plugin:
    """One operation of one distribution.

    Attributes:
        distribution: the distribution's name, normalised: ``attnops-tpu``.
        version: the distribution's version; empty for a class registered by hand in a module without one.
        operation: the operation's name.
        target: ``module:class``.
        state: discovered, loaded, disabled, incompatible or failed.
        cause: why it is disabled, incompatible or failed, in a sentence.
        error: the exception that its import raised, with its traceback.
        operation_class: the class, once loaded.
        overrides: whether it was registered by hand to replace its distribution's other classes of this name.
    """

    distribution: str
    version: str
    operation: str
    target: str
    state: State = State.DISCOVERED
    cause: str = ""
    error: BaseException | None = None
    operation_class: type[BaseOperation] | None = None
    overrides: bool = False
    _entry_point: EntryPoint | None = dataclasses.field(default=None, repr=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        """The canonical name, ``distribution:operation``, which always selects this one."""
        return f"{self.distribution}:{self.operation}"

    @property
    def traceback(self) -> str:
        """The traceback of `error`; empty if there is none."""
        return "".join(traceback.format_exception(self.error)) if self.error else ""

    def load(self) -> type[BaseOperation] | None:
        """Import the class, once. If that fails, `state`, `cause` and `error` say why, and the result is None.

        Passes on no exception but `KeyboardInterrupt`.
        """
        if self.state is not State.DISCOVERED or self._entry_point is None:
            return self.operation_class
        # No lock is held while importing: another thread may be importing a module that registers itself. If two
        # threads import at once, Python makes one of them wait, and the first to finish sets the state.
        outcome = self._import(self._entry_point)
        with self._lock:
            if self.state is State.DISCOVERED:
                self.operation_class, self.cause, self.error, self.state = outcome
        return self.operation_class

    def _import(self, entry_point: EntryPoint) -> tuple[type[BaseOperation] | None, str, BaseException | None, State]:
        token = _loading.set((self.distribution, _package(self.target)))
        try:
            loaded = entry_point.load()
        except BaseException as error:
            pass_interrupt(error)
            return (
                None,
                f"importing {self.target} raised {type(error).__name__}: {printable(error)}",
                error,
                State.FAILED,
            )
        finally:
            _loading.reset(token)
        from attnops.dispatch.classes import check_class

        wrong_kind, wrong_version = check_class(loaded)
        if wrong_kind:
            return None, f"{self.target} {wrong_kind}", None, State.FAILED
        if wrong_version:
            return None, f"{self.target} {wrong_version}", None, State.INCOMPATIBLE
        return loaded, "", None, State.LOADED


def discover() -> tuple[list[Plugin], list[Trouble]]:
    """All operations of installed distributions, sorted by name, and problems of the installation.

    Imports none of them.
    """
    import importlib_metadata

    groups: dict[str, list[Plugin]] = {}
    troubles = []
    for distribution in importlib_metadata.distributions():
        try:
            # Checked before parsing: problems of distributions without operations are not reported.
            text = distribution.read_text("entry_points.txt") or ""
            if CORE not in text:
                continue
            troubles += [
                Trouble(
                    f"{distribution.name} has the entry-point group {group}, so its operations or commands are missing",
                    f"its author must call the group [{GROUP}] or [{COMMANDS}]",
                )
                for group in _misspelt_groups(text)
            ]
            if GROUP not in text:
                continue
            name = normalize(distribution.metadata["Name"])
            offered = _offered(name, distribution)
            if is_imported(name, distribution):
                groups.setdefault(name, offered)
        except Exception as error:  # broken metadata must not hide the other distributions
            what = f"the metadata of {_where(distribution)} can't be read, so its operations are missing: "
            troubles.append(Trouble(what + printable(error), "pip uninstall it and install it again"))
    plugins = sorted((plugin for offered in groups.values() for plugin in offered), key=lambda plugin: plugin.name)
    return plugins, troubles + _unmatched_disables(plugins)


def is_imported(name: str, distribution: IDistribution) -> bool:
    """Whether Python imports this distribution, if folders of sys.path hold several of the same name."""
    import importlib_metadata

    return bool(importlib_metadata.distribution(name).locate_file("") == distribution.locate_file(""))


def _where(distribution: object) -> str:
    return str(getattr(distribution, "_path", distribution))


def _misspelt_groups(text: str) -> list[str]:
    """The headings of entry-point groups that resemble attnops' groups, but are not among them."""
    groups = (f"[{GROUP}]", f"[{COMMANDS}]", f"[{SOURCES}]")
    headings = [line.strip() for line in text.splitlines() if CORE in line and "=" not in line]
    # An entry without "=" is another error; "#" begins a comment.
    return [x for x in headings if "[" in x.partition(CORE)[0] and not x.startswith("#") and x not in groups]


def _unmatched_disables(plugins: list[Plugin]) -> list[Trouble]:
    """A problem for each item of ATTNOPS_DISABLE that is not installed."""
    troubles = []
    for item in _disabled():
        if any(_matches(item, plugin) for plugin in plugins):
            continue
        names = [plugin.name for plugin in plugins if plugin.operation == item.rpartition(":")[2]]
        distributions = sorted({plugin.distribution for plugin in plugins})
        what = f"ATTNOPS_DISABLE names {item!r}, which is not an installed distribution with operations"
        todo = f"write distribution:operation, {' or '.join(names)}" if names else f"installed are {distributions}"
        troubles.append(Trouble(what, todo))
    return troubles


def _offered(name: str, distribution: IDistribution) -> list[Plugin]:
    unmet = unmet_requirements(distribution.requires or ())
    offered = []
    for entry_point in distribution.entry_points.select(group=GROUP):
        plugin = Plugin(name, distribution.version, entry_point.name, entry_point.value, _entry_point=entry_point)
        if cause := check_name(entry_point.name):
            plugin.state, plugin.cause = State.FAILED, f"its entry point's name {cause}"
        elif cause := _disabled_by(plugin):
            plugin.state, plugin.cause = State.DISABLED, cause
        elif unmet:
            plugin.state, plugin.cause = State.INCOMPATIBLE, "; ".join(unmet)
        offered.append(plugin)
    return offered


def normalize(distribution: str) -> str:
    """A distribution's name as PyPI compares it: lower case, runs of ``-``, ``_`` and ``.`` become ``-``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distribution_of(cls: type) -> str:
    """The distribution that a class belongs to: the one being loaded, else named like its top-level package."""
    distribution, package = _loading.get()
    return distribution if _package(cls.__module__) == package else normalize(_package(cls.__module__)).strip("-")


def is_loading() -> bool:
    """Whether this is called while a plugin is being imported."""
    return bool(_loading.get()[0])


def _package(target: str) -> str:
    """The top-level package of a module or a target ``module:class``."""
    return re.split("[.:]", target.strip(), maxsplit=1)[0]


def check_name(name: object) -> str:
    """Why a name can't be an operation's; empty for a valid name."""
    if isinstance(name, str) and re.fullmatch(r"[^\s:,]+", name):
        return ""
    return f"is {name!r}, but must be a string of at least one character, with no ':', ',' or white space"


def _disabled() -> list[str]:
    items = (item.strip() for item in os.environ.get("ATTNOPS_DISABLE", "").split(","))
    return [item for item in items if item]


def _matches(item: str, plugin: Plugin) -> bool:
    distribution, _, operation = item.partition(":")
    return normalize(distribution) == plugin.distribution and operation in ("", plugin.operation)


def _disabled_by(plugin: Plugin) -> str:
    for item in _disabled():
        if _matches(item, plugin):
            return f"ATTNOPS_DISABLE names {item}"
    if plugin.distribution != CORE and os.environ.get("ATTNOPS_NO_AUTOLOAD", "") not in ("", "0"):
        return NO_AUTOLOAD
    return ""


def unmet_requirements(requires: Iterable[str]) -> list[str]:
    """Messages for the requirements, in the syntax of PEP 508, that the installed distributions do not meet."""
    import importlib_metadata
    from packaging.requirements import InvalidRequirement, Requirement

    unmet = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            unmet.append(f"requires {text!r}, which is not a valid requirement: {error}")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        # Without the marker, which is true here and contains quotes.
        wanted = text.partition(";")[0].strip()
        try:
            installed = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            unmet.append(f"requires {wanted}, which is not installed; pip install '{wanted}'")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"requires {wanted}, but {installed} is installed; pip install '{wanted}'")
    return unmet
