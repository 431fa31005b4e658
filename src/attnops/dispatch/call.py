"""Call: a call's request and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnops.sharding.modes import MODE_DECODE, MODE_TRAIN, RUNTIME_MODE_TYPES, canonicalize_mode
from attnops.typing import PyTree

if TYPE_CHECKING:
    from attnops.dispatch.metadata import OperationMetadata
    from attnops.dispatch.request import Request
    from attnops.partition.boundary import Boundary


class Call(NamedTuple):
    """A call, ready to be dispatched.

    Attributes:
        request: its static description; the dispatcher adds the platform.
        args: the positional arguments of the forward.
        options: by name, the options that the caller set, and the metadata's scale and soft cap if the caller set none.
        boundary: how a mesh shards the call; None if it does not.
    """

    request: Request
    args: tuple[PyTree, ...]
    options: dict[str, Any]
    boundary: Boundary | None = None


def resolve_mode(metadata: OperationMetadata, query_length: int, mode: str | None = None) -> RUNTIME_MODE_TYPES:
    """The runtime mode: the call's, else the metadata's, else decode for one query, else train."""
    stated = metadata.mode if mode is None else mode
    if stated is not None:
        return canonicalize_mode(stated)
    return MODE_DECODE if query_length == 1 else MODE_TRAIN
