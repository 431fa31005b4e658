"""Which implementation would run a request, and why not the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator

import jax
import jax.numpy as jnp

from attnops.dispatch import border
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION, BaseOperation, forward_for
from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.plugins import CORE, Plugin, State
from attnops.dispatch.ranking import Rank
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.dispatch.source import SourceUse
from attnops.errors import PluginError, Reason, UnsupportedError, pass_interrupt, printable
from attnops.sharding.call import AttentionShardings


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation and how it would serve a request.

    Attributes:
        name: its canonical name, ``distribution:operation``.
        forward: the forward that would run, such as ``"cuda"`` or ``"native"``; empty where none can.
        reasons: why the forward for the request's platform can't serve it; empty where it can.
        problem: why the implementation can't be used at all; empty where it can.
        rank: its place in `auto`'s order; None where `auto` never picks it.
        priority: decides between implementations of equal rank.
        details: how the forward serves the request, see `attnops.BaseOperation.details`; empty with reasons.
        source_use: of a request over a source, how the forward uses it; None for arrays.
    """

    name: str
    forward: str
    reasons: tuple[Reason, ...] = ()
    problem: str = ""
    rank: Rank | None = None
    priority: int = 0
    details: tuple[str, ...] = ()
    source_use: SourceUse | None = None

    @property
    def serves(self) -> bool:
        """Whether it runs the request on the forward meant for the platform."""
        return not self.reasons and not self.problem

    @property
    def inherits(self) -> bool:
        """Whether it runs the core's native forward, which a plugin's class has for platforms without its kernels."""
        return self.forward == "native" and self.name.partition(":")[0] != CORE

    @property
    def ranked(self) -> str:
        """Its rank and the reason for it, such as ``"rank 3 of 10: the vendor's fused kernel"``.

        It is that of the forward for the platform, which may not be the one that runs.
        """
        return "no rank: auto never picks it" if self.rank is None else str(self.rank)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run a request, and every other implementation with its reasons.

    Attributes:
        request: the request.
        chosen: what would run.
        others: all other implementations that declare that they compute attention, in `auto`'s order.
        shardings: the partition specs that the axis rules give the call, if asked for.
    """

    request: AttentionRequest
    chosen: Candidate
    others: tuple[Candidate, ...]
    shardings: AttentionShardings | None = None

    def __str__(self) -> str:
        lines = [f"{self.request}", f"runs {self.chosen.name} (forward_{self.chosen.forward})"]
        lines += [f"  although {reason}" for reason in self.chosen.reasons]
        lines += [f"  {self.chosen.ranked}"] if self.chosen.serves else []
        lines += [f"  {line}" for line in self.chosen.details]
        lines += [] if self.shardings is None else [f"  {self.shardings}"]
        if (use := self.chosen.source_use) is not None:
            lines += [f"  {use.reads}", f"  {use.steps}"]
        for other in self.others:
            if other.serves and other.inherits:
                lines.append(f"{other.name}: has no kernel for {self.request.platform}, and could run forward_native")
                continue
            lines.append(f"{other.name}: " + ("could serve it" if other.serves else "can't serve it"))
            lines += [f"  {other.ranked}"] if other.serves else []
            lines += [f"  {other.source_use.reads}"] if other.serves and other.source_use is not None else []
            lines += [f"  - {reason}" for reason in ([other.problem] if other.problem else other.reasons)]
        return "\n".join(lines)


def explain(
    request: AttentionRequest,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
    *,
    shardings: bool = False,
) -> Explanation:
    """What ``OperationRegistry.create(operation, metadata)`` would run for a request, and why not the others.

    Loads every distribution that has an operation; traces nothing. Only classes with ``computes = "attention"`` are
    considered: the core's operations, their subclasses and classes that declare it; others can be given by name.

    Args:
        request: from an operation's ``request(query, key, value, ...)``, or made by hand.
        operation: the name given to `OperationRegistry.create`.
        metadata: its metadata; the request's platform replaces its own.
        shardings: whether to give the partition specs of the call too, on the metadata's mesh or the current one.

    Raises:
        UnsupportedError: nothing can serve the request.
        ValueError, PluginError: see `OperationRegistry.get`.
    """
    metadata = (OperationMetadata() if metadata is None else metadata).replace(platform=request.platform)
    candidates = {candidate.name: candidate for candidate in _candidates(request, metadata)}
    cls = OperationRegistry.get(operation, request.platform)
    if operation.rpartition(":")[2] == "auto":
        name = pick(request, metadata).name
    else:
        if not issubclass(cls, OperationImpl):
            raise ValueError(
                f"operation={operation!r} is not attention of query, key and value, so it has no such request; "
                f"ask {cls.__name__}(metadata).reasons(request)"
            )
        plugins = [p for p in OperationRegistry.plugins() if p.operation_class is cls]
        plugin = next((p for p in plugins if p.name in candidates), plugins[0])
        name = plugin.name
        if name not in candidates:
            candidates[name] = _ask(plugin, cls, request, metadata)
    chosen = candidates.pop(name)
    if not chosen.forward:
        problem = f": {chosen.problem}" if chosen.problem else ""
        raise UnsupportedError(f"{name} can't serve {request}{problem}", chosen.reasons)
    specs = _shardings(request, metadata) if shardings else None
    return Explanation(request, chosen, tuple(sorted(candidates.values(), key=_order)), specs)


def _shardings(request: AttentionRequest, metadata: OperationMetadata) -> AttentionShardings:
    B, T, S, K = request.batch, request.query_length, request.key_length, request.kv_heads
    shapes = (B, T, request.heads, request.head_dim), (B, S, K, request.head_dim), (B, S, K, request.value_head_dim)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return metadata.replace(layout="BTHD").get_shardings(*arrays, mode=request.mode)


def pick(request: AttentionRequest, metadata: OperationMetadata) -> Candidate:
    """The implementation that `auto` runs: of those that serve the request, the first, see `attnops.dispatch.ranking`.

    Raises:
        UnsupportedError: nothing can serve the request, with the reasons of all.
    """
    candidates = list(_candidates(request, metadata))
    able = [c for c in candidates if c.serves and c.rank is not None]
    if not able:
        reasons = [dataclasses.replace(r, argument=f"{c.name}: {r.argument}") for c in candidates for r in c.reasons]
        problems = [f"{c.name} is {c.problem}" for c in candidates if c.problem]
        listed = "".join(f"\n  - {reason}" for reason in [*reasons, *problems])
        raise UnsupportedError(f"no installed implementation serves {request}:{listed}", reasons)
    return min(able, key=_order)


def _order(candidate: Candidate) -> tuple[bool, int, bool, int, str]:
    place = len(Rank) + 1 if candidate.rank is None else candidate.rank.place
    # The core's class comes before those that inherit its native forward.
    return not candidate.serves, place, candidate.inherits, -candidate.priority, candidate.name


def _candidates(request: AttentionRequest, metadata: OperationMetadata) -> Iterator[Candidate]:
    for plugin, cls in _considered():
        if cls is not None:
            yield _ask(plugin, cls, request, metadata)
        elif plugin.state is not State.DISCOVERED:
            yield Candidate(plugin.name, "", problem=f"{plugin.state}: {plugin.cause}")


def _considered() -> Iterator[tuple[Plugin, type[OperationImpl] | None]]:
    """The plugins that `auto` considers, each class once; None for one that has no class."""
    seen = set()
    for plugin in OperationRegistry.plugins(load=True):
        cls = plugin.operation_class
        if cls is None:
            yield plugin, None
        elif issubclass(cls, OperationImpl) and cls.computes == ATTENTION and plugin.operation != "auto":
            if cls not in seen:
                yield plugin, cls
            seen.add(cls)


def environment_keys(metadata: OperationMetadata, generation: int) -> tuple[Hashable, ...]:
    """What `pick` depends on in addition to request, metadata and installed plugins, as a part of a cache's key.

    Args:
        metadata: of `auto`.
        generation: `OperationRegistry.generation`.
    """
    return tuple(map(_environment_key, _operations(metadata, generation)))


def _environment_key(operation: BaseOperation) -> Hashable:
    try:
        return border.environment_key(operation)
    except PluginError as error:
        return f"failed: {error}"


@functools.lru_cache(maxsize=256)
def _operations(metadata: OperationMetadata, generation: int) -> tuple[BaseOperation, ...]:
    """The operations that `auto` considers, those left out that can't be made: `pick` reports them."""
    found = []
    for _, cls in _considered():
        if cls is not None:
            try:
                found.append(border.make(cls, metadata))
            except BaseException as error:
                pass_interrupt(error)
    return tuple(found)


def _ask(plugin: Plugin, cls: type[OperationImpl], request: AttentionRequest, metadata: OperationMetadata) -> Candidate:
    try:
        return _candidate(plugin, cls, request, metadata)
    except PluginError as error:
        return Candidate(plugin.name, "", problem=f"failed: {error}")
    except BaseException as error:  # a class that raises must not keep the others from serving
        pass_interrupt(error)
        problem = f"failed: asking whether it serves raised {type(error).__name__}: {printable(error)}"
        return Candidate(plugin.name, "", problem=problem)


def find_faults(plugin: Plugin) -> list[str]:
    """Faults of a loaded class's methods, called with a small request on each platform; runs no forward."""
    cls = plugin.operation_class
    faults: dict[str, None] = {}
    for platform in PLATFORMS:
        try:
            if cls is not None:
                _ask_all(cls, platform)
        except PluginError as error:
            faults[str(error)] = None
        except BaseException as error:
            pass_interrupt(error)
            faults[f"asking it raised {type(error).__name__}: {printable(error)}"] = None
    return list(faults)


def find_reasons(plugin: Plugin, platform: str) -> list[Reason]:
    """Why a loaded class can't serve plain attention in bfloat16 on a platform of this machine."""
    cls = plugin.operation_class
    if cls is None or not issubclass(cls, OperationImpl):
        return []
    try:
        return border.make(cls, OperationMetadata(platform=platform)).reasons(_small_request(platform))
    except BaseException as error:  # `find_faults` has it
        pass_interrupt(error)
        return []


def find_details(plugin: Plugin, platform: str) -> tuple[str, ...]:
    """How a loaded class serves plain attention of 4,096 tokens in bfloat16, D 128, on a platform of this machine."""
    cls = plugin.operation_class
    if cls is None or not issubclass(cls, OperationImpl):
        return ()
    request = _small_request(platform).replace(query_length=4096, key_length=4096, head_dim=128, value_head_dim=128)
    try:
        operation = border.make(cls, OperationMetadata(platform=platform))
        return () if operation.reasons(request) else border.details(operation, request)
    except BaseException as error:  # `find_faults` has it
        pass_interrupt(error)
        return ()


def _ask_all(cls: type[BaseOperation], platform: str) -> None:
    try:
        operation = border.make(cls, OperationMetadata(platform=platform))
    except (ValueError, UnsupportedError):
        return  # a class may refuse the metadata
    if not issubclass(cls, OperationImpl):
        operation.reasons(Request(platform=platform))
    else:
        request = _small_request(platform)
        border.rank(cls, request)
        if not operation.reasons(request):
            border.details(operation, request)
    border.environment_key(operation)


def _small_request(platform: str) -> AttentionRequest:
    return AttentionRequest(
        platform=platform, batch=1, query_length=128, key_length=128, heads=2, kv_heads=2, head_dim=64,
        value_head_dim=64, dtypes=("bfloat16",) * 3,
    )  # fmt: skip


def _candidate(
    plugin: Plugin, cls: type[OperationImpl], request: AttentionRequest, metadata: OperationMetadata
) -> Candidate:
    operation = border.make(cls, metadata)
    border.environment_key(operation)
    forward = forward_for(cls, request.platform)
    reasons = operation.reasons(request)
    if reasons:
        native = (
            forward != "native" and metadata.on_unsupported == "native" and not operation.reasons_for("native", request)
        )
        forward = "native" if native else ""
    use = None
    if request.source is not None and forward:
        assert isinstance(operation, OperationImpl)
        use = request.source.use(operation, forward, request)
    return Candidate(
        plugin.name, forward, tuple(reasons), rank=border.rank(cls, request), priority=cls.priority,
        details=() if reasons else border.details(operation, request), source_use=use,
    )  # fmt: skip
