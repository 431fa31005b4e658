"""Padding of lengths to a multiple, for kernels that accept no other lengths."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from attnops.masks.integers import numpy_of
from attnops.masks.tokens import Segments
from attnops.output import OperationOutput
from attnops.typing import Leaf


class Padded(NamedTuple):
    """The arrays of a call, padded at the end.

    Attributes:
        query: [B, T', H, D], zeros after the first T.
        key: [B, S', K, D], zeros after the first S.
        value: [B, S', K, Dv], zeros after the first S.
        segments: the segments of queries [B or 1, T'] and keys [B or 1, S'], where the padding has a separate id, so
            that no token sees it; None if nothing was padded and no segments were given.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    segments: Segments | None


def pad_to_multiple(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    multiple: int | tuple[int, int],
    segments: Segments | None = None,
) -> Padded:
    """Query, key and value with lengths padded to multiples, and segment ids that separate the padding.

    A band of `attnops.masks.Mask.split` holds for the padded arrays too, since it is defined by indices; to a kernel
    that aligns its causal mask at the end, pass the band's numbers instead. `unpad` removes the padding.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        multiple: one for T and S, or a pair.
        segments: the mask's segments, bound; None for none.

    Raises:
        ValueError: a multiple is not positive.
    """
    multiples = (multiple, multiple) if isinstance(multiple, int) else multiple
    if min(multiples) < 1:
        raise ValueError(f"multiple={multiple} must be positive")
    T, S = query.shape[1], key.shape[1]
    more_q, more_kv = (-n % m for n, m in zip((T, S), multiples, strict=True))
    if not more_q and not more_kv:
        return Padded(query, key, value, segments)
    ids = (np.zeros((1, T), np.int32), np.zeros((1, S), np.int32))
    if segments is not None:
        ids = (segments.q_ids, segments.kv_ids)
    fresh = _fresh(*ids)
    q_ids, kv_ids = (_padded(x, more, fresh) for x, more in zip(ids, (more_q, more_kv), strict=True))
    return Padded(_padded(query, more_q, 0), _padded(key, more_kv, 0), _padded(value, more_kv, 0),
                  Segments(q_ids, kv_ids))  # fmt: skip


def unpad(output: OperationOutput, query_length: int, key_length: int | None = None) -> OperationOutput:
    """The first ``query_length`` queries of a result, and in its weights the first ``key_length`` keys.

    Args:
        output: attention_outputs [B, T', H, Dv]; or None: attention_weights [B, H, T', S'], logsumexp and max_logits
            [B, H, T'].
        query_length: T.
        key_length: S; None for all keys.
    """
    weights, by_query = output.attention_weights, (output.logsumexp, output.max_logits)
    return OperationOutput(
        output.attention_outputs[:, :query_length],
        None if weights is None else weights[:, :, :query_length, :key_length],
        *jax.tree.map(lambda x: x[:, :, :query_length], by_query),
    )


def _padded(x: Leaf, more: int, value: Leaf) -> Leaf:
    """``x`` with ``more`` elements of ``value`` appended along its second axis."""
    if not more:
        return x
    xp = numpy_of(x, value)
    x = xp.asarray(x)
    end = xp.broadcast_to(xp.asarray(value).astype(x.dtype), (x.shape[0], more, *x.shape[2:]))
    return xp.concatenate([x, end], axis=1)


def _fresh(q_ids: Leaf, kv_ids: Leaf) -> Leaf:
    """An id that no token has: the greatest plus 1, or the least minus 1 if the greatest is the dtype's maximum."""
    xp = numpy_of(q_ids, kv_ids)
    greatest, least = xp.maximum(q_ids.max(), kv_ids.max()), xp.minimum(q_ids.min(), kv_ids.min())
    largest = min(np.iinfo(x.dtype).max for x in (q_ids, kv_ids))
    return xp.where(greatest < largest, xp.minimum(greatest, largest - 1) + 1, least - 1)
