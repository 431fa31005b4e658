"""A layer of a decoder."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from attnops import OperationImpl
from attnops.masks import Mask
from attnops_caches import Rows
from attnops_lm.caching import LayerCache
from attnops_lm.config import Config
from attnops_lm.layers import MLP, Attention, MixtureOfExperts, Norm, SharedExperts, Tables
from attnops_lm.linear_layers import GatedDeltaNet, LinearLayer, Mamba2


class DecoderLayer(nnx.Module):
    """Attention or a linear layer, and an MLP or experts, each with a norm before it and a residual connection."""

    def __init__(self, config: Config, layer: int, operation: OperationImpl, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention: Attention | LinearLayer
        if config.layer_types[layer] == "linear_attention":
            assert config.linear is not None
            rule = GatedDeltaNet if config.linear.rule == "delta" else Mamba2
            self.attention = rule(config, operation.metadata, dtype=dtype, rngs=rngs)
        else:
            self.attention = Attention(config, layer, operation, dtype=dtype, rngs=rngs)
        self.mlp: MLP | MixtureOfExperts | SharedExperts
        if config.experts is None:
            self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        else:
            kind = MixtureOfExperts if config.experts.shared_size is None else SharedExperts
            self.mlp = kind(config, config.experts, dtype=dtype, rngs=rngs)
        M = config.hidden_size
        self.attention_norm, self.mlp_norm = (Norm(M, config, dtype=dtype) for _ in range(2))
        self.attention_post_norm = Norm(M, config, dtype=dtype) if config.post_norms else None
        self.mlp_post_norm = Norm(M, config, dtype=dtype) if config.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        tables: Tables | None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        query_lengths: jax.Array | None = None,
        rows: Rows | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """``x [B, T, M]`` to the same shape, and the cache with the tokens appended; None without a cache."""
        attention: Any = self.attention
        attended, cache = attention(self.attention_norm(x), tables, mask, cache, query_lengths, rows)
        x = x + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))
        computed = self.mlp(self.mlp_norm(x))
        return x + (computed if self.mlp_post_norm is None else self.mlp_post_norm(computed)), cache
