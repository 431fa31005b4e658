"""Warnings of calls on a mesh, where a device computes more than its share."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

from attnops.errors import Reason, UnsupportedError, UnsupportedWarning
from attnops.partition.boundary import unnamed_axes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.partition.boundary import Boundary

# Names that are usual for data parallelism; any other axis is proposed for heads.
_DATA = ("data", "batch", "replica", "dcn", "ici_data", "dp", "fsdp")


def gathers(operation: OperationImpl, axes: tuple[str, ...]) -> None:
    """Warn, once, that mesh axes shard the sequence, and that each device gathers it.

    Args:
        operation: the operation that runs.
        axes: the axes of the mesh.

    Raises:
        UnsupportedError: ``on_unsupported`` is "error".
    """
    reason = Reason("mesh", ", ".join(axes), "shards the sequence, which every device then gathers",
                    "create 'ring', of attnops-ring; or AxisRules(query_length=None, kv_length=None)")  # fmt: skip
    _tell(operation, "exchanges no keys between devices", reason)


def repeats(operation: OperationImpl, call: Call, boundary: Boundary | None) -> None:
    """Warn, once, that no axis rule names some axes of the call's mesh: devices along them compute the same.

    Args:
        operation: the operation that runs.
        call: the call.
        boundary: how it is sharded.

    Raises:
        UnsupportedError: ``on_unsupported`` is "error".
    """
    metadata = operation.metadata
    axes = unnamed_axes(metadata.mesh, metadata.axis_rules, call.request.mode, boundary, call.args)
    if not axes:
        return
    data = [] if boundary is not None and boundary.batch else [x for x in axes if x in _DATA] or [next(iter(axes))]
    heads = [name for name in axes if name not in data]
    rules = [f"batch={_rule(data)}"] if data else []
    rules += [f"head={_rule(heads)}, kv_head={_rule(heads)}"] if heads else []
    reason = Reason("mesh", axes, "no axis rule names these axes, so that the devices along them compute the same",
                    f"OperationMetadata(axis_rules=AxisRules({', '.join(rules)})), or a further rule for "
                    f"axes that attention does not use")  # fmt: skip
    _tell(operation, "is not sharded", reason)


def _rule(names: Iterable[str]) -> str:
    names = tuple(names)
    return repr(names[0] if len(names) == 1 else names)


def _tell(operation: OperationImpl, what: str, reason: Reason) -> None:
    name = type(operation).__name__
    if operation.metadata.on_unsupported == "error":
        raise UnsupportedError(f"{name} {what}:\n  - {reason}", [reason])
    _warn(f"{name} {what}: {reason}")


@functools.cache
def _warn(text: str) -> None:
    # The level of the operation's caller, above this, _tell, gathers, invoke, _run, run and __call__.
    warnings.warn(text, UnsupportedWarning, stacklevel=9)
