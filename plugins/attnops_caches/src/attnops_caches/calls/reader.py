"""CacheReader: how a class of operations reads caches in place, for one of its forwards.

A class declares its readers by forward, ``readers = {"tpu": MyReader()}``. A forward without a reader, or whose reader
has reasons, is given the arrays of ``cache.read()``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Unpack

from attnops.dispatch.forwards import keyword_options
from attnops.dispatch.options import ScoreOptions
from attnops.dispatch.request import AttentionRequest
from attnops.errors import Reason

if TYPE_CHECKING:
    import jax

    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.output import OperationOutput
    from attnops_caches.base import Cache
    from attnops_caches.calls.request import CacheRequest
    from attnops_caches.store import NewTokens
    from attnops_caches.stored import StoredType


class CacheOptions(ScoreOptions, total=False):
    """The options of `CacheReader.attend`.

    The mask is always there, and is bound to the scores by slot, [B, H, T, S]; for packed rows [1, H, N, B · S], the
    slots of all rows one after the other. A bias is an `attnops.biases.Bias`, bound to the same scores.

    Attributes:
        return_lse: whether the output has ``logsumexp``, float32 [B, H, T].
    """

    return_lse: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """The caches that a reader serves.

    Attributes:
        storages: the classes of caches, by name, such as "PagedCache". None: any.
        codecs: the dtypes of codecs, such as "int8".
        latent: it reads latent content.
        packed: it reads packed rows.

    Raises:
        ValueError: storages or codecs are no collection.
    """

    storages: frozenset[str] | None
    codecs: frozenset[str] = frozenset()
    latent: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        for name, value in ("storages", self.storages), ("codecs", self.codecs):
            if value is None and name == "storages":
                continue
            if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise ValueError(f"{name}={value!r} must be a collection, such as {{{value!r}}}")
            object.__setattr__(self, name, frozenset(value))

    def reasons(self, cache: CacheRequest) -> list[Reason]:
        """Every limit that reading ``cache`` in place breaks."""
        reasons = []
        for name, given, known in ("cache", cache.storage, self.storages), ("cache.codec", cache.codec, self.codecs):
            if given and known is not None and given not in known:
                reasons.append(Reason(name, given, f"must be one of {sorted(known)} to be read in place"))
        flags = ("latent", cache.latent, self.latent), ("rows", cache.is_packed, self.packed)
        return reasons + [Reason(name, True, "is not read in place") for name, given, can in flags if given and not can]


class CacheReader(abc.ABC):
    """Reads caches in place for one forward of a class of operations; without state.

    Class attributes:
        limits: the caches that it reads.
        writes: whether it has `step`.
    """

    limits: ClassVar[CacheLimits]
    writes: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(
        self, operation: Any, query: jax.Array, cache: Cache, **options: Unpack[CacheOptions]
    ) -> OperationOutput:
        """Attention over a cache. An option that an override does not name is a reason.

        Args:
            operation: whose reader it is.
            query: [B, T, H, D]; for packed rows [1, N, H, D].
            cache: the cache; on a mesh, this device's shard of it.
            **options: the options of the call, see `CacheOptions`.
        """

    def step(
        self, operation: Any, query: jax.Array, cache: StoredType, new: NewTokens, **options: Unpack[CacheOptions]
    ) -> tuple[OperationOutput, StoredType]:
        """`attend`, with the ``new`` tokens written in the same kernel; only called if ``writes``.

        The lengths of the cache count the new tokens, which its arrays lack.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def unsupported(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """Further reasons not to read in place, which ``limits`` and the operation's ``unsupported`` can't express."""
        return ()

    def not_shared(self, request: AttentionRequest) -> Iterable[Reason]:
        """Why each row reads the pages that it shares with others; none where they are read once if it saves time."""
        yield Reason("cache", cache_of(request).storage, "this reader has no cascade attention")

    def not_written(self, operation: Any, request: AttentionRequest) -> Iterable[Reason]:
        """Why `step` does not write the tokens of a request that `attend` serves."""
        return ()


# The readers of classes that can't declare them, since they don't know caches: the core's.
READERS: Final[dict[type, Mapping[str, CacheReader]]] = {}


def cache_of(request: AttentionRequest) -> CacheRequest:
    """The description of the cache of a request over one."""
    source: Any = request.source
    return source  # type: ignore[no-any-return]


def attention_request(call: Call) -> AttentionRequest:
    """The request of a call over a cache."""
    assert isinstance(call.request, AttentionRequest)
    return call.request


def reader_of(operation: OperationImpl, forward: str) -> CacheReader | None:
    """The reader of a forward, from the nearest class in the MRO; a class that defines the forward inherits none."""
    for cls in type(operation).__mro__:
        reader = vars(cls).get("readers", {}).get(forward) or READERS.get(cls, {}).get(forward)
        if reader is not None:
            if not isinstance(reader, CacheReader):
                raise TypeError(f"{cls.__name__}.readers[{forward!r}] is {reader!r}, but must be a CacheReader")
            return reader
        if f"forward_{forward}" in vars(cls):
            return None
    return None


def in_place_reasons(operation: OperationImpl, forward: str, request: AttentionRequest) -> list[Reason]:
    """Why a forward can't read the cache of a request in place; empty where it can."""
    cache, reader = cache_of(request), reader_of(operation, forward)
    if reader is None:
        return [Reason("cache", cache.storage, f"{type(operation).__name__} has no reader of caches for {forward}")]
    unknown, rule = request.options - keyword_options(type(reader).attend), "attend has no such option"
    reasons = [Reason(option, "given", f"{type(reader).__name__}.{rule}") for option in sorted(unknown)]
    reasons += reader.limits.reasons(cache) + operation.own_reasons(forward, request)
    return [*reasons, *reader.unsupported(operation, request)]


def step_reasons(operation: OperationImpl, forward: str, request: AttentionRequest) -> list[Reason]:
    """Why a step appends the tokens before its kernel, which can't write them; see also `attnops_caches.calls.step`."""
    reader = reader_of(operation, forward)
    if reader is None or not reader.writes:
        name = type(operation).__name__
        return [Reason("step", cache_of(request).storage, f"{name} has no reader for {forward} that writes tokens")]
    return [*in_place_reasons(operation, forward, request), *reader.not_written(operation, request)]
