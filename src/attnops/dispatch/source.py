"""Source: an object that holds keys and values, such as a cache, and is passed in place of key and value.

``op(query, source, **options)`` asks the source to describe the call, decides by the description which forward serves
it, and has the source run that forward. The dispatcher knows nothing else about it; attnops-caches implements it.

1. `Source.bind` checks the arguments, and returns a `Call` whose arguments are (query, source) and whose request has a
   `SourceRequest`.
2. `SourceRequest.reasons` says why a forward can't serve the request. It is asked for each candidate of `auto`.
3. `Source.run` runs the forward that was decided on, with the reader that the operation's class has in ``readers``, or
   on arrays.
4. `Source.step` appends tokens and attends, for `OperationImpl.step`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax.numpy as jnp

from attnops.dispatch.call import Call
from attnops.dispatch.request import AttentionRequest
from attnops.errors import Reason
from attnops.output import OperationOutput

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl

SourceType = TypeVar("SourceType", bound="Source")


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
        """Why a forward of an operation can't serve the request, in place or on arrays. Traces nothing.

        `OperationImpl.own_reasons` gives the reasons of the forward's limits and of ``unsupported``.
        """

    @abc.abstractmethod
    def use(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> SourceUse:
        """How a forward that serves the request uses the source."""


class Source(abc.ABC):
    """An object that holds keys and values. A pytree, so that it passes through `jax.jit`.

    Class attributes:
        options: the names of the options of a call that only this source has, such as ``{"query_lengths"}``.
    """

    options: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def bind(self, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
        """Check the arguments of ``operation(query, self, **options)``, and describe the call.

        Args:
            operation: the operation; its metadata has the layout of the query and the defaults of options.
            query: the query, in the layout that the caller gives.
            options: the caller's options; None for an option that is not set.

        Returns:
            A call with the arguments (query [B, T, H, D], source), the options that are set, a request with
            ``source``, and a ``boundary`` that only the source interprets.

        Raises:
            ValueError: arguments that fit no implementation.
        """

    @abc.abstractmethod
    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        """Attention over what the bound source of a call holds, by the forward of this name.

        Args:
            operation: the operation that was decided on; its forward has no reasons.
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
        """Append tokens, and attend; the arguments are documented in `OperationImpl.step`."""


def bound(source: Source, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
    """The result of `Source.bind`, checked.

    Raises:
        TypeError: it is not a call of query and source, described by its request.
    """
    name, call = f"{type(source).__name__}.bind", source.bind(operation, query, options)
    if not isinstance(call, Call) or not isinstance(call.request, AttentionRequest) or len(call.args) != 2:
        raise TypeError(f"{name} returned {call!r}, but must return a Call of (query, source) with an AttentionRequest")
    request, shape = call.request, jnp.shape(call.args[0])
    if not isinstance(request.source, SourceRequest):
        raise TypeError(f"{name} returned a request with source={request.source!r}, but must return a SourceRequest")
    described = request.batch, request.query_length, request.heads, request.head_dim
    if shape != described:
        raise TypeError(f"{name} returned a query of shape {shape} and a request of [B, T, H, D]={described}")
    try:
        hash(request)
    except TypeError as error:
        raise TypeError(f"{name} returned a request that is not hashable: {error}") from error
    return call


def stepped(result: tuple[OperationOutput, SourceType], source: SourceType) -> tuple[OperationOutput, SourceType]:
    """What `Source.step` returned, if it is an output and a source.

    Raises:
        TypeError: it is anything else.
    """
    kinds = [type(x) for x in result] if isinstance(result, tuple) else [type(result)]
    if len(kinds) != 2 or not issubclass(kinds[0], OperationOutput) or not issubclass(kinds[1], Source):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(source).__name__}.step returned ({names}), but must return (OperationOutput, Source)")
    return result
