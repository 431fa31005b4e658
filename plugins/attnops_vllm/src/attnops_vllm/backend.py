"""EngineAttention: the kernel of the engine's attention layers, and the layout of their pages."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from tpu_inference.layers.common.attention_backend import AttentionBackend
from tpu_inference.layers.common.sharding import ShardingAxisName

from attnops import OperationMetadata, Reason
from attnops_caches.engines import Scores, attend, pages_shape, refusal

if TYPE_CHECKING:
    from attnops.typing import DType


class EngineAttention(AttentionBackend):
    """attnops' ``flash`` as an attention backend of tpu-inference.

    Attributes:
        metadata: the operation's.
        soft_cap: the soft cap of calls that give none; None for none.
    """

    def __init__(self, metadata: OperationMetadata | None = None, soft_cap: float | None = None) -> None:
        # On a TPU what the kernel does not serve is refused with the reasons, and never computed natively.
        missing: Any = "error" if jax.default_backend() == "tpu" else "native"
        self.metadata = OperationMetadata(on_unsupported=missing) if metadata is None else metadata
        self.soft_cap = soft_cap

    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: DType
    ) -> tuple[int, ...]:
        """The shape of one shard of a layer's array, see `attnops_caches.engines.pages_shape`."""
        return pages_shape(total_num_pages, page_size, num_kv_heads, head_dim, kv_dtype)

    def attention(
        self,
        kv_cache: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        md: Any,
        shared_md: Any,
        mesh: Mesh,
        *,
        head_dim_original: int,
        sm_scale: float,
        attention_chunk_size: int | None,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        sinks: jax.Array | None,
        update_kv_cache: bool,
        use_causal_mask: bool,
        attn_logits_soft_cap: float | None,
        decode_query_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """The array of pages and the output [T, N, H], see `AttentionBackend.attention` of tpu-inference.

        Rows of any number of queries are one call, so that ``decode_query_size`` changes nothing; ``sm_scale`` is that
        of ``head_dim_original``.

        Raises:
            UnsupportedError: a mesh that shards the context; heads that it does not divide; see also `attend`.
        """
        heads = _size(mesh, ShardingAxisName.ATTN_HEAD)
        for name in ("dcp", "pcp"):
            if mesh.shape.get(name, 1) > 1:
                raise refusal(Reason("mesh", dict(mesh.shape), f"shards the context by {name}, which is not served"))
        if k.shape[1] % heads:
            if heads % k.shape[1]:
                raise refusal(Reason("mesh", dict(mesh.shape), f"shards heads in {heads}, and the layer has "
                                     f"{k.shape[1]} kv heads: one must divide the other",
                                     "change --tensor-parallel-size"))  # fmt: skip
            k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
        cap = self.soft_cap if attn_logits_soft_cap is None else attn_logits_soft_cap
        scores = Scores(
            scale=sm_scale, window=attention_chunk_size, causal=use_causal_mask, soft_cap=cap,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, updates=update_kv_cache,
        )  # fmt: skip
        rows, by_head = ShardingAxisName.ATTN_DATA, ShardingAxisName.ATTN_HEAD
        of_tokens, of_pages = PartitionSpec(rows, by_head, None), PartitionSpec(rows, None, by_head, None, None)
        by_row = PartitionSpec(rows)
        args = (
            kv_cache, q, k, v,
            shared_md.seq_lens, md.block_tables, shared_md.query_start_loc, shared_md.request_distribution,
            *(() if sinks is None else (sinks,)),
        )  # fmt: skip
        specs = of_pages, of_tokens, of_tokens, of_tokens, by_row, by_row, by_row, by_row
        output, pages = jax.shard_map(
            functools.partial(attend, self.metadata, scores),
            mesh=mesh,
            in_specs=(*specs, PartitionSpec(by_head))[: len(args)],
            out_specs=(of_tokens, of_pages),
            check_vma=False,
        )(*args)
        return pages, output


def _size(mesh: Mesh, axes: str | tuple[str, ...] | None) -> int:
    """How many shards some mesh axes make."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape.get(name, 1) for name in names)
