"""The layers of a decoder, as flax.nnx modules.

Dimensions: `B` rows, `T` tokens, `M` width, `H` heads, `K` kv heads, `D` head_dim, `I` the MLP's width, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnops import OperationImpl
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import Cache, Rows
from attnops_lm.config import Config, Experts
from attnops_lm.rotary import apply_rotary

Tables = tuple[jax.Array, jax.Array]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Linear(nnx.Module):
    """``x @ kernel + bias``: [..., inputs] to [..., outputs].

    ``dot_general`` may be replaced, such as by `get_dot_general_by_bits`.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: Any, rngs: nnx.Rngs) -> None:
        self.inputs, self.outputs = inputs, outputs
        kernel = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * inputs**-0.5
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.dot_general: Callable[..., jax.Array] = jax.lax.dot_general

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        out = self.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), precision=precision(x))
        return out if self.bias is None else out + self.bias[...].astype(x.dtype)


def precision(x: jax.Array) -> str | None:
    """The precision of a matrix product: full float32 for float32 values, else the default."""
    return "highest" if x.dtype == jnp.float32 else None


class Norm(nnx.Module):
    """Root mean square normalisation over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""

    def __init__(self, size: int, config: Config, *, dtype: Any) -> None:
        self.eps, self.unit_offset = config.rms_norm_eps, config.unit_offset
        self.scale = nnx.Param(jnp.zeros(size, dtype) if config.unit_offset else jnp.ones(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + (1.0 if self.unit_offset else 0.0)
        return (wide * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions: projections, the operation, and the output's projection."""

    def __init__(self, config: Config, layer: int, operation: OperationImpl, *, dtype: Any, rngs: nnx.Rngs) -> None:
        M, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.operation = operation
        self.kind, self.window = config.layer_types[layer], config.window_of(layer)
        self.interleaved = config.rotary_of(self.kind).interleaved
        options = {"softmax_scale": config.softmax_scale, "logits_soft_cap": config.attention_soft_cap}
        self.options = tuple((name, value) for name, value in options.items() if value is not None)
        self.is_gated = config.attention_gate
        self.q = Linear(M, H * D * (1 + self.is_gated), bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k = Linear(M, K * D, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v = Linear(M, K * D, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Linear(H * D, M, bias=config.output_bias, dtype=dtype, rngs=rngs)
        self.q_norm = Norm(D, config, dtype=dtype) if config.qk_norm else None
        self.k_norm = Norm(D, config, dtype=dtype) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(H, dtype)) if config.sinks else None

    def __call__(
        self,
        x: jax.Array,
        tables: Tables,
        mask: Mask | None,
        cache: Cache | None,
        query_lengths: jax.Array | None,
        rows: Rows | None,
    ) -> tuple[jax.Array, Cache | None]:
        """``x [B, T, M]`` to the same shape, and the new cache. With a cache, the tokens are appended to it first."""
        B, T, _ = x.shape
        query, *gate = jnp.split(self.q(x).reshape(B, T, self.heads, -1), 1 + self.is_gated, axis=-1)
        key = self.k(x).reshape(B, T, self.kv_heads, self.head_dim)
        value = self.v(x).reshape(B, T, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = apply_rotary(query, *tables, interleaved=self.interleaved)
        key = apply_rotary(key, *tables, interleaved=self.interleaved)
        options: dict[str, Any] = dict(self.options)
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        visible = Causal() if mask is None else Causal() & mask
        if self.window is not None:
            visible = visible & SlidingWindow(self.window - 1, 0)
        if cache is None:
            out = self.operation(query, key, value, mask=visible, **options)
        else:
            out, cache = self.operation.step(
                query, key, value, cache, mask=visible, query_lengths=query_lengths, rows=rows, **options
            )
        attended = out.attention_outputs * jax.nn.sigmoid(gate[0]) if gate else out.attention_outputs
        return self.o(attended.reshape(B, T, self.heads * self.head_dim)), cache


class MLP(nnx.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202): [..., M] to [..., M]."""

    def __init__(self, config: Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        M, I = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate = Linear(M, I, dtype=dtype, rngs=rngs)
        self.up = Linear(M, I, dtype=dtype, rngs=rngs)
        self.down = Linear(I, M, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class MixtureOfExperts(nnx.Module):
    """A token's output is the sum of its experts' outputs, weighted by the router: [..., M] to [..., M].

    Every expert computes every token, which is E / per_token times the necessary work; no tokens are moved.
    """

    def __init__(self, config: Config, experts: Experts, *, dtype: Any, rngs: nnx.Rngs) -> None:
        M, I, E = config.hidden_size, config.intermediate_size, experts.count
        self.experts = experts

        self.router = Linear(M, E, bias=True, dtype=dtype, rngs=rngs)
        self.gate_up, self.gate_up_bias = _kernels(E, M, 2 * I, dtype, rngs), nnx.Param(jnp.zeros((E, 2 * I), dtype))
        self.down, self.down_bias = _kernels(E, I, M, dtype, rngs), nnx.Param(jnp.zeros((E, M), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        scores, chosen = jax.lax.top_k(self.router(x), self.experts.per_token)
        share = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
        weights = _by_expert(share, chosen, self.experts.count).astype(x.dtype)
        gate_up = jnp.einsum("...m,emi->...ei", x, self.gate_up[...].astype(x.dtype), precision=precision(x))
        gate_up = gate_up + self.gate_up_bias[...].astype(x.dtype)
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        limit = self.experts.limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(self.experts.alpha * gate)
        out = jnp.einsum("...ei,eim->...em", inner, self.down[...].astype(x.dtype), precision=precision(x))
        out = out + self.down_bias[...].astype(x.dtype)
        return jnp.einsum("...em,...e->...m", out, weights, precision=precision(x))


class SharedExperts(nnx.Module):
    """A token's output is the sum of its experts' outputs, weighted by the router, and the output of an expert that all
    tokens share, weighted by a gate: [..., M] to [..., M]. Every expert computes every token, as in `MixtureOfExperts`.
    """

    def __init__(self, config: Config, experts: Experts, *, dtype: Any, rngs: nnx.Rngs) -> None:
        M, I, E = config.hidden_size, config.intermediate_size, experts.count
        self.experts, self.activation = experts, config.activation
        self.router = Linear(M, E, dtype=dtype, rngs=rngs)
        self.gate_up, self.down = _kernels(E, M, 2 * I, dtype, rngs), _kernels(E, I, M, dtype, rngs)
        assert experts.shared_size is not None
        self.shared = MLP(config.replace(intermediate_size=experts.shared_size), dtype=dtype, rngs=rngs)
        self.shared_gate = Linear(M, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        share, chosen = jax.lax.top_k(probabilities, self.experts.per_token)
        if self.experts.normalised:
            share = share / share.sum(axis=-1, keepdims=True)
        weights = _by_expert(share, chosen, self.experts.count).astype(x.dtype)
        gate_up = jnp.einsum("...m,emi->...ei", x, self.gate_up[...].astype(x.dtype), precision=precision(x))
        gate, up = jnp.split(gate_up, 2, axis=-1)
        inner = ACTIVATIONS[self.activation](gate) * up * weights[..., None]
        out = jnp.einsum("...ei,eim->...m", inner, self.down[...].astype(x.dtype), precision=precision(x))
        return out + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)


def _kernels(experts: int, inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    """A random matrix for each expert, [E, inputs, outputs]."""
    values = jax.random.normal(rngs.params(), (experts, inputs, outputs), jnp.float32)
    return nnx.Param((values * inputs**-0.5).astype(dtype))


def _by_expert(share: jax.Array, chosen: jax.Array, count: int) -> jax.Array:
    """The weight of every expert, float32 [..., E], from the chosen ones' weights [..., n]; 0 for others."""
    one_hot = jax.nn.one_hot(chosen, count, dtype=jnp.float32)
    return jnp.einsum("...n,...ne->...e", share, one_hot, precision="highest")
