"""How `auto` picks: the implementations that could serve a request, in the order of their ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator

from attnops.dispatch import border
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION, BaseOperation
from attnops.dispatch.plugins import CORE, Plugin, State
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.dispatch.source import SourceUse
from attnops.errors import PluginError, Reason, UnsupportedError, pass_interrupt, printable


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
        source_use: how the forward uses the source of a request over one; None for arrays.
    """

    name: str
    forward: str
    reasons: tuple[Reason, ...] = ()
    problem: str = ""
    rank: Rank | RankBetween | None = None
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

        This is the rank of the forward for the platform, which may not be the one that runs.
        """
        return "no rank: auto never picks it" if self.rank is None else str(self.rank)


def pick(request: AttentionRequest, metadata: OperationMetadata) -> Candidate:
    """The implementation that `auto` runs: of all that serve the request, the first in `order`.

    Raises:
        UnsupportedError: nothing can serve the request, with the reasons of all.
    """
    candidates = list(all_candidates(request, metadata))
    able = [c for c in candidates if c.serves and c.rank is not None]
    if not able:
        reasons = [dataclasses.replace(r, argument=f"{c.name}: {r.argument}") for c in candidates for r in c.reasons]
        problems = [f"{c.name} is {c.problem}" for c in candidates if c.problem]
        listed = "".join(f"\n  - {reason}" for reason in [*reasons, *problems])
        raise UnsupportedError(f"no installed implementation serves {request}:{listed}", reasons)
    return min(able, key=order)


def order(candidate: Candidate) -> tuple[bool, float, bool, int, str]:
    place = len(Rank) + 1 if candidate.rank is None else candidate.rank.place
    # The core's class comes before classes that inherit its native forward.
    return not candidate.serves, place, candidate.inherits, -candidate.priority, candidate.name


def all_candidates(request: Request, metadata: OperationMetadata) -> Iterator[Candidate]:
    for plugin, cls in _considered(request.computes):
        if cls is not None:
            yield ask(plugin, cls, request, metadata)
        elif plugin.state is not State.DISCOVERED:
            yield Candidate(plugin.name, "", problem=f"{plugin.state}: {plugin.cause}")


def _considered(computes: str | None = ATTENTION) -> Iterator[tuple[Plugin, type[BaseOperation] | None]]:
    """The plugins whose class computes a contract, each class once; None for a plugin without a class."""
    seen = set()
    for plugin in OperationRegistry.plugins(load=True):
        cls = plugin.operation_class
        if cls is None:
            yield plugin, None
        elif cls.computes == computes and plugin.operation != "auto":
            if cls not in seen:
                yield plugin, cls
            seen.add(cls)


def environment_keys(metadata: OperationMetadata, generation: int) -> tuple[Hashable, ...]:
    """What `pick` depends on in addition to request, metadata and installed plugins, as a part of a cache's key.

    Args:
        metadata: the metadata of `auto`.
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
    """The operations that `auto` considers, except those that can't be made, which `pick` reports."""
    operations = []
    for _, cls in _considered():
        if cls is not None:
            try:
                operations.append(border.make(cls, metadata))
            except BaseException as error:
                pass_interrupt(error)
    return tuple(operations)


def ask(plugin: Plugin, cls: type[BaseOperation], request: Request, metadata: OperationMetadata) -> Candidate:
    try:
        return _candidate(plugin, cls, request, metadata)
    except PluginError as error:
        return Candidate(plugin.name, "", problem=f"failed: {error}")
    except BaseException as error:  # a class that raises must not keep the others from serving
        pass_interrupt(error)
        problem = f"failed: asking whether it serves raised {type(error).__name__}: {printable(error)}"
        return Candidate(plugin.name, "", problem=problem)


def _candidate(plugin: Plugin, cls: type[BaseOperation], request: Request, metadata: OperationMetadata) -> Candidate:
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
    rank = border.rank(cls, request) if issubclass(cls, OperationImpl) else None
    if isinstance(request, AttentionRequest) and request.source is not None and forward:
        assert isinstance(operation, OperationImpl)
        use = request.source.use(operation, forward, request)
    return Candidate(
        plugin.name, forward, tuple(reasons), rank=rank, priority=cls.priority,
        details=() if reasons else border.details(operation, request), source_use=use,
    )  # fmt: skip
