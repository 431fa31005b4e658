"""auto: picks an implementation for each call."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.call import Call
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.plugins import is_loading
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.ranking import environment_keys, pick
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.operations.vanilla import VanillaAttention

if TYPE_CHECKING:
    from attnops.output import OperationOutput


class AutoAttention(VanillaAttention):
    """Runs, for each call, the installed implementation that serves it best; `attnops.explain` says which and why.

    Only implementations that declare ``computes = "attention"`` and serve the request on the forward meant for the
    platform are considered. The ``rank`` of each says how good a choice it is; the first in `attnops.Rank` runs.
    """

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        if not is_loading():  # not while a plugin is being imported
            # Now, and not in the first call, which may be traced: an import may change what JAX's caches are keyed by.
            environment_keys(self.metadata, OperationRegistry.generation())  # creates each operation

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "auto"

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        return None

    def run(self, call: Call) -> OperationOutput:
        """Run the call on the implementation picked for it.

        Raises:
            UnsupportedError: nothing that is installed can serve it.
        """
        return self.chosen(call).run(call)

    def chosen(self, call: Call) -> OperationImpl:
        assert isinstance(call.request, AttentionRequest)
        keys = environment_keys(self.metadata, OperationRegistry.generation())
        return _picked(self.metadata, call.request, OperationRegistry.generation(), keys)


@functools.lru_cache(maxsize=4096)
def _picked(
    metadata: OperationMetadata, request: AttentionRequest, generation: int, keys: tuple[Hashable, ...]
) -> OperationImpl:
    operation = OperationRegistry.create(pick(request, metadata).name, metadata)
    assert isinstance(operation, OperationImpl)
    return operation
