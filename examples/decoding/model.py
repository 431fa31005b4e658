"""The model: a pre-norm transformer with rotary positions and grouped kv heads, weights drawn from a fixed seed.

Dimensions: `B` rows, `T` tokens, `H` heads, `K` kv heads, `D` head_dim, `M = H · D` width, `V` vocabulary, `L` layers.
How a layer attends is an argument of `logits`: over a cache, or over the keys and values of all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attnops_caches import Cache

from attnops import OperationImpl
from attnops.masks import Causal, Mask
from attnops.models.rotary import RotaryConfig, apply_rotary, rotary_tables

V, L, H, K, D = 256, 2, 4, 2, 32
M = H * D

# (layer, query [B, T, H, D], key [B, T, K, D], value [B, T, K, D]) -> [B, T, H, D]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class Layer(NamedTuple):
    """One block: weights [inputs, outputs]."""

    qkv: jax.Array
    output: jax.Array
    up: jax.Array
    down: jax.Array


class Params(NamedTuple):
    """All the weights, float32."""

    tokens: jax.Array  # [V, M]
    layers: tuple[Layer, ...]
    head: jax.Array  # [M, V]


class Generated(NamedTuple):
    """What greedy decoding gives."""

    tokens: jax.Array  # int32 [B, N], those after the prompt
    logits: jax.Array  # [B, V], after the prompt
    overflowed: jax.Array  # bool [B]


def init(seed: int = 0) -> Params:
    """Normal weights of variance ``1 / inputs``."""
    generator = np.random.default_rng(seed)

    def normal(rows: int, columns: int, variance: float) -> jax.Array:
        return jnp.asarray(generator.normal(0, variance**0.5, (rows, columns)), jnp.float32)

    def layer() -> Layer:
        shapes = ((M, (H + 2 * K) * D), (M, M), (M, 4 * M), (4 * M, M))
        return Layer(*(normal(*shape, 1 / shape[0]) for shape in shapes))

    return Params(normal(V, M, 1.0), tuple(layer() for _ in range(L)), normal(M, V, 1 / M))


def logits(params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """What comes after each token: tokens and positions [B, T] -> [B, T, V]."""
    B, T = tokens.shape
    tables = rotary_tables(RotaryConfig(head_dim=D), positions)
    hidden = params.tokens[tokens]
    for i, layer in enumerate(params.layers):
        qkv = _matmul(_norm(hidden), layer.qkv).reshape(B, T, H + 2 * K, D)
        query, key, value = jnp.split(qkv, (H, H + K), axis=2)
        attended = attend(i, apply_rotary(query, *tables), apply_rotary(key, *tables), value)
        hidden = hidden + _matmul(attended.reshape(B, T, M), layer.output)
        hidden = hidden + _matmul(jax.nn.gelu(_matmul(_norm(hidden), layer.up)), layer.down)
    return _matmul(_norm(hidden), params.head)


@functools.partial(jax.jit, static_argnames=("op", "count", "chunk"), donate_argnames="caches")
def generate(
    params: Params,
    caches: tuple[Cache, ...],
    prompt: jax.Array,
    lengths: jax.Array,
    *,
    op: OperationImpl,
    count: int,
    chunk: int,
) -> tuple[Generated, tuple[Cache, ...]]:
    """Greedy decoding over caches, one a layer, which are donated and updated in place.

    Args:
        params: the weights.
        caches: empty.
        prompt: int32 [B, P]; of row b the first ``lengths[b]`` tokens are real.
        lengths: int32 [B].
        op: the attention.
        count: N, tokens to generate.
        chunk: tokens of the prompt at a time, a divisor of P.
    """

    def step(caches: tuple[Cache, ...], tokens: jax.Array, real: jax.Array) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Tokens [B, T], the first ``real[b]`` of row b -> the logits after the last of them [B, V]."""
        grown = list(caches)

        def attend(i: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            out, grown[i] = op.step(query, key, value, caches[i], mask=Causal(), query_lengths=real)
            return out.attention_outputs

        positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        scores = logits(params, tokens, positions, attend)
        return _at(scores, jnp.maximum(real - 1, 0)), tuple(grown)

    def prefill(carry: Any, i: jax.Array) -> tuple[Any, None]:
        caches, scores = carry
        real = jnp.clip(lengths - i * chunk, 0, chunk)
        tokens = jax.lax.dynamic_slice_in_dim(prompt, i * chunk, chunk, axis=1)
        new, caches = step(caches, tokens, real)
        return (caches, jnp.where(real[:, None] > 0, new, scores)), None

    def decode(carry: Any, _: None) -> tuple[Any, jax.Array]:
        caches, scores = carry
        token = scores.argmax(-1).astype(jnp.int32)
        scores, caches = step(caches, token[:, None], jnp.ones_like(lengths))
        return (caches, scores), token

    begin = (caches, jnp.zeros((prompt.shape[0], V), jnp.float32))
    (caches, after), _ = jax.lax.scan(prefill, begin, jnp.arange(prompt.shape[1] // chunk))
    (caches, _), tokens = jax.lax.scan(decode, (caches, after), length=count)
    return Generated(tokens.T, after, caches[0].overflowed), caches


@functools.partial(jax.jit, static_argnames=("op", "mask", "count"))
def generate_uncached(
    params: Params, prompt: jax.Array, lengths: jax.Array, *, op: OperationImpl, mask: Mask, count: int
) -> Generated:
    """The same tokens without a cache: every token is a pass over all tokens."""
    tokens = jnp.pad(prompt, ((0, 0), (0, count)))  # a row's own tokens follow its prompt
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(_: int, *qkv: jax.Array) -> jax.Array:
        return op(*qkv, mask=mask).attention_outputs

    def decode(tokens: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        scores = _at(logits(params, tokens, positions, attend), lengths + i - 1)
        token = scores.argmax(-1).astype(jnp.int32)
        return tokens.at[jnp.arange(len(lengths)), lengths + i].set(token), (token, scores)

    _, (written, scores) = jax.lax.scan(decode, tokens, jnp.arange(count))
    return Generated(written.T, scores[0], jnp.zeros(len(lengths), bool))


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """[B, T, V] at index [B] -> [B, V]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _matmul(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.matmul(x, weights, precision="highest")


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
