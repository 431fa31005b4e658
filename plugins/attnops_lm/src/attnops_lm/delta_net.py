"""Layers that keep a state of fixed size in place of keys and values: the gated delta rule, as in Qwen3-Next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Mask
from attnops_caches import Rows
from attnops_linear import CausalConv1d, LinearAttention, StateCache
from attnops_lm.config import Config
from attnops_lm.layers import Linear, Norm, Tables

_SHARED = ("interpret", "mode", "on_unsupported", "platform")


class GatedDeltaNet(nnx.Module):
    """A gated delta rule (Yang et al. 2024, arXiv:2412.06464): projections, a short convolution, the recurrence, and a
    gated norm.
    """

    def __init__(self, config: Config, metadata: OperationMetadata, *, dtype: Any, rngs: nnx.Rngs) -> None:
        assert config.delta_rule is not None
        self.sizes = sizes = config.delta_rule
        M, H, values = config.hidden_size, sizes.value_heads, sizes.value_heads * sizes.value_head_dim
        self.qkvz = Linear(M, sizes.channels + values, dtype=dtype, rngs=rngs)
        self.ba = Linear(M, 2 * H, dtype=dtype, rngs=rngs)
        taps = jax.random.normal(rngs.params(), (sizes.channels, 1, sizes.width), jnp.float32)
        self.conv = nnx.Param((taps * sizes.width**-0.5).astype(dtype))
        self.log_rate = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (H,), minval=0.01, maxval=16)).astype(dtype)
        )
        self.rate_bias = nnx.Param(jnp.ones(H, dtype))
        self.norm = Norm(sizes.value_head_dim, config.replace(unit_offset=False), dtype=dtype)
        self.o = Linear(values, M, dtype=dtype, rngs=rngs)
        self.set_metadata(metadata)

    def set_metadata(self, metadata: OperationMetadata) -> None:
        """Make the operations with those fields of a model's metadata that they read."""

        def read(*names: str) -> OperationMetadata:
            return OperationMetadata(**{name: getattr(metadata, name) for name in (*_SHARED, *names)})

        self.operation: LinearAttention = OperationRegistry.create(  # type: ignore[assignment]
            "linear_attention", read("axis_rules", "mesh", "precision")
        )
        self.convolution: CausalConv1d = OperationRegistry.create("causal_conv1d", read())  # type: ignore[assignment]

    def __call__(
        self,
        x: jax.Array,
        tables: Tables | None,
        mask: Mask | None,
        cache: StateCache | None,
        query_lengths: jax.Array | None,
        rows: Rows | None,
    ) -> tuple[jax.Array, StateCache | None]:
        """``x [B, T, M]`` to the same shape, and the cache after the tokens; positions, in ``tables``, are not used."""
        (B, T, _), sizes = x.shape, self.sizes
        K, H, D, Dv = sizes.key_heads, sizes.value_heads, sizes.head_dim, sizes.value_head_dim
        by_key = self.qkvz(x).reshape(B, T, K, -1)
        *qkv, z = jnp.split(by_key, [D, 2 * D, 2 * D + H // K * Dv], axis=-1)
        b, a = (y.reshape(B, T, H) for y in jnp.split(self.ba(x).reshape(B, T, K, -1), 2, axis=-1))
        mixed = jnp.concatenate([y.reshape(B, T, -1) for y in qkv], axis=-1)
        taps = self.conv[...][:, 0]
        given: dict[str, Any] = {"mask": mask, "query_lengths": query_lengths, "rows": rows}
        if cache is None:
            mixed = self.convolution(mixed, taps, mask=mask).outputs
        else:
            found, cache = self.convolution.step(mixed, taps, cache, **given)
            mixed = found.outputs
        query, key, value = jnp.split(jax.nn.silu(mixed), [K * D, 2 * K * D], axis=-1)
        arrays = _unit(query.reshape(B, T, K, D)), _unit(key.reshape(B, T, K, D)), value.reshape(B, T, H, Dv)
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        decay = -rate * jax.nn.softplus(a.astype(jnp.float32) + self.rate_bias[...].astype(jnp.float32))
        beta = jax.nn.sigmoid(b)
        if cache is None:
            output = self.operation(*arrays, decay=decay, beta=beta, mask=mask)
        else:
            output, cache = self.operation.step(*arrays, cache, decay=decay, beta=beta, **given)
        gate = jax.nn.silu(z.reshape(B, T, H, Dv).astype(jnp.float32))
        out = (self.norm(output.attention_outputs) * gate).astype(x.dtype)
        return self.o(out.reshape(B, T, H * Dv)), cache


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1, but for those near 0."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
