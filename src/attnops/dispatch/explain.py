"""Which implementation would run a request, and why not the others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.ranking import Candidate, all_candidates, ask, order, pick
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import UnsupportedError
from attnops.sharding.call import AttentionShardings


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run a request, and every other implementation with its reasons.

    Attributes:
        request: the request.
        chosen: what would run.
        others: all other implementations that declare that they compute the request's contract, in `auto`'s order.
        shardings: the partition specs that the axis rules give the call, if asked for.
    """

    request: Request
    chosen: Candidate
    others: tuple[Candidate, ...]
    shardings: AttentionShardings | None = None

    def __str__(self) -> str:
        lines = [f"{self.request}", f"runs {self.chosen.name} (forward_{self.chosen.forward})"]
        ranks = self.request.computes == ATTENTION
        lines += [f"  although {reason}" for reason in self.chosen.reasons]
        lines += [f"  {self.chosen.ranked}"] if self.chosen.serves and ranks else []
        lines += [f"  {line}" for line in self.chosen.details]
        lines += [] if self.shardings is None else [f"  {self.shardings}"]
        if (use := self.chosen.source_use) is not None:
            lines += [f"  {use.reads}", f"  {use.steps}"]
        for other in self.others:
            if other.serves and other.inherits:
                lines.append(f"{other.name}: has no kernel for {self.request.platform}, and could run forward_native")
                continue
            lines.append(f"{other.name}: " + ("could serve it" if other.serves else "can't serve it"))
            lines += [f"  {other.ranked}"] if other.serves and ranks else []
            lines += [f"  {other.source_use.reads}"] if other.serves and other.source_use is not None else []
            lines += [f"  - {reason}" for reason in ([other.problem] if other.problem else other.reasons)]
        return "\n".join(lines)


def explain(
    request: Request,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
    *,
    shardings: bool = False,
) -> Explanation:
    """What ``OperationRegistry.create(operation, metadata)`` would run for a request, and why not the others.

    Loads every distribution that has an operation; traces nothing. Only classes with ``computes = "attention"`` are
    considered: the core's operations, their subclasses and classes that declare it; others can be given by name. For
    a request of another contract, classes that compute this contract are considered, and ``operation`` must name one.

    Args:
        request: from an operation's ``request(query, key, value, ...)``, or made by hand.
        operation: the name given to `OperationRegistry.create`.
        metadata: the operation's metadata; the request's platform replaces the metadata's.
        shardings: whether to give the partition specs of the call too, on the metadata's mesh or the current one.

    Raises:
        UnsupportedError: nothing can serve the request.
        ValueError, PluginError: see `OperationRegistry.get`.
    """
    metadata = (OperationMetadata() if metadata is None else metadata).replace(platform=request.platform)
    candidates = {candidate.name: candidate for candidate in all_candidates(request, metadata)}
    cls = OperationRegistry.get(operation, request.platform)
    is_attention = isinstance(request, AttentionRequest)
    if not (issubclass(cls, OperationImpl) if is_attention else cls.computes == request.computes is not None):
        raise ValueError(
            f"operation={operation!r} has computes={cls.computes!r}, but the request is of {request.computes!r}: name "
            f"an operation of this, or ask {cls.__name__}(metadata).reasons(request)"
        )
    if isinstance(request, AttentionRequest) and operation.rpartition(":")[2] == "auto":
        name = pick(request, metadata).name
    else:
        plugins = [p for p in OperationRegistry.plugins() if p.operation_class is cls]
        plugin = next((p for p in plugins if p.name in candidates), plugins[0])
        name = plugin.name
        if name not in candidates:
            candidates[name] = ask(plugin, cls, request, metadata)
    chosen = candidates.pop(name)
    if not chosen.forward:
        problem = f": {chosen.problem}" if chosen.problem else ""
        raise UnsupportedError(f"{name} can't serve {request}{problem}", chosen.reasons)
    specs = _shardings(request, metadata) if shardings and isinstance(request, AttentionRequest) else None
    return Explanation(request, chosen, tuple(sorted(candidates.values(), key=order)), specs)


def _shardings(request: AttentionRequest, metadata: OperationMetadata) -> AttentionShardings:
    B, T, S, K = request.batch, request.query_length, request.key_length, request.kv_heads
    shapes = (B, T, request.heads, request.head_dim), (B, S, K, request.head_dim), (B, S, K, request.value_head_dim)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return metadata.replace(layout="BTHD").get_shardings(*arrays, mode=request.mode)
