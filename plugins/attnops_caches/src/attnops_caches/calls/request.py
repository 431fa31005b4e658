"""The static description of a cache in a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from attnops.dispatch.request import is_symbolic
from attnops.dispatch.source import SourceRequest, SourceUse
from attnops_caches.calls.reader import in_place_reasons, reader_of, step_reasons

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.request import AttentionRequest
    from attnops.errors import Reason


@dataclasses.dataclass(frozen=True)
class CacheRequest(SourceRequest):
    """The static description of the cache of a call.

    Attributes:
        storage: the class of the cache, such as ``"PagedCache"``.
        codec: the codec's dtype, such as ``"int8"``; empty for tokens that are stored as they are.
        scales: what has a scale of its own, see `attnops_caches.Quantized`, or "channel"; empty without a codec.
        latent: whether the value is a part of the key.
        page_size: slots per page, on one device if a mesh shards them; 0 for a storage without pages.
        width: features of a token in the array of keys, zeros included; D + Dv at least if values are joined to keys.
        joined: whether keys and values are one array.
        has_loader: whether native `flash` can read its tiles in place, see `Cache.loader`.
        is_packed: whether the queries are packed rows: then the batch is 1, and the keys are the slots of all rows.
        rows: the rows of the cache; 1 if unknown.
        mask_kinds: for packed rows, the kinds of the caller's mask, which forwards that don't compute row by row may
            get as an array by query and slot, see `attnops_caches.masks.PackedByRow`.
        mask_primitives: for packed rows, the primitives that the caller's mask needs, see `attnops.AttentionRequest`.
    """

    storage: str
    codec: str = ""
    scales: str = ""
    latent: bool = False
    page_size: int = 0
    width: int = 0
    joined: bool = False
    has_loader: bool = True
    is_packed: bool = False
    rows: int = 1
    mask_kinds: frozenset[str] = frozenset()
    mask_primitives: frozenset[str] = frozenset()

    def __str__(self) -> str:
        codec = f" {self.codec} by {self.scales}" if self.codec else ""
        pages = f" of pages of {self.page_size}" if self.page_size else ""
        return f"{self.storage}{pages}{codec}{' latent' * self.latent}{' packed' * self.is_packed}"

    def reasons(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> list[Reason]:
        """See `attnops.dispatch.source.SourceRequest.reasons`: none where the forward reads the cache in place."""
        if not in_place_reasons(operation, forward, request):
            return []
        kinds = {"": "", "ScoreFn": "ScoreFn"} | dict.fromkeys(("array", "ALiBi", "RelativePosition"), "array")
        kind = kinds.get(request.bias_kind, "SlotBias")
        # The request of the call on the arrays, see `attnops_caches.calls.run.arrays_of`.
        over_arrays = request.replace(source=None, bias_kind=kind, bias_primitives=frozenset())
        return operation.own_reasons(forward, over_arrays)

    def use(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> CacheUse:
        if reasons := in_place_reasons(operation, forward, request):
            features, size = request.head_dim + request.value_head_dim, jnp.dtype(request.dtypes[1]).itemsize
            bytes_read = request.batch * request.key_length * request.kv_heads * features * size
            why = "; ".join(map(str, reasons))
            reads = f"reads the cache into arrays by cache.read(), {printed_bytes(bytes_read)} a call: {why}"
        else:
            reads, bytes_read = f"reads the cache in place (forward_{forward})", 0
            reader = reader_of(operation, forward)
            if self.page_size and self.rows > 1 and reader is not None:
                why = "; ".join(map(str, reader.not_shared(request)))
                reads += f"; pages that rows share {f'are read by each: {why}' if why else 'once if it saves time'}"
        steps = (
            "op.step writes the tokens in the kernel; before it where a mesh shards the context, or shards kv heads "
            "otherwise than the query's"
        )
        if reasons := step_reasons(operation, forward, request):
            steps = "op.step appends the tokens first: " + "; ".join(map(str, reasons))
        return CacheUse(reads, steps, bytes_read)


def slots_of_row(request: AttentionRequest) -> int:
    """The keys of each row: S, or the slots of one row if rows are packed."""
    cache = request.source
    rows = cache.rows if isinstance(cache, CacheRequest) and cache.is_packed else 1
    return request.key_length // rows


def printed_bytes(size: int) -> str:
    """A number of bytes for people, such as ``"33.6 MB"``."""
    for unit, factor in () if is_symbolic(size) else (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


@dataclasses.dataclass(frozen=True)
class CacheUse(SourceUse):
    """How a forward uses a cache, for `attnops.explain`.

    Attributes:
        reads, steps: see `attnops.dispatch.source.SourceUse`.
        bytes_read: the bytes of the arrays that each call makes by ``cache.read()``; 0 where it reads in place.
    """

    reads: str = ""
    steps: str = ""
    bytes_read: int = 0
