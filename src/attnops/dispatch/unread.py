"""unread: reasons to refuse metadata fields that an operation does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attnops.dispatch.metadata import OperationMetadata
from attnops.errors import Reason

if TYPE_CHECKING:
    from attnops.dispatch.operation import BaseOperation

# The fields that the dispatcher reads for every operation.
_DISPATCHED: Final = frozenset({"mode", "platform", "on_unsupported", "interpret"})
_INSTEAD: Final = {"runtime_dtype": "cast its arguments", "mesh": "place its arguments with jax.device_put"}


def unread(cls: type[BaseOperation], metadata: OperationMetadata) -> Iterator[Reason]:
    """A reason for each field that is set, but read neither by the dispatcher nor by the class."""
    for field in dataclasses.fields(OperationMetadata):
        value = getattr(metadata, field.name)
        if field.name in _DISPATCHED or field.name in cls.reads or value is field.default:
            continue
        if field.default is None or value != field.default:
            instead = _INSTEAD.get(field.name, "leave it out")
            yield Reason(f"metadata.{field.name}", value, f"{cls.__name__} does not read it", instead)
