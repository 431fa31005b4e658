"""Layers that keep a state of fixed size in place of keys and values: the gated delta rule and Mamba-2."""

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


class LinearLayer(nnx.Module):
    """What linear layers share: a short convolution, and rates of decay."""

    def __init__(self, config: Config, metadata: OperationMetadata, *, dtype: Any, rngs: nnx.Rngs) -> None:
        assert config.linear is not None
        self.sizes = sizes = config.linear
        taps = jax.random.normal(rngs.params(), (sizes.channels, 1, sizes.width), jnp.float32)
        self.conv = nnx.Param((taps * sizes.width**-0.5).astype(dtype))
        self.conv_bias = nnx.Param(jnp.zeros(sizes.channels, dtype)) if sizes.conv_bias else None
        rates = jax.random.uniform(rngs.params(), (sizes.value_heads,), minval=0.01, maxval=16)
        self.log_rate = nnx.Param(jnp.log(rates).astype(dtype))
        self.step_bias = nnx.Param(jnp.ones(sizes.value_heads, dtype))
        self.set_metadata(metadata)

    def set_metadata(self, metadata: OperationMetadata) -> None:
        """Make the operations with the fields of a model's metadata that they read."""

        def read(*names: str) -> OperationMetadata:
            return OperationMetadata(**{name: getattr(metadata, name) for name in (*_SHARED, *names)})

        self.operation: LinearAttention = OperationRegistry.create(  # type: ignore[assignment]
            "linear_attention", read("axis_rules", "mesh", "precision")
        )
        self.convolution: CausalConv1d = OperationRegistry.create("causal_conv1d", read())  # type: ignore[assignment]

    def convolved(self, x: jax.Array, cache: StateCache | None, given: dict[str, Any]) -> tuple[jax.Array, Any]:
        """The convolution of [B, T, C] and its activation, and the cache with the tokens."""
        bias = None if self.conv_bias is None else self.conv_bias[...]
        if cache is None:
            output = self.convolution(x, self.conv[...][:, 0], bias=bias, mask=given["mask"])
        else:
            output, cache = self.convolution.step(x, self.conv[...][:, 0], cache, bias=bias, **given)
        return jax.nn.silu(output.outputs), cache

    def recurred(
        self,
        arrays: tuple[jax.Array, jax.Array, jax.Array],
        cache: StateCache | None,
        given: dict[str, Any],
        **options: Any,
    ) -> tuple[jax.Array, StateCache | None]:
        """The outputs [B, T, Hv, Dv] of the recurrence, and the cache after the tokens."""
        if cache is None:
            return self.operation(*arrays, mask=given["mask"], **options).attention_outputs, None
        query, key, value = arrays
        output, cache = self.operation.step(query, key, value, cache, **given, **options)
        return output.attention_outputs, cache

    def steps(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The size of each token's step, float32 [B, T, Hv], and its decay."""
        step = jax.nn.softplus(x.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32))
        return step, -jnp.exp(self.log_rate[...].astype(jnp.float32)) * step


class GatedDeltaNet(LinearLayer):
    """A gated delta rule (Yang et al. 2024, arXiv:2412.06464) with a gated norm, as in Qwen3-Next."""

    def __init__(self, config: Config, metadata: OperationMetadata, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, metadata, dtype=dtype, rngs=rngs)
        M, sizes = config.hidden_size, self.sizes
        self.qkvz = Linear(M, sizes.channels + sizes.values, dtype=dtype, rngs=rngs)
        self.ba = Linear(M, 2 * sizes.value_heads, dtype=dtype, rngs=rngs)
        self.norm = Norm(sizes.value_head_dim, config.replace(unit_offset=False), dtype=dtype)
        self.o = Linear(sizes.values, M, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, tables: Tables | None, mask: Mask | None, cache: StateCache | None,
        query_lengths: jax.Array | None, rows: Rows | None,
    ) -> tuple[jax.Array, StateCache | None]:  # fmt: skip
        """``x [B, T, M]`` to the same shape, and the cache after the tokens; positions, in ``tables``, are not used."""
        (B, T, _), sizes = x.shape, self.sizes
        K, H, D, Dv = sizes.key_heads, sizes.value_heads, sizes.head_dim, sizes.value_head_dim
        given: dict[str, Any] = {"mask": mask, "query_lengths": query_lengths, "rows": rows}
        *qkv, z = jnp.split(self.qkvz(x).reshape(B, T, K, -1), [D, 2 * D, 2 * D + H // K * Dv], axis=-1)
        b, a = (y.reshape(B, T, H) for y in jnp.split(self.ba(x).reshape(B, T, K, -1), 2, axis=-1))
        mixed, cache = self.convolved(jnp.concatenate([y.reshape(B, T, -1) for y in qkv], axis=-1), cache, given)
        query, key, value = jnp.split(mixed, [K * D, 2 * K * D], axis=-1)
        arrays = _unit(query.reshape(B, T, K, D)), _unit(key.reshape(B, T, K, D)), value.reshape(B, T, H, Dv)
        out, cache = self.recurred(arrays, cache, given, decay=self.steps(a)[1], beta=jax.nn.sigmoid(b))
        gate = jax.nn.silu(z.reshape(B, T, H, Dv).astype(jnp.float32))
        return self.o((self.norm(out) * gate).astype(x.dtype).reshape(B, T, -1)), cache


class Mamba2(LinearLayer):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state space whose keys and queries are B and C, as in Bamba."""

    def __init__(self, config: Config, metadata: OperationMetadata, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, metadata, dtype=dtype, rngs=rngs)
        M, sizes = config.hidden_size, self.sizes
        width = sizes.values + sizes.channels + sizes.value_heads
        self.inputs = Linear(M, width, bias=sizes.bias, dtype=dtype, rngs=rngs)
        self.skip = nnx.Param(jnp.ones(sizes.value_heads, dtype))
        self.eps, self.scale = config.rms_norm_eps, nnx.Param(jnp.ones(sizes.values, dtype))
        self.o = Linear(sizes.values, M, bias=sizes.bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, tables: Tables | None, mask: Mask | None, cache: StateCache | None,
        query_lengths: jax.Array | None, rows: Rows | None,
    ) -> tuple[jax.Array, StateCache | None]:  # fmt: skip
        """``x [B, T, M]`` to the same shape, and the cache after the tokens; positions, in ``tables``, are not used."""
        (B, T, _), sizes = x.shape, self.sizes
        K, H, D, Dv = sizes.key_heads, sizes.value_heads, sizes.head_dim, sizes.value_head_dim
        given: dict[str, Any] = {"mask": mask, "query_lengths": query_lengths, "rows": rows}
        gate, mixed, dt = jnp.split(self.inputs(x), [H * Dv, H * Dv + sizes.channels], axis=-1)
        mixed, cache = self.convolved(mixed, cache, given)
        value, key, query = jnp.split(mixed, [H * Dv, H * Dv + K * D], axis=-1)
        step, decay = self.steps(dt)
        wide = value.reshape(B, T, H, Dv).astype(jnp.float32)
        arrays = query.reshape(B, T, K, D), key.reshape(B, T, K, D), wide * step[..., None]
        out, cache = self.recurred(arrays, cache, given, decay=decay, scale=1.0)
        wide = out.astype(jnp.float32) + self.skip[...].astype(jnp.float32)[:, None] * wide
        wide = wide.reshape(B, T, -1) * jax.nn.silu(gate.astype(jnp.float32))
        groups = wide.reshape(B, T, K, -1)
        groups = groups * jax.lax.rsqrt(jnp.square(groups).mean(axis=-1, keepdims=True) + self.eps)
        return self.o(self.scale[...].astype(x.dtype) * groups.reshape(B, T, -1).astype(x.dtype)), cache


def _unit(x: jax.Array) -> jax.Array:
    """Vectors scaled to length 1, except vectors near 0."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
