"""Attention of packed rows over the engine's pages, on one device: one ``op.step``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops import OperationMetadata, OperationRegistry, Reason
from attnops.masks import SlidingWindow
from attnops_caches.engines.pages import CODECS, cache_of_pages, pages_of_cache
from attnops_caches.engines.refusals import refusal
from attnops_caches.rows import Rows

if TYPE_CHECKING:
    from attnops.masks import Mask


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is static about the scores of a layer.

    Attributes:
        scale: the scores' factor.
        window: keys that a query sees, itself included; None for all.
        causal: whether a query sees no later key.
        soft_cap: ``cap * tanh(score / cap)``; None for none.
        q_scale: queries are divided by it and rounded to the dtype of the pages; None: they are taken as they are.
        k_scale: what stored keys are multiplied by; None for 1.
        v_scale: what stored values are multiplied by; None for 1.
        updates: whether the new tokens are written; else another layer has written them.
    """

    scale: float
    window: int | None = None
    causal: bool = True
    soft_cap: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    updates: bool = True

    @property
    def mask(self) -> Mask:
        """The mask. As in the engine's own kernel, a window that is not causal also sees all later keys."""
        return SlidingWindow(None if self.window is None else self.window - 1, 0 if self.causal else None)


def attend(
    metadata: OperationMetadata,
    scores: Scores,
    pages: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    distribution: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output [N, H, D], of the query's dtype, and the pages with the new tokens.

    Args:
        metadata: the operation's.
        scores: how scores are made.
        pages: the layer's array, see `attnops_caches.engines.pages`; donate it, and it is updated in place.
        query: the tokens of all rows one after the other, [N, H, D].
        key: [N, K, D], of the dtype of the pages: 8-bit keys are divided by their scale.
        value: [N, K, D], likewise.
        lengths: tokens of each row, the new ones included, int32 [B].
        table: the pages of each row, int32 [B · M].
        starts: the first token of each row, and the end of the last, int32 [B + 1].
        distribution: int32 [3], the last of which is the number of rows; what follows is padding.
        sinks: one logit per head, [H]; None for none.

    Queries beyond the last row give 0.

    Raises:
        UnsupportedError: keys of another dtype than the pages'.
    """
    if not key.dtype == value.dtype == pages.dtype:
        raise refusal(Reason("key, value", f"{key.dtype}, {value.dtype}", f"must have the pages' dtype {pages.dtype}",
                             "quantise them before, as the engine's layers do"))  # fmt: skip
    B, D, dtype = lengths.shape[0], query.shape[2], query.dtype
    count, number = distribution[2], jnp.arange(B + 1, dtype=jnp.int32)
    starts = jnp.where(number <= count, starts, starts[count])
    lengths = jnp.where(number[:B] < count, lengths, 0)
    if scores.updates:
        lengths = lengths - (starts[1:] - starts[:-1])
    platform = metadata.platform or jax.default_backend()
    cache = cache_of_pages(pages, D, lengths, table.reshape(B, -1), dtype, platform)
    scale = scores.scale * (1.0 if scores.k_scale is None else scores.k_scale)
    if scores.q_scale is not None:
        query, scale = rounded(query / scores.q_scale, pages.dtype).astype(dtype), scale * scores.q_scale
    options = {"rows": Rows(starts, number[:B]), "mask": scores.mask, "softmax_scale": scale}
    options |= {} if scores.soft_cap is None else {"logits_soft_cap": scores.soft_cap}
    options |= {} if sinks is None else {"sinks": sinks}
    op: Any = OperationRegistry.create("flash", metadata)
    if scores.updates:
        out, cache = op.step(
            query[None], key.astype(cache.dtype)[None], value.astype(cache.dtype)[None], cache, **options
        )
        pages = pages_of_cache(cache, pages.dtype)
    else:
        out = op(query[None], cache, **options)
    result = out.attention_outputs[0]
    return (result if scores.v_scale is None else (result * scores.v_scale).astype(dtype)), pages


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` in an 8-bit dtype, clipped at its largest finite number; in a wider one, cast."""
    if jnp.dtype(dtype).name not in CODECS:
        return x.astype(dtype)
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    whole = x if jnp.issubdtype(dtype, jnp.floating) else jnp.round(x)
    return jnp.clip(whole, float(info.min), float(info.max)).astype(dtype)
