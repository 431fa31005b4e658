"""The model: a BERT encoder, the mean of its output over the tokens, scaled to unit length. Attention is an argument.

Dimensions: `B` sentences, `T` tokens, `H` heads, `D` head_dim, `M = H · D` model width, `F` feed-forward width,
`L` layers, `V` vocabulary, `P` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class AttentionOutput(Protocol):
    """The part of `attnops.OperationOutput` that the model reads."""

    @property
    def attention_outputs(self) -> jax.Array:
        """[B, T, H, D]."""
        ...


class EncoderAttention(Protocol):
    """The part of an attnops operation's interface that the model uses."""

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, /, *, mask: jax.Array) -> AttentionOutput:
        """q, k, v [B, T, H, D] and a boolean mask [B, 1, 1, T], True where a key may be attended to."""
        ...


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The hyperparameters that the weights' shapes do not determine. Hashable: it is static under `jit`."""

    num_heads: int  # divides the model width
    norm_epsilon: float  # added to the variance in every layer norm
    max_tokens: int  # longer sentences are truncated; at most P


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SentenceTokens:
    """A batch of sentences, padded on the right to its longest."""

    ids: jax.Array  # [B, T] int32
    mask: jax.Array  # [B, T] bool, True for a token and False for padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EncoderLinear:
    """`x @ kernel + bias`."""

    kernel: jax.Array  # [In, Out]
    bias: jax.Array  # [Out]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Mean 0 and variance 1 over the last axis, then scaled and shifted."""

    scale: jax.Array  # [M]
    bias: jax.Array  # [M]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """One encoder layer. `EncoderParams.layers` holds all of them in one, each leaf with a leading L."""

    query: EncoderLinear  # M -> M, and so are key, value and attention_output
    key: EncoderLinear
    value: EncoderLinear
    attention_output: EncoderLinear
    attention_norm: LayerNorm
    up: EncoderLinear  # M -> F
    down: EncoderLinear  # F -> M
    output_norm: LayerNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EncoderParams:
    """All the weights that an embedding depends on."""

    words: jax.Array  # [V, M]
    positions: jax.Array  # [P, M]
    segment: jax.Array  # [M]: a lone sentence is all of segment 0
    norm: LayerNorm
    layers: EncoderLayer  # stacked, for `lax.scan`


def embed(
    params: EncoderParams, config: EncoderConfig, tokens: SentenceTokens, attention: EncoderAttention
) -> jax.Array:
    """One unit vector per sentence: tokens [B, T] -> [B, M] float32.

    `config` and `attention` are static: close over them, then `jit` what is left. Activations need O(B·T·(M + F))
    memory; how much the scores need depends on the attention.
    """
    hidden = _encode(params, config, tokens, attention)
    weights = tokens.mask[..., None].astype(hidden.dtype)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)  # every sentence has at least [CLS] and [SEP]
    embeddings: jax.Array = mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
    return embeddings


def _encode(
    params: EncoderParams, config: EncoderConfig, tokens: SentenceTokens, attention: EncoderAttention
) -> jax.Array:
    """Tokens [B, T] -> hidden states [B, T, M], arbitrary at padding."""
    length = tokens.ids.shape[1]
    embedded = params.words[tokens.ids] + params.positions[:length] + params.segment
    hidden = _layer_norm(params.norm, embedded, config)
    mask = tokens.mask[:, None, None, :]

    # A scan, so that one layer is traced and compiled, not six.
    def step(hidden: jax.Array, layer: EncoderLayer) -> tuple[jax.Array, None]:
        return _layer(layer, config, hidden, mask, attention), None

    encoded, _ = jax.lax.scan(step, hidden, params.layers)
    return encoded


def _layer(
    layer: EncoderLayer, config: EncoderConfig, hidden: jax.Array, mask: jax.Array, attention: EncoderAttention
) -> jax.Array:
    """Hidden [B, T, M] and mask [B, 1, 1, T] -> [B, T, M]. The norms follow the residuals, as BERT has them."""
    heads = (*hidden.shape[:2], config.num_heads, -1)
    query, key, value = (
        _linear(part, hidden).reshape(heads) for part in (layer.query, layer.key, layer.value)
    )  # each [B, T, H, D]
    attended = attention(query, key, value, mask=mask).attention_outputs.reshape(hidden.shape)
    hidden = _layer_norm(layer.attention_norm, hidden + _linear(layer.attention_output, attended), config)
    # BERT's GELU is the exact one, by erf; JAX's default is the tanh approximation.
    expanded = jax.nn.gelu(_linear(layer.up, hidden), approximate=False)  # [B, T, F]
    return _layer_norm(layer.output_norm, hidden + _linear(layer.down, expanded), config)


def _linear(linear: EncoderLinear, x: jax.Array) -> jax.Array:
    # By default accelerators multiply float32 matrices in fewer bits (TF32, bfloat16 passes), which is far coarser than
    # the tolerance of this model's tests. The attention chooses the precision of its own products.
    return jnp.matmul(x, linear.kernel, precision="highest") + linear.bias


def _layer_norm(norm: LayerNorm, x: jax.Array, config: EncoderConfig) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + config.norm_epsilon) * norm.scale + norm.bias
