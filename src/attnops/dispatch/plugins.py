"""Distributions that offer operations: found through entry points, loaded one by one, kept apart and reported."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from attnops.errors import PluginWarning

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

    from attnops.dispatch.operation import BaseOperation

GROUP: Final = "attnops.operations"
CORE: Final = "attnops"

NO_AUTOLOAD: Final = "ATTNOPS_NO_AUTOLOAD is set"

# The distribution whose entry point is being imported and that entry's top-level package, so that a class of the
# package that registers itself meanwhile is the distribution's; one of another package that it imports is not.
_loading: ContextVar[tuple[str, str]] = ContextVar("attnops_loading", default=("", ""))


class State(enum.StrEnum):
    """What is known of a plugin."""

    DISCOVERED = "discovered"  # installed, not imported yet
    LOADED = "loaded"
    DISABLED = "disabled"  # by ATTNOPS_DISABLE or ATTNOPS_NO_AUTOLOAD
    INCOMPATIBLE = "incompatible"  # by its api_version, or by what it requires
    FAILED = "failed"  # its import raised, or gave no operation


@dataclasses.dataclass(eq=False)
class Plugin:
    """One operation that one distribution offers.

    Attributes:
        distribution: the distribution's name, normalised: ``attnops-tpu``.
        version: the distribution's version; empty for a class registered by hand in a module without one.
        operation: the operation's name.
        target: ``module:class``.
        state: see `State`.
        cause: why it is disabled, incompatible or failed, in a sentence.
        error: what its import raised, traceback and all.
        operation_class: the class, once loaded.
        overrides: it was registered by hand to stand for whatever else its distribution has under this name.
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
        """The traceback of `error`; empty where there is none."""
        return "".join(traceback.format_exception(self.error)) if self.error else ""

    def load(self) -> type[BaseOperation] | None:
        """Import the class, once; None, with `state`, `cause` and `error` set, where that can't be done.

        Never raises but for `KeyboardInterrupt` and `SystemExit` of the user's own making.
        """
        if self.state is not State.DISCOVERED or self._entry_point is None:
            return self.operation_class
        # No lock is held while importing: another thread may be importing a module that registers itself. Should two
        # threads import at once, Python makes one of them wait, and the first to be done here settles the state.
        outcome = self._import(self._entry_point)
        with self._lock:
            if self.state is State.DISCOVERED:
                self.operation_class, self.cause, self.error, self.state = outcome
        return self.operation_class

    def _import(self, entry_point: EntryPoint) -> tuple[type[BaseOperation] | None, str, BaseException | None, State]:
        token = _loading.set((self.distribution, _package(self.target)))
        try:
            loaded = entry_point.load()
        except (Exception, SystemExit) as error:  # a plugin that exits on import must not end the program
            return None, f"importing {self.target} raised {type(error).__name__}: {error}", error, State.FAILED
        finally:
            _loading.reset(token)
        wrong_kind, wrong_version = check_class(loaded)
        if wrong_kind:
            return None, f"{self.target} {wrong_kind}", None, State.FAILED
        if wrong_version:
            return None, f"{self.target} {wrong_version}", None, State.INCOMPATIBLE
        return loaded, "", None, State.LOADED


def check_class(loaded: Any) -> tuple[str, str]:
    """What is wrong with a class as an operation: (its kind, its api_version); empty where nothing is."""
    from attnops.dispatch.limits import Limits
    from attnops.dispatch.operation import API_VERSION, BaseOperation, has_forward
    from attnops.dispatch.platforms import FORWARD_CHAIN

    if not (isinstance(loaded, type) and issubclass(loaded, BaseOperation)):
        return "is not a subclass of attnops.BaseOperation", ""
    if loaded.__abstractmethods__:
        return f"does not implement {', '.join(sorted(loaded.__abstractmethods__))}", ""
    if not isinstance(loaded.api_version, int):
        return f"has api_version={loaded.api_version!r}, which must be an int", ""
    if loaded.api_version != API_VERSION:
        newer = loaded.api_version > API_VERSION
        todo = "upgrade attnops" if newer else "upgrade the plugin"
        return "", f"has api_version={loaded.api_version}, but this attnops has api_version={API_VERSION}; {todo}"
    # What would be ignored, or break others than itself when it is compared with them.
    if isinstance(loaded.priority, bool) or not isinstance(loaded.priority, int):
        return f"has priority={loaded.priority!r}, which must be an int", ""
    if not isinstance(loaded.limits, Mapping):
        return f"has limits={loaded.limits!r}, which must map forwards to attnops.Limits", ""
    forwards = set().union(*FORWARD_CHAIN.values())
    for forward, limits in loaded.limits.items():
        if forward not in forwards:
            return f"has limits for {forward!r}, which is no forward; use one of {sorted(forwards)}", ""
        if not isinstance(limits, Limits):
            return f"has limits[{forward!r}]={limits!r}, which must be an attnops.Limits", ""
        if not has_forward(loaded, forward):
            return f"has limits for {forward!r}, but does not override forward_{forward}, so they would never count", ""
    return "", ""


def discover() -> list[Plugin]:
    """Every operation that an installed distribution offers, in order of name. Imports none of them."""
    import importlib_metadata

    found: dict[str, list[Plugin]] = {}
    for distribution in importlib_metadata.distributions():
        try:
            # Asked before anything is parsed: what is wrong with a distribution that offers none is not our business.
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = normalize(distribution.metadata["Name"])
            offered = _offered(name, distribution)
        except Exception as error:  # broken metadata must not hide the other distributions
            message = f"the metadata of {distribution} can't be read, so its operations are missing: {error}"
            warnings.warn(message, PluginWarning, stacklevel=2)
            continue
        # Of two folders of sys.path that have a distribution, Python imports the first one's, whatever it offers.
        if importlib_metadata.distribution(name).locate_file("") == distribution.locate_file(""):
            found.setdefault(name, offered)
    return sorted((plugin for offered in found.values() for plugin in offered), key=lambda plugin: plugin.name)


def _offered(name: str, distribution: Any) -> list[Plugin]:
    unmet = unmet_requirements(distribution.requires or ())
    offered = []
    for entry_point in distribution.entry_points.select(group=GROUP):
        plugin = Plugin(name, distribution.version, entry_point.name, entry_point.value, _entry_point=entry_point)
        if cause := _disabled_by(plugin):
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


def _package(target: str) -> str:
    """The top-level package of a module or a target ``module:class``."""
    return re.split("[.:]", target.strip(), maxsplit=1)[0]


def _disabled_by(plugin: Plugin) -> str:
    for item in os.environ.get("ATTNOPS_DISABLE", "").split(","):
        distribution, _, operation = item.strip().partition(":")
        if distribution and normalize(distribution) == plugin.distribution and operation in ("", plugin.operation):
            return f"ATTNOPS_DISABLE names {item.strip()}"
    if plugin.distribution != CORE and os.environ.get("ATTNOPS_NO_AUTOLOAD", "") not in ("", "0"):
        return NO_AUTOLOAD
    return ""


def unmet_requirements(requires: Iterable[str]) -> list[str]:
    """The requirements, of those written as PEP 508 says, that what is installed does not meet, in words."""
    import importlib_metadata

    parse = requirement_parser()
    unmet = []
    for text in requires:
        try:
            requirement = parse(text)
        except ValueError as error:  # packaging's InvalidRequirement
            unmet.append(f"requires {text!r}, which is no requirement: {error}")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        # The marker, which holds here, has quotes of its own.
        wanted = text.partition(";")[0].strip()
        try:
            installed = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            unmet.append(f"requires {wanted}, which is not installed; pip install '{wanted}'")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"requires {wanted}, but {installed} is installed; pip install '{wanted}'")
    return unmet


def requirement_parser() -> Any:
    """The ``Requirement`` class of the library `packaging`: itself, or the copy that pip carries.

    Without either, requirements are taken as met: `attnops doctor` says so.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
        except ImportError:
            return _Unchecked
    return Requirement


class _Unchecked:
    """Stands in for a requirement that no library is there to read: it never applies."""

    name = ""
    specifier: Any = None

    def __init__(self, text: str) -> None:
        self.marker = self

    def evaluate(self, environment: Any) -> bool:
        return False
