"""Which implementation would run a request, and why not the others."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp

from attnops.dispatch import border
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.plugins import Plugin
from attnops.dispatch.ranking import Candidate, all_candidates, ask, order, pick
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import PluginError, PluginWarning, Reason, UnsupportedError, pass_interrupt, printable
from attnops.sharding.call import AttentionShardings


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
    candidates = {candidate.name: candidate for candidate in all_candidates(request, metadata)}
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
            candidates[name] = ask(plugin, cls, request, metadata)
    chosen = candidates.pop(name)
    if not chosen.forward:
        problem = f": {chosen.problem}" if chosen.problem else ""
        raise UnsupportedError(f"{name} can't serve {request}{problem}", chosen.reasons)
    specs = _shardings(request, metadata) if shardings else None
    return Explanation(request, chosen, tuple(sorted(candidates.values(), key=order)), specs)


def _shardings(request: AttentionRequest, metadata: OperationMetadata) -> AttentionShardings:
    B, T, S, K = request.batch, request.query_length, request.key_length, request.kv_heads
    shapes = (B, T, request.heads, request.head_dim), (B, S, K, request.head_dim), (B, S, K, request.value_head_dim)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return metadata.replace(layout="BTHD").get_shardings(*arrays, mode=request.mode)


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


def find_chosen(platform: str) -> str:
    """What `auto` runs on a platform for plain attention of 4,096 tokens in bfloat16, D 128, by name and forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        try:
            chosen = explain(_long_request(platform)).chosen
        except (ValueError, PluginError) as error:
            return f"nothing: {error}"
    return f"{chosen.name} (forward_{chosen.forward})"


def find_details(plugin: Plugin, platform: str) -> tuple[str, ...]:
    """How a loaded class serves the call of `find_chosen`."""
    cls = plugin.operation_class
    if cls is None or not issubclass(cls, OperationImpl):
        return ()
    request = _long_request(platform)
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


def _long_request(platform: str) -> AttentionRequest:
    return _small_request(platform).replace(query_length=4096, key_length=4096, head_dim=128, value_head_dim=128)


def _small_request(platform: str) -> AttentionRequest:
    return AttentionRequest(
        platform=platform, batch=1, query_length=128, key_length=128, heads=2, kv_heads=2, head_dim=64,
        value_head_dim=64, dtypes=("bfloat16",) * 3,
    )  # fmt: skip
