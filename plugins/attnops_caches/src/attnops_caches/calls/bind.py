"""A call over a cache as a `Call`: its arguments checked, its mask and bias bound to the cache's slots, so that any
implementation computes the same from the arrays of ``cache.read()``, see `attnops_caches.calls.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from attnops.biases import Bias
from attnops.dispatch.binding import Dimensions, bind_mask, bind_options, check_array, mask_primitives, swap_heads
from attnops.dispatch.call import Call
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.request import dtype_name
from attnops.kernels.nograd import without_gradient
from attnops.masks.base import Mask
from attnops.sharding.modes import MODE_DECODE, MODE_PREFILL, MODE_TRAIN, canonicalize_mode
from attnops.sharding.placing import whole
from attnops_caches.calls.on_mesh import find_cache_boundary
from attnops_caches.masks.packed import PackedByRow
from attnops_caches.rows import check_rows
from attnops_caches.scores import ScorePositions, slot_bias, slot_mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.dispatch.attention import OperationImpl
    from attnops_caches.base import Cache
    from attnops_caches.rows import Rows

NO_GRADIENT: Final = (
    "attention over a cache has no gradient, but was differentiated; call the operation with the keys and values of "
    "all tokens instead: op(query, key, value, mask=...)"
)


def bind_cached(cache: Cache, operation: OperationImpl, query: ArrayLike, options: Mapping[str, Any]) -> Call:
    """See `attnops.Source.bind`: a call over a cache, which already holds the queries' tokens.

    It has two options in addition to the operation's. ``query_lengths``, integers [B]: the first ``query_lengths[b]``
    queries of row b are real, the others give output 0 and logsumexp −inf; None: all T. Query i of row b is the token
    of index ``lengths[b] - query_lengths[b] + i``. ``rows``, a `Rows`: the rows are packed, the query is [1, N, H, D],
    and masks and biases are given for [B, H, N, S]; None for a batch. From `step` there is also ``_lengths``, int32
    [B]: the rows' lengths with these queries, also those that did not fit.

    Raises:
        ValueError: arguments that fit no implementation.
    """
    metadata, options = operation.metadata, dict(options)
    query_lengths, rows, lengths = (options.pop(name, None) for name in ("query_lengths", "rows", "_lengths"))
    query = check_array("query", query)
    query = swap_heads("query", query) if metadata.layout == "BHTD" else query
    cache.check_layer()
    if options.get("dropout_key") is not None:
        raise ValueError("dropout_key is given, but attention over a cache has no dropout; leave it out")
    options["mode"] = _mode(metadata, options.get("mode"), query.shape[1])
    if rows is not None and query_lengths is not None:
        raise ValueError("rows and query_lengths are both given: packed rows have their lengths in rows.starts")
    _check_query(query, cache, rows)
    scores = _scores(query, cache, query_lengths, rows, lengths)
    cache.check_run(query.shape[1], rows, appends=False)
    mask, bias = options.get("mask"), options.get("bias")
    if mask is not None and not isinstance(mask, Mask):
        mask = bind_mask(mask, scores.shape)
    options["mask"] = slot_mask(mask, scores)
    if bias is not None:
        options["bias"] = slot_bias(bias, scores)
    stored = str(jnp.dtype(cache.dtype).name)
    if metadata.runtime_dtype is not None:
        query = query.astype(metadata.runtime_dtype)
        stored = dtype_name(query)
    B, H, T, S = scores.slots_shape
    dimensions = Dimensions(B, T, H, cache.head_dim, S, cache.kv_heads, cache.value_head_dim)
    request, given = bind_options(metadata, dimensions, (dtype_name(query), stored, stored), options)
    source = dataclasses.replace(cache.describe(), is_packed=scores.is_packed)
    if scores.is_packed:
        inner = options["mask"].mask if isinstance(options["mask"], PackedByRow) else options["mask"]
        source = dataclasses.replace(source, mask_kinds=inner.kinds(), mask_primitives=mask_primitives(inner))
    kind = {} if bias is None else {"bias_kind": bias.kind() if isinstance(bias, Bias) else "array"}
    query, cache, given = without_gradient((query, cache, given), NO_GRADIENT)
    request = request.replace(source=source, **kind)
    boundary = find_cache_boundary(metadata.mesh, metadata.axis_rules, request, query, cache)
    return Call(request, (query, cache), given, boundary)


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
) -> ScorePositions:
    _, T, H, _ = query.shape
    B, S = cache.batch, cache.length
    if rows is None:
        real = cache.row_lengths("query_lengths", query_lengths, T)
        return ScorePositions((B, H, T, S), cache.query_positions(T, real, lengths), None, cache)
    lengths, starts = whole(cache.lengths if lengths is None else lengths), whole(cache.starts)
    row, index = check_rows(rows, T, B).of_queries(T, lengths)
    position = index - starts[jnp.maximum(row, 0)]
    position = jnp.where((row >= 0) & (index >= 0) & (position >= 0), position, -1)
    return ScorePositions((B, H, T, S), position[None], row[None], cache)
