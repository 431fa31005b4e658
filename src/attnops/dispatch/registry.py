"""OperationRegistry: the class that serves an operation on a platform, by name."""

from __future__ import annotations

import difflib
import threading
import warnings
from collections.abc import Callable
from typing import Final, TypeVar, overload

from attnops.dispatch import border, plugins
from attnops.dispatch.classes import check_class, names_of
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops.dispatch.platforms import PLATFORMS, find_platform
from attnops.dispatch.plugins import CORE, Plugin, State, Trouble
from attnops.errors import (
    AmbiguousOperationError,
    DuplicateOperationError,
    PluginError,
    PluginWarning,
    UnknownOperationError,
    printable,
)

OperationClass = TypeVar("OperationClass", bound=type[BaseOperation])

# Operations of distributions that may not be installed: what an unknown name's error says to install.
ELSEWHERE: Final = {"ring": "attnops-ring"}


class OperationRegistry:
    """Finds, registers and creates operations by name. All methods are thread-safe.

    A name is an operation's (``"flash"``), which selects the class that serves the platform, or canonical
    (``"attnops-tpu:flash"``), which selects that class on every platform.
    """

    _lock: threading.RLock = threading.RLock()
    _plugins: list[Plugin] | None = None
    _troubles: tuple[Trouble, ...] = ()
    _warned: set[str] = set()  # noqa: RUF012  (guarded by the lock)
    _registered: list[Plugin] = []  # noqa: RUF012  (by hand; guarded by the lock)
    _picked: dict[tuple[str, str], type[BaseOperation]] = {}  # noqa: RUF012  (guarded by the lock)
    _generation: int = 0

    @overload
    @classmethod
    def register(cls, impl_cls: OperationClass, *, override: bool = False) -> OperationClass: ...

    @overload
    @classmethod
    def register(cls, *, override: bool = False) -> Callable[[OperationClass], OperationClass]: ...

    @classmethod
    def register(
        cls, impl_cls: OperationClass | None = None, *, override: bool = False
    ) -> OperationClass | Callable[[OperationClass], OperationClass]:
        """Register an operation under the names that its ``get_impl_name`` returns. Usable as a decorator.

        Installed distributions don't need this: their entry points register their operations.

        Args:
            impl_cls: the class.
            override: replace a class that the same distribution registered for the same name.

        Raises:
            DuplicateOperationError: the class's distribution already has another class for the name and for a
                platform that both serve.
            TypeError: the class is not a complete `BaseOperation`, has another ``api_version``, or has a
                declaration that would be ignored. None of its names is registered then.
        """
        if impl_cls is None:
            return lambda decorated: cls.register(decorated, override=override)
        wrong = " ".join(check_class(impl_cls)).strip()
        if wrong:
            raise TypeError(f"{impl_cls} {wrong}")
        distribution = plugins.distribution_of(impl_cls)
        names = names_of(impl_cls)
        with cls._lock:
            before = cls._registered[:]
            try:
                for name in names:
                    cls._register(impl_cls, distribution, name, override)
            except BaseException:  # all of its names, or none
                cls._registered[:] = before
                raise
            cls._forget()
        return impl_cls

    @classmethod
    def _register(cls, impl_cls: type[BaseOperation], distribution: str, name: str, override: bool) -> None:
        target = f"{impl_cls.__module__}:{impl_cls.__qualname__}"
        for other in [p for p in cls._all() if (p.distribution, p.operation) == (distribution, name)]:
            if other.target == target and other not in cls._registered and other.cause != plugins.NO_AUTOLOAD:
                return  # its entry point registers it
            if other.operation_class is None or other.operation_class is impl_cls:
                continue
            shared = served_platforms(impl_cls) & served_platforms(other.operation_class)
            if not (override or other.target == target) and shared:
                raise DuplicateOperationError(
                    f"{distribution} already has {other.target} for {name!r}, and now registers {target} for the same "
                    f"platform; register with override=True to replace it, or use another name"
                )
        if override:
            cls._registered[:] = [p for p in cls._registered if (p.distribution, p.operation) != (distribution, name)]
        # A module that runs again, such as in a notebook, replaces its own classes.
        cls._registered[:] = [p for p in cls._registered if (p.target, p.operation) != (target, name)]
        by_hand = Plugin(distribution, "", name, target, State.LOADED, operation_class=impl_cls, overrides=override)
        cls._registered.append(by_hand)

    @classmethod
    def get(cls, impl_name: str, platform: str | None = None) -> type[BaseOperation]:
        """The class that serves an operation on a platform. Imports the distributions that have the operation.

        Args:
            impl_name: the operation's name, or a canonical name.
            platform: as in `OperationMetadata`; None for the platform that JAX runs on.

        Returns:
            The class with the highest ``priority`` among those with a forward of their own for the platform; without
            any, the core's class, or else the only one.

        Raises:
            UnknownOperationError: no distribution has the operation (a `ValueError`).
            AmbiguousOperationError: several serve it equally well (a `ValueError`).
            PluginError: all that have it are broken, incompatible or disabled; chained to the exception of an import.
            ValueError: the platform is unknown.
            TypeError: ``impl_name`` is not a string.
        """
        if not isinstance(impl_name, str):
            given = printable(impl_name)
            raise TypeError(f"impl_name={given} must be a string, the name of an operation such as 'flash' or 'auto'")
        platform = find_platform(platform, None, ())
        picked = cls._picked.get((impl_name, platform))
        if picked is not None:
            return picked
        generation = cls._generation
        named = cls._named(impl_name)
        usable = [plugin for plugin in named if plugin.load() is not None]
        unusable = [plugin for plugin in named if plugin.operation_class is None]
        if not usable:
            raise _plugin_error(impl_name, unusable)
        for plugin in unusable:
            if plugin.state is not State.DISABLED:
                warnings.warn(f"{plugin.name} can't be used: {plugin.cause}", PluginWarning, stacklevel=2)
        picked = _pick(impl_name, platform, usable)
        with cls._lock:
            if generation == cls._generation:  # nothing was registered or refreshed meanwhile
                cls._picked[impl_name, platform] = picked
        return picked

    @classmethod
    def create(cls, impl_name: str, metadata: OperationMetadata | None = None) -> BaseOperation:
        """Create an operation by name. Imports the distributions that have it; for ``"auto"`` all that have operations.

        Create operations outside of `jax.jit`: if a plugin's import creates a context of JAX other than
        an `attnops.kernels.TraceContext`, functions that were traced before, or are being traced, are traced and
        compiled again.

        Args:
            impl_name: the operation's name, or a canonical name.
            metadata: the operation's metadata. None: all defaults.

        Raises:
            UnknownOperationError, AmbiguousOperationError, PluginError: see `get`; or the class's ``__init__`` failed.
            TypeError: ``impl_name`` is not a string, or ``metadata`` not an `OperationMetadata`.
        """
        if metadata is not None and not isinstance(metadata, OperationMetadata):
            hint = "; write OperationMetadata(**metadata)" if isinstance(metadata, dict) else ""
            raise TypeError(f"metadata is a {type(metadata).__name__}, but must be an attnops.OperationMetadata{hint}")
        metadata = OperationMetadata() if metadata is None else metadata
        platform = metadata.platform or find_platform(None, metadata.mesh, ())
        return border.make(cls.get(impl_name, platform), metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """The names of all operations that are installed or registered, sorted. Imports none of them."""
        return sorted({plugin.operation for plugin in cls.plugins()})

    @classmethod
    def plugins(cls, load: bool = False) -> tuple[Plugin, ...]:
        """All plugins that are installed or registered, with their states.

        Args:
            load: whether to import each first, so that the state shows whether it works.
        """
        with cls._lock:
            every = tuple(cls._all())
        if load:
            for plugin in every:
                plugin.load()
        return every

    @classmethod
    def troubles(cls) -> tuple[Trouble, ...]:
        """Problems of the installation that are not the state of a plugin, such as unreadable metadata."""
        with cls._lock:
            cls._all()
            return cls._troubles

    @classmethod
    def refresh(cls) -> None:
        """Read installed distributions and environment variables again. Classes registered by hand are kept."""
        with cls._lock:
            cls._plugins = None
            cls._forget()

    @classmethod
    def generation(cls) -> int:
        """A number that changes whenever the class of a name may have changed; for cache keys."""
        return cls._generation

    @classmethod
    def _forget(cls) -> None:
        cls._picked.clear()
        cls._generation += 1
        from attnops.partition.program import forget_programs  # not at the top: only calls on meshes import it

        forget_programs()

    @classmethod
    def _all(cls) -> list[Plugin]:
        with cls._lock:
            if cls._plugins is None:
                cls._plugins, troubles = plugins.discover()
                cls._troubles = tuple(troubles)
                for what, remedy in troubles:
                    if what not in cls._warned:
                        cls._warned.add(what)
                        warnings.warn(f"{what}; {remedy}", PluginWarning, stacklevel=4)
            # An entry point that names a re-export has another target than the class that registers itself.
            loaded = {(plugin.name, plugin.operation_class) for plugin in cls._plugins}
            return cls._plugins + [p for p in cls._registered if (p.name, p.operation_class) not in loaded]

    @classmethod
    def _named(cls, impl_name: str) -> list[Plugin]:
        # A distribution's name has no ":"; the name of a faulty entry point may.
        distribution, colon, operation = impl_name.partition(":")
        if not colon:
            operation = impl_name
        named = [
            plugin
            for plugin in cls.plugins()
            if plugin.operation == operation and (not colon or distribution == plugin.distribution)
        ]
        if not named:
            raise _unknown(impl_name, operation, cls.plugins())
        # A class registered by hand with override=True hides the entry point of its own distribution.
        overriding = {plugin.name for plugin in named if plugin.overrides}
        return [plugin for plugin in named if plugin.overrides or plugin.name not in overriding]


def served_platforms(cls: type[BaseOperation], base: type[BaseOperation] | None = None) -> frozenset[str]:
    """The platforms for which ``cls`` has a forward that ``base`` does not have; {"native"} for none."""
    served = set()
    for platform in PLATFORMS:
        forward = forward_for(cls, platform)
        method = getattr(cls, f"forward_{forward}")
        if forward != "native" and (base is None or method is not getattr(base, f"forward_{forward}")):
            served.add(platform)
    return frozenset(served or {"native"})


def _pick(impl_name: str, platform: str, usable: list[Plugin]) -> type[BaseOperation]:
    # One plugin per class: a class may be both an entry point and registered by hand.
    classes = {plugin.operation_class: plugin for plugin in usable if plugin.operation_class is not None}
    core = next((cls for cls, plugin in classes.items() if plugin.distribution == CORE), None)
    # The class that each inherits from, which serves the platforms that it does not override.
    bases = {cls: next((base for base in cls.__mro__[1:] if base in classes), None) for cls in classes}
    serving = [cls for cls, base in bases.items() if platform in served_platforms(cls, base)]
    if not serving and core is not None:
        return core
    candidates = serving or [cls for cls, base in bases.items() if base is None]
    highest = max(cls.priority for cls in candidates)
    best = [cls for cls in candidates if cls.priority == highest]
    if len(best) > 1:
        plugins = [classes[cls] for cls in best]
        if len({plugin.name for plugin in plugins}) == 1:
            targets = " and ".join(plugin.target for plugin in plugins)
            raise DuplicateOperationError(
                f"{plugins[0].distribution} has {targets} for {plugins[0].operation!r} on {platform}; register one of "
                f"them with override=True, or under another name"
            )
        raise AmbiguousOperationError(
            f"{impl_name!r} on {platform} is served by {' and '.join(plugin.name for plugin in plugins)} with the same "
            f"priority={highest}; use one of these names, or disable one with ATTNOPS_DISABLE"
        )
    return best[0]


def _unknown(impl_name: str, operation: str, known: tuple[Plugin, ...]) -> UnknownOperationError:
    names = sorted({plugin.operation for plugin in known})
    message = f"impl_name={impl_name!r} is not an installed operation; installed are {names}"
    if operation in ELSEWHERE:
        message += f"; pip install {ELSEWHERE[operation]}"
    elif near := difflib.get_close_matches(impl_name, [*names, *(plugin.name for plugin in known)]):
        message += f"; did you mean {' or '.join(repr(name) for name in near)}?"
    else:
        message += "; run `attnops doctor` if an installed distribution should have it"
    return UnknownOperationError(message)


def _plugin_error(impl_name: str, unusable: list[Plugin]) -> PluginError:
    causes = "".join(f"\n  - {plugin.name} is {plugin.state}: {plugin.cause}" for plugin in unusable)
    error = PluginError(f"{impl_name!r} can't be used:{causes}")
    error.__cause__ = next((plugin.error for plugin in unusable if plugin.error), None)
    return error
