"""EngineAttention: the kernel of the engine's attention layers."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention

from attnops import OperationMetadata, Reason
from attnops_caches.engines import Scores, attend, refusal, rounded


class EngineAttention(FlashAttention):
    """attnops' ``flash`` as an attention backend of sglang-jax; the class above has the metadata of a batch.

    Attributes:
        operation: the metadata of the operation; None for the platform's own.
        max_pages: the most pages of a row.
    """

    operation: ClassVar[OperationMetadata | None] = None

    def __init__(self, *args: Any, max_pages: int, **options: Any) -> None:
        """See ``FlashAttention``."""
        super().__init__(*args, **options)
        self.max_pages = max_pages

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: Any,
        forward_batch: Any,
        token_to_kv_pool: Any,
        causal: int = 1,
        attention_sink: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The output [N, H · D], of the query's dtype, and the layer's array of pages with the new tokens.

        Args:
            q: queries of all rows one after the other, [N, H, D] or [N, H · D].
            k: [N, K, D] or [N, K · D]; rounded to the pool's dtype.
            v: [N, K, D] or [N, K · D]; the model pads values that are narrower than keys to D, and gets such an output.
            layer: the engine's ``RadixAttention``.
            forward_batch: the engine's; what it says of rows is in the backend's own metadata.
            token_to_kv_pool: `attnops_sglang.pool.EnginePages`, or a pool of several of them.
            causal: 0 for queries that also see later keys.
            attention_sink: one logit per head, [H]; None for none.

        Raises:
            UnsupportedError: a layer or a batch with what `layer_reasons` names.
        """
        found = self.forward_metadata
        if reasons := layer_reasons(layer, found, k.size == v.size):
            raise refusal(*reasons)
        D, table = layer.head_dim, found.page_indices
        window = layer.sliding_window_size if (layer.sliding_window_size or 0) > 0 else None
        if window and found.swa_page_indices is not None:
            table = found.swa_page_indices
        elif self.page_size == 1 and hasattr(token_to_kv_pool, "remap_cache_loc"):
            table = token_to_kv_pool.remap_cache_loc(table, layer.layer_id)
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        scores = Scores(
            scale=D**-0.5 if layer.scaling is None else float(layer.scaling), window=window,
            causal=bool(causal) and kind != "encoder_only", soft_cap=layer.logit_cap,
        )  # fmt: skip
        pages = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        q, k, v = (x.reshape(x.shape[0], -1, D) for x in (q, k, v))
        sinks = getattr(attention_sink, "value", attention_sink)
        rows, heads = self.attention_data_partition_axis, self.kv_partition_axis
        of_tokens, of_pages = PartitionSpec(rows, heads, None), PartitionSpec(rows, None, heads, None, None)
        args = (
            pages, q, k, v, found.seq_lens, table, found.cu_kv_lens, found.cu_q_lens, found.distribution,
            *(() if sinks is None else (sinks,)),
        )  # fmt: skip
        by_row = PartitionSpec(rows)
        specs = of_pages, of_tokens, of_tokens, of_tokens, by_row, by_row, by_row, by_row, by_row, PartitionSpec(heads)
        # On a TPU what the kernel does not serve is refused with the reasons, and never computed natively.
        missing: Any = "error" if jax.default_backend() == "tpu" else "native"
        output, pages = jax.shard_map(
            functools.partial(
                _attend, self.operation or OperationMetadata(on_unsupported=missing), scores, self.page_size,
                self.max_pages,
            ),
            in_specs=specs[: len(args)],
            out_specs=(of_tokens, of_pages),
            check_vma=False,
        )(*args)  # fmt: skip
        return output.reshape(output.shape[0], -1), pages


def layer_reasons(layer: Any, metadata: Any, has_one_width: bool) -> list[Reason]:
    """Why a layer of this batch is not served; ``has_one_width``: its values are as wide as its keys."""
    reasons = []
    if metadata.custom_mask is not None:
        reasons.append(Reason("custom_mask", "an array", "of trees of drafts is not served"))
    if (length := getattr(layer, "xai_temperature_len", -1)) > 0:
        reasons.append(Reason("xai_temperature_len", length, "scales queries by position, which is not served"))
    if not has_one_width:
        reasons.append(Reason("v_head_dim", layer.v_head_dim, f"must be head_dim={layer.head_dim}, or the model pads "
                              "values to it: a token's key and value are stored in one array"))  # fmt: skip
    return reasons


def _attend(
    metadata: OperationMetadata,
    scores: Scores,
    page_size: int,
    max_pages: int,
    pages: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    flat: jax.Array,
    bounds: jax.Array,
    starts: jax.Array,
    distribution: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attend` of one shard; ``flat``: the pages of all rows, row i's from ``bounds[i] / page_size`` on."""
    number = jnp.arange(min(max_pages, flat.shape[0]), dtype=jnp.int32)
    table = flat.at[bounds[:-1, None] // page_size + number].get(mode="fill", fill_value=0)
    key, value = (rounded(x, pages.dtype) for x in (key, value))
    return attend(
        metadata, scores, pages, query, key, value, lengths, table.reshape(-1), starts, distribution, sinks
    )  # fmt: skip
