"""A call on a mesh: each device runs the forward on its shard; warnings where it computes more than its share."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import jax

from attnops.dispatch.result import check_output
from attnops.errors import Reason, UnsupportedError, UnsupportedWarning
from attnops.output import OperationOutput
from attnops.partition.boundary import unnamed_axes
from attnops.partition.run import run_sharded, run_unsharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.partition.boundary import Boundary

# Names that are usual for data parallelism; any other axis is proposed for heads.
_DATA = ("data", "batch", "replica", "dcn", "ici_data", "dp", "fsdp")


def run(
    operation: OperationImpl,
    forward: str,
    function: Callable[..., OperationOutput],
    call: Call,
    options: Mapping[str, object],
    is_left_to_xla: bool,
) -> OperationOutput:
    """The output of a call that has a boundary.

    Args:
        operation: the operation that runs.
        forward: the name of the forward.
        function: the forward.
        call: the call.
        options: the options of the forward.
        is_left_to_xla: whether XLA partitions the call: JAX has no gradient of a `jax.shard_map` in another.
    """
    boundary, request = call.boundary, call.request
    assert boundary is not None
    if is_left_to_xla:
        return boundary.typed(run_unsharded(boundary, function, call.args, options))
    name = type(operation).__name__

    def checked(query: jax.Array, key: jax.Array, value: jax.Array, **rest: object) -> OperationOutput:
        return check_output(name, (query, key, value), rest, function(query, key, value, **rest))

    key = operation.program_key(forward)
    return boundary.typed(run_sharded(boundary, checked, call.args, options, is_interpreted=request.interpret,
                                      option_axes=operation.option_axes, key=key))  # fmt: skip


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
    """Warn, once, that no axis rule names some axes of the call's mesh, so that devices along them compute the same.

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
