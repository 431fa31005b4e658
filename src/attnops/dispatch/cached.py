"""A call over a cache: in place where the operation reads its storage, else on the arrays that it is read into.

``op(query, cache, mask=mask)`` is bound to the cache's slots: `attnops.caches.slots` takes masks and biases from
positions to slots and adds the mask of what the cache holds, so that any implementation computes the same from the
arrays of ``cache.read()``. A class reads storages in place by a method ``cached_<forward>``, such as
``cached_native``, and the fields ``caches``, ``codecs``, ``latent`` and ``packed`` of that forward's `Limits`. Its
signature is::

    def cached_native(self, query, cache, *, mask, bias=None, softmax_scale=None, logits_soft_cap=None, sinks=None,
                      return_lse=False) -> OperationOutput

with the query [B, T, H, D], the `attnops.caches.Cache`, and mask and bias bound to the scores by slot: [B, H, T, S];
of packed rows the query is [1, N, H, D] and the scores [1, H, N, B · S], the slots of all rows one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import Bias
from attnops.caches.base import Cache
from attnops.caches.packed import Rows, check_rows
from attnops.caches.paged import PagedCache
from attnops.caches.slots import Scores, SlotBias, slot_bias, slot_mask
from attnops.dispatch.binding import (
    Call,
    Dimensions,
    bind_bias,
    bind_options,
    check_array,
    mask_primitives,
    swap_heads,
)
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.request import AttentionRequest, CacheRequest, dtype_name, is_symbolic
from attnops.kernels.nograd import without_gradient
from attnops.masks.base import Dense, Mask
from attnops.masks.checks import check_boolean, check_broadcastable
from attnops.masks.packed import PackedByRow, by_query
from attnops.masks.slots import by_arrays
from attnops.sharding.modes import MODE_DECODE, MODE_PREFILL, MODE_TRAIN, canonicalize_mode
from attnops.sharding.placing import whole

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import Aval

NO_GRADIENT: Final = (
    "attention over a cache has no gradient, but was differentiated; call the operation with the keys and values of "
    "all tokens instead: op(query, key, value, mask=...)"
)


def bind_cached(
    metadata: OperationMetadata,
    query: ArrayLike,
    cache: Cache,
    options: dict[str, Any],
    query_lengths: ArrayLike | None = None,
    rows: Rows | None = None,
    lengths: jax.Array | None = None,
) -> Call:
    """The call of an attention operation over a cache; its arguments are query and cache.

    Args:
        metadata: the operation's metadata.
        query: [B, T, H, D], or [B, H, T, D] in the layout "BHTD"; of packed rows the batch is 1.
        cache: the cache, which already holds the queries' tokens.
        options: the options by name.
        query_lengths: integers [B]: of row b the first ``query_lengths[b]`` queries are real. None: all T.
        rows: of packed rows; None for a batch [B, T].
        lengths: of the rows with these queries, int32 [B], if they are not the cache's (some did not fit).

    Raises:
        ValueError: arguments that fit no implementation.
    """
    query = check_array("query", query)
    if metadata.layout == "BHTD":
        query = swap_heads("query", query)
    cache._check_layer()
    if options.get("dropout_key") is not None:
        raise ValueError("dropout_key is given, but attention over a cache has no dropout; leave it out")
    options = options | {"mode": _mode(metadata, options.get("mode"), query.shape[1])}
    if rows is not None:
        check_rows(rows)
    _check_query(query, cache, rows)
    if rows is not None and query_lengths is not None:
        raise ValueError("rows and query_lengths are both given: packed rows have their lengths in rows.starts")
    cache.check_queries(query.shape[1], rows)
    scores = _scores(query, cache, query_lengths, rows, lengths)
    mask, bias = options.get("mask"), options.get("bias")
    options = options | {"mask": slot_mask(_mask(mask, scores.shape), cache, scores)}
    if bias is not None:
        bound = bias if isinstance(bias, Bias) else bind_bias(bias, scores.shape)
        options["bias"] = slot_bias(bound, cache, scores)
    if metadata.runtime_dtype is not None:
        query = query.astype(metadata.runtime_dtype)
    _, H, _, _ = scores.shape
    B, _, T, S = scores.slots_shape
    dimensions = Dimensions(B, T, H, cache.head_dim, S, cache.kv_heads, cache.value_head_dim)
    stored = dtype_name(query) if metadata.runtime_dtype is not None else str(jnp.dtype(cache.dtype).name)
    request, given = bind_options(metadata, dimensions, (dtype_name(query), stored, stored), options)
    codec = cache.codec
    description = CacheRequest(
        storage=cache.storage,
        codec="" if codec is None else codec.dtype,
        scales="" if codec is None else codec.scales,
        latent=cache.store.latent is not None,
        page_size=cache.page_size if isinstance(cache, PagedCache) else 0,
        width=cache.store.width,
        joined=cache.store.is_joined,
        is_packed=scores.is_packed,
        rows=cache.batch,
        **(_described(options["mask"]) if scores.is_packed else {}),
    )
    kind = {} if bias is None else {"bias_kind": bound.kind() if isinstance(bound, Bias) else "array"}
    query, cache, given = without_gradient((query, cache, given), NO_GRADIENT)
    return Call(request.replace(cache=description, **kind), (query, cache), given)


def _described(mask: Mask) -> dict[str, frozenset[str]]:
    """The fields of a `CacheRequest` that describe the bound mask of packed rows."""
    own = mask.mask if isinstance(mask, PackedByRow) else mask
    return {"mask_kinds": own.kinds(), "mask_primitives": mask_primitives(own)}


def arrays_of(call: Call) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """Query, key and value, and the options, of the same call on the arrays of ``cache.read()``; layout "BTHD"."""
    query, cache = call.args
    keys, values, _, _ = cache.read()
    request = call.request
    assert isinstance(request, AttentionRequest)
    assert request.cache is not None
    if request.cache.is_packed:
        keys, values = (x.reshape(1, -1, *x.shape[2:]) for x in (keys, values))
    options = dict(call.options)
    if "mask" in options:
        shape = request.batch, request.heads, request.query_length, request.key_length
        options["mask"] = by_arrays(by_query(options["mask"], shape))
    bias = options.get("bias")
    if isinstance(bias, SlotBias):
        array = bias.array(request.batch, request.heads, request.query_length, request.key_length)
        options["bias"] = bias.score_fn() if array is None else array
    return (query, keys, values), options | {"mode": request.mode}


def shapes_of(call: Call) -> tuple[Aval, Aval, Aval]:
    """Query, key and value of a call by shape: of a call over a cache, those of the arrays that it is read into."""
    request = call.request
    if not isinstance(request, AttentionRequest) or request.cache is None:
        query, key, value = call.args
        return query, key, value
    rows = request.batch, request.key_length, request.kv_heads
    key, value = (
        jax.ShapeDtypeStruct((*rows, d), request.dtypes[1]) for d in (request.head_dim, request.value_head_dim)
    )
    return call.args[0], key, value


def bytes_read(request: AttentionRequest) -> int:
    """The bytes of the arrays that `arrays_of` makes for a request over a cache."""
    size = jnp.dtype(request.dtypes[1]).itemsize
    per_slot = request.kv_heads * (request.head_dim + request.value_head_dim) * size
    return request.batch * request.key_length * per_slot


def printed_bytes(size: int) -> str:
    """A number of bytes for people, such as ``"33.6 MB"``."""
    if is_symbolic(size):
        return f"{size} bytes"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _mode(metadata: OperationMetadata, mode: str | None, query_length: int) -> str:
    """The runtime mode of a call: as stated, else decode for one query, else prefill."""
    stated = metadata.mode if mode is None else mode
    if stated is None:
        return MODE_DECODE if query_length == 1 else MODE_PREFILL
    if canonicalize_mode(stated) == MODE_TRAIN:
        raise ValueError(
            f"{'metadata.mode' if mode is None else 'mode'}='train', but attention over a cache has no gradient and no "
            f"dropout; give the call mode='prefill' or mode='decode', or call the operation with the keys and values "
            f"of all tokens: op(query, key, value, mask=...)"
        )
    return stated


def _check_query(query: jax.Array, cache: Cache, rows: Rows | None) -> None:
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(
            f"query has shape {query.shape}, but must have rank 4 and no empty dimension: [B, T, H, D] (or "
            f"[B, H, T, D] with metadata.layout='BHTD')"
        )
    B, _, H, D = query.shape
    wanted = 1 if rows is not None else cache.batch
    if wanted != B:
        what = "packed rows have batch 1" if rows is not None else f"the cache has batch {cache.batch}"
        raise ValueError(f"query has batch {B}, but {what}: they must be equal")
    if cache.head_dim != D:
        raise ValueError(f"query has head_dim {D}, but the cache has head_dim {cache.head_dim}: they must be equal")
    if H % cache.kv_heads:
        raise ValueError(
            f"query has {H} heads and the cache has {cache.kv_heads}: the kv heads must divide the heads (check that "
            f"metadata.layout is the query's layout)"
        )


def _scores(
    query: jax.Array, cache: Cache, query_lengths: ArrayLike | None, rows: Rows | None, lengths: jax.Array | None
) -> Scores:
    _, T, H, _ = query.shape
    B, S = cache.batch, cache.length
    if rows is None:
        real = cache.row_lengths("query_lengths", query_lengths, T)
        return Scores((B, H, T, S), cache.query_positions(T, real, lengths), None, cache)
    lengths, starts = whole(cache.lengths if lengths is None else lengths), whole(cache.starts)
    row, index = rows.checked(T, B).of_queries(T, lengths)
    position = index - starts[jnp.maximum(row, 0)]
    position = jnp.where((row >= 0) & (index >= 0) & (position >= 0), position, -1)
    return Scores((B, H, T, S), position[None], row[None], cache)


def _mask(mask: object, shape: tuple[int, int, int, int]) -> Mask | None:
    """The caller's mask, not bound: an array as `Dense`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        raise ValueError(f"mask is a {type(mask).__name__}, but must be a boolean array or an attnops.masks.Mask")
    check_broadcastable("mask", tuple(mask.shape), shape, "add axes of size 1; keys are counted by position")
    check_boolean("mask", mask)
    return Dense(mask if isinstance(mask, np.ndarray) else jnp.asarray(mask))
