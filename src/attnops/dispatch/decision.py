"""decide: which forward serves a request; decided once for equal operations, requests and environments."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING

from attnops.dispatch import border
from attnops.dispatch.forwards import forward_for
from attnops.errors import UnsupportedError, UnsupportedWarning

if TYPE_CHECKING:
    from attnops.dispatch.metadata import OperationMetadata
    from attnops.dispatch.operation import BaseOperation
    from attnops.dispatch.request import Request


def decide(operation: BaseOperation, request: Request) -> str:
    """The forward that serves ``request``: the platform's, or the native one if the metadata allows it.

    Raises:
        UnsupportedError: neither can, or the native one is not allowed; with all reasons.
        PluginError: a method of the operation's class raised, or returned something invalid.
    """
    key = _OperationKey(type(operation), operation.metadata, operation)
    return _decide(key, request, border.environment_key(operation))


@dataclasses.dataclass(unsafe_hash=True, slots=True)
class _OperationKey:
    """An operation as a cache key, compared by class and metadata: its own ``__eq__`` may be anything."""

    cls: type[BaseOperation]
    metadata: OperationMetadata
    operation: BaseOperation = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _decide(operation_key: _OperationKey, request: Request, environment_key: Hashable) -> str:
    operation = operation_key.operation
    forward = forward_for(type(operation), request.platform)
    reasons = operation.reasons_for(forward, request)
    if not reasons:
        return forward
    name = f"{type(operation).__name__}.forward_{forward}"
    if forward != "native" and operation.metadata.on_unsupported == "native":
        native = operation.reasons_for("native", request)
        if not native:
            for reason in reasons:
                warn_once(name, str(reason))  # as text: a plugin's value may be unhashable
            return "native"
        known = {str(reason) for reason in reasons}
        reasons = reasons + [
            dataclasses.replace(r, limit=f"{r.limit} (native forward)") for r in native if str(r) not in known
        ]
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    raise UnsupportedError(f"{name} can't serve {request}:{listed}", reasons)


@functools.cache
def warn_once(name: str, reason: str, stacklevel: int = 6) -> None:
    # The level of the operation's caller, above this, _decide, decide, run and __call__.
    warnings.warn(
        f"{name} can't serve this call, so forward_native runs: {reason}", UnsupportedWarning, stacklevel=stacklevel
    )
