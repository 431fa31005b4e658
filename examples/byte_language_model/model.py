"""The model: a pre-norm transformer over bytes, with rotary positions and grouped kv heads. Attention is an argument.

Dimensions: `B` rows, `T` tokens, `H` heads, `K` kv heads, `D` head_dim, `M = H · D` width, `F = 4 · M` feed-forward
width, `L` layers, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attnops_lm.rotary import RotaryConfig, apply_rotary, rotary_tables

from .attention import Attention
from .packing import VOCABULARY, PackedRows


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model's shape. Hashable: it is static under `jit`."""

    layers: int = 4
    width: int = 128  # a multiple of heads
    heads: int = 4
    kv_heads: int = 2  # divides heads

    @property
    def head_dim(self) -> int:
        """D."""
        return self.width // self.heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block. `Params.layers` holds all of them in one, each leaf with a leading L."""

    attention_norm: jax.Array  # [M]
    query: jax.Array  # [M, H · D]
    key: jax.Array  # [M, K · D]
    value: jax.Array  # [M, K · D]
    attention_output: jax.Array  # [H · D, M]
    feed_forward_norm: jax.Array  # [M]
    up: jax.Array  # [M, F]
    down: jax.Array  # [F, M]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All the weights, float32."""

    tokens: jax.Array  # [V, M]
    layers: Layer  # stacked, for `lax.scan`
    norm: jax.Array  # [M]
    head: jax.Array  # [M, V]


def init(config: Config, seed: int) -> Params:
    """Normal weights of variance ``1 / inputs``; of those that write to the residual, ``1 / (2 * L * inputs)``."""
    L, M, F, kv = config.layers, config.width, 4 * config.width, config.kv_heads * config.head_dim
    generator = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float) -> jax.Array:
        return jnp.asarray(deviation * generator.standard_normal(shape), jnp.float32)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    return Params(
        tokens=normal(VOCABULARY, M, deviation=1.0),
        layers=Layer(
            attention_norm=zeros(L, M),
            query=normal(L, M, M, deviation=M**-0.5),
            key=normal(L, M, kv, deviation=M**-0.5),
            value=normal(L, M, kv, deviation=M**-0.5),
            attention_output=normal(L, M, M, deviation=(2 * L * M) ** -0.5),
            feed_forward_norm=zeros(L, M),
            up=normal(L, M, F, deviation=M**-0.5),
            down=normal(L, F, M, deviation=(2 * L * F) ** -0.5),
        ),
        norm=zeros(M),
        head=normal(M, VOCABULARY, deviation=M**-0.5),
    )


def logits(params: Params, config: Config, batch: PackedRows, attention: Attention) -> jax.Array:
    """The logits of the token that follows each token of a batch [B, T]: [B, T, V] float32. ``batch.predicts`` is not
    used.
    """
    rotary = RotaryConfig(head_dim=config.head_dim)
    tables = rotary_tables(rotary, batch.positions)  # once, for every layer

    # A scan, so that one layer is traced and compiled, not L.
    def step(hidden: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
        hidden = hidden + _attend(layer, config, _norm(layer.attention_norm, hidden), batch.segments, tables, attention)
        expanded = jax.nn.gelu(_matmul(_norm(layer.feed_forward_norm, hidden), layer.up))  # [B, T, F]
        return hidden + _matmul(expanded, layer.down), None

    hidden, _ = jax.lax.scan(step, params.tokens[batch.tokens], params.layers)
    return _matmul(_norm(params.norm, hidden), params.head)


def loss(params: Params, config: Config, batch: PackedRows, attention: Attention) -> jax.Array:
    """The loss in nats per byte, averaged over the tokens of the batch whose next token is a target."""
    log_probabilities = jax.nn.log_softmax(logits(params, config, batch, attention))
    targets = jnp.roll(batch.tokens, -1, axis=1)  # a row's last token would wrap around; it predicts nothing
    nats = -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]  # [B, T]
    mean: jax.Array = jnp.where(batch.predicts, nats, 0).sum() / batch.predicts.sum()
    return mean


def _attend(
    layer: Layer,
    config: Config,
    hidden: jax.Array,
    segments: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    attention: Attention,
) -> jax.Array:
    """Hidden [B, T, M] and segments [B, T] -> [B, T, M]."""
    B, T, M = hidden.shape
    query, key, value = (
        _matmul(hidden, weights).reshape(B, T, -1, config.head_dim) for weights in (layer.query, layer.key, layer.value)
    )  # [B, T, H, D], [B, T, K, D], [B, T, K, D]
    attended = attention(apply_rotary(query, *tables), apply_rotary(key, *tables), value, segments)
    return _matmul(attended.reshape(B, T, M), layer.attention_output)


def _matmul(x: jax.Array, weights: jax.Array) -> jax.Array:
    # By default accelerators multiply float32 matrices in fewer bits (TF32, bfloat16 passes), which is far coarser than
    # the allowed difference of curves. The attention chooses the precision of its own products.
    return jnp.matmul(x, weights, precision="highest")


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMS norm over the last axis; ``scale`` is added to 1, so that weight decay may move it towards 0."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6) * (1 + scale)
