"""Source: keys and values that something holds, such as a cache, in a call where key and value stand.

``op(query, source, **options)`` asks the source to describe the call, decides by the description which forward serves
it, and has the source run that forward. The dispatcher knows no more of it: attnops-caches is one implementation.

1. `Source.bind` checks the arguments, and returns a `Call` whose arguments are (query, source) and whose request has a
   `SourceRequest`.
2. `SourceRequest.reasons` says why a forward can't serve the request. It is asked for each candidate of `auto`.
3. `Source.run` runs the forward that was decided on, by what the operation's class declares in ``readers``, or by the
   operation itself on arrays.
4. `Source.step` appends tokens and attends, for `OperationImpl.step`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attnops.errors import Reason

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.dispatch.request import AttentionRequest
    from attnops.output import OperationOutput


class SourceUse(abc.ABC):
    """How a forward uses a source, for `attnops.explain`: two sentences, without a full stop."""

    @property
    @abc.abstractmethod
    def reads(self) -> str:
        """How the forward reads keys and values, and what that costs."""

    @property
    @abc.abstractmethod
    def steps(self) -> str:
        """How `OperationImpl.step` writes new tokens."""


class SourceRequest(abc.ABC):
    """The static description of a source, `AttentionRequest.source`: hashable, compared by value.

    ``str`` of it is printed after "over" in errors and explanations.
    """

    @abc.abstractmethod
    def reasons(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> list[Reason]:
        """Why a forward of an operation can't serve the request, in any way. Traces nothing.

        `OperationImpl.own_reasons` has those of the forward's limits and of ``unsupported``.
        """

    @abc.abstractmethod
    def use(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> SourceUse:
        """How a forward that serves the request uses the source."""


class Source(abc.ABC):
    """Keys and values that something holds. A pytree, so that it passes through `jax.jit`.

    Class attributes:
        options: the names of the options of a call that only this source has, such as ``{"query_lengths"}``.
    """

    options: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def bind(self, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
        """Check the arguments of ``operation(query, self, **options)``, and describe the call.

        Args:
            operation: its metadata has the layout of the query, and the defaults of options.
            query: as the caller gives it.
            options: those that the caller gives, None for those not set.

        Returns:
            A call with the arguments (query [B, T, H, D], source), the options that are set, and a request with
            ``source``; its ``boundary`` is the source's own.

        Raises:
            ValueError: arguments that fit no implementation.
        """

    @abc.abstractmethod
    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        """Attention over what the bound source of a call holds, by the forward of this name.

        Args:
            operation: it was decided on, and its forward has no reasons.
            forward: "native", "cpu", "gpu", "cuda", "rocm", "tpu" or "tt".
            call: what `bind` described; ``call.args[1]`` is ``self``.

        Returns:
            The output in the layout "BTHD", and the fields that the call asks for.
        """

    @abc.abstractmethod
    def step(
        self,
        operation: OperationImpl,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike | None,
        options: Mapping[str, Any],
    ) -> tuple[OperationOutput, Self]:
        """Append tokens, and attend: see `OperationImpl.step`, whose arguments these are."""
