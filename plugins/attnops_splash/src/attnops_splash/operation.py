"""The operation ``splash``: which calls JAX's kernel serves, and how it is called; an example of a wrapped kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import jax
import jax.numpy as jnp

from attnops import AttentionRequest, Limits, OperationOutput, Rank, Reason, Request, UnsupportedError
from attnops.kernels import (
    equally_varying,
    once_differentiable,
    pad_to_multiple,
    repair_empty_rows,
    unpad,
    varies,
    zero_unseen,
)
from attnops.operations.flash import FlashAttention

if TYPE_CHECKING:
    from attnops.masks import Mask

# Tile sizes, the largest first; lengths are padded to a multiple of the last.
TILES: Final = (512, 256, 128)


class SplashAttention(FlashAttention):
    """``jax.experimental.pallas.ops.tpu.splash_attention`` on TPUs; the core's native `flash` serves all other calls.

    It serves masks that are a band (causal, windows) and segments, grouped heads, T ≠ S, any lengths, and a soft cap,
    forward and backward, in O(T + S) memory. Tiles are the largest of `TILES` that divide the padded lengths; the
    metadata's ``block_q`` and ``block_k`` have no effect. `auto` never picks it.
    """

    api_version = 2
    limits: ClassVar[Mapping[str, Limits]] = {
        **FlashAttention.limits,
        # float32 is refused: the kernel multiplies it at the TPU's default precision, which is bfloat16.
        "tpu": Limits(dtypes=frozenset({"bfloat16"}), same_dtype=True, max_head_dim=256),
    }

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name ``"splash"``."""
        return "splash"

    @classmethod
    def rank(cls, request: Request) -> Rank | None:
        """None: `auto` never picks it, since `flash` of attnops-tpu serves more calls."""
        return None

    def unsupported(self, request: Request) -> Iterator[Reason]:
        """Reasons that limits can't declare. The dispatcher refuses options that `forward_tpu` does not name."""
        assert isinstance(request, AttentionRequest)
        structure = request.mask_structure
        if structure.rest:
            rule = "must be a band (causal, a window) the same in every batch and head, segments, or both"
            yield Reason("mask", request.mask, rule)

    def forward_tpu(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
    ) -> OperationOutput:
        """Attention of query [B, T, H, D], key [B, S, K, D] and value [B, S, K, Dv]; the output is [B, T, H, Dv]."""
        if varies((query, key, value)):
            rule = "must not vary over mesh axes: the kernel does not state the types of its outputs"
            reason = Reason("query", "varying", rule, "jax.shard_map(..., check_vma=False)")
            raise UnsupportedError(f"splash can't serve jax.shard_map with check_vma=True: {reason}", [reason])
        T, S = query.shape[1], key.shape[1]
        band, segments = ((None, None), None) if mask is None else (mask.split().band.limits, mask.split().segments)
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        query, key, value = zero_unseen(query, key, value, mask)  # hidden tokens may hold NaN
        padded = pad_to_multiple(query, key, value, TILES[-1], segments)  # the padding is a segment
        ids = None if padded.segments is None else (padded.segments.q_ids, padded.segments.kv_ids)
        query, key, value, ids = equally_varying((padded.query, padded.key, padded.value, ids))
        run = once_differentiable(attend, "splash attention has no second derivative")
        out = run(query, key, value, ids, band, scale, logits_soft_cap, self.metadata.interpret)
        return repair_empty_rows(unpad(OperationOutput(out), T, S), mask, S)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: tuple[Any, Any] | None,
    band: tuple[int | None, int | None], scale: float, soft_cap: float | None, interpret: bool,
) -> jax.Array:  # fmt: skip
    """The kernel's output, [B, T, H, Dv].

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        ids: segment ids of queries [B or 1, T] and of keys [B or 1, S], int32; None for none.
        band: (low, high): query i sees key j where ``low <= i - j <= high``; None for no limit.
        scale: the softmax scale, by which the query is multiplied, since the kernel has none.
        soft_cap: the soft cap of the scores; None for none.
        interpret: run in Pallas's interpreter.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # imported only for a call

    (B, T, H, _), S = query.shape, key.shape[1]
    low, high = band
    window = high, None if low is None else -low
    mask: Any = splash.FullMask((T, S)) if band == (None, None) else splash.LocalMask((T, S), window, offset=0)
    q, k = (next(tile for tile in TILES if length % tile == 0) for length in (T, S))
    sizes = splash.BlockSizes(
        block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_q_dq=q, block_kv_dq=k,
    )  # fmt: skip
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        attn_logits_soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    arrays = ((query.astype(jnp.float32) * scale).astype(query.dtype), key, value)  # the scale itself is not rounded
    transposed = [x.swapaxes(1, 2) for x in arrays]  # [B, H, T, D]
    if ids is None:
        out = jax.vmap(kernel)(*transposed)
    else:
        segments = splash.SegmentIds(*(jnp.broadcast_to(x, (B, x.shape[1])) for x in ids))
        out = jax.vmap(kernel)(*transposed, segments)
    return jnp.asarray(out).swapaxes(1, 2)
