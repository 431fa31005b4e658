"""vanilla: the whole attention contract in plain jnp, the reference on every platform."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops.dispatch.operation import forward_for
from attnops.dispatch.output import OperationOutput
from attnops.dispatch.request import Request
from attnops.dropout import dropout_mask
from attnops.masks.base import Mask
from attnops.operations.unseen import hide_unseen


class VanillaAttention(OperationImpl):
    """Softmax attention as it is written in the papers; O(B · H · T · S) memory, forward and backward.

    All of it is computed in float32. Serves every request of the contract on every platform.
    """

    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None, linear_memory=False)}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "vanilla"

    @classmethod
    def preference(cls, request: Request) -> float | None:
        if forward_for(cls, request.platform) != "native":
            return super().preference(request)  # a plugin's kernel, in a subclass
        return -2.0  # the last resort: right, but with T × S memory

    def forward_native(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_lse: bool = False,
        return_weights: bool = False,
    ) -> OperationOutput:
        """See `OperationImpl.__call__`. Heads are grouped as [K, G], so that no kv head is repeated."""
        B, T, H, D = query.shape
        _, S, K, Dv = value.shape
        out_dtype = query.dtype
        allowed = None if mask is None else mask.dense(B, H, T, S)
        if mask is not None and allowed is not None and mask.hides_tokens(T, S):
            query, key, value = hide_unseen(query, key, value, allowed)
        q = query.astype(jnp.float32).reshape(B, T, K, H // K, D)
        k, v = key.astype(jnp.float32), value.astype(jnp.float32)
        precision = lax.Precision.HIGHEST if self.metadata.precision is None else self.metadata.precision

        scores = _products(q, k, precision) * (D**-0.5 if softmax_scale is None else softmax_scale)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        if isinstance(bias, Bias):
            indices = (jnp.arange(n).reshape([-1 if a == own else 1 for a in range(4)]) for own, n in
                       enumerate((B, H, T, S)))  # fmt: skip
            scores = bias.apply(scores.reshape(B, H, T, S), *indices).reshape(scores.shape)
        elif bias is not None:
            scores = scores + _group(bias.astype(jnp.float32), K)
        if allowed is not None:
            scores = jnp.where(_group(allowed, K), scores, -jnp.inf)
        # Only a mask, or a bias of −inf, can leave a row with nothing to attend to.
        may_be_empty = mask is not None or bias is not None
        sink = None if sinks is None else sinks.astype(jnp.float32).reshape(K, H // K, 1, 1)

        numerator, denominator, maximum = _exponentials(scores, sink, may_be_empty)
        weights = numerator / (jnp.where(denominator > 0, denominator, 1.0) if may_be_empty else denominator)
        if dropout_key is not None:
            prob = self.metadata.dropout_prob
            keep = dropout_mask(dropout_key, prob, (B, H, T, S)).reshape(weights.shape)
            weights = jnp.where(keep, weights / (1 - prob), 0.0)
        out = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=precision).reshape(B, T, H, Dv)
        return OperationOutput(
            out.astype(out_dtype),
            weights.reshape(B, H, T, S).astype(out_dtype) if return_weights else None,
            _logsumexp(scores, denominator, maximum, may_be_empty).reshape(B, H, T) if return_lse else None,
        )


def _products(q: jax.Array, k: jax.Array, precision: lax.Precision) -> jax.Array:
    """q·k, [B, K, G, T, S], of [B, T, K, G, D] and [B, S, K, D].

    128 features at a time: a CPU's matrix product adds them one by one, and the longer sum of a large head_dim is
    further off in float32 than the tolerance rule allows.
    """
    parts = (slice(first, first + 128) for first in range(0, q.shape[-1], 128))
    products = (jnp.einsum("btkgd,bskd->bkgts", q[..., p], k[..., p], precision=precision) for p in parts)
    return functools.reduce(jnp.add, products)


def _group(x: jax.Array, K: int) -> jax.Array:
    """[B, H, T, S] to [B, K, G, T, S], where each dimension may be 1."""
    B, H, T, S = x.shape
    return x.reshape(B, 1, 1, T, S) if H == 1 else x.reshape(B, K, H // K, T, S)


def _exponentials(scores: jax.Array, sink: jax.Array | None, may_be_empty: bool) -> tuple[jax.Array, Any, jax.Array]:
    """exp(scores − maximum), its sum over the keys with the sink's share, and the maximum; rows may hold only −inf."""
    maximum = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    if sink is not None:
        maximum = jnp.maximum(maximum, lax.stop_gradient(sink))
    if may_be_empty:
        maximum = jnp.where(maximum > -jnp.inf, maximum, 0.0)
    numerator = jnp.exp(scores - maximum)
    denominator = numerator.sum(axis=-1, keepdims=True)
    if sink is not None:
        denominator = denominator + jnp.exp(sink - maximum)
    return numerator, denominator, maximum


def _logsumexp(scores: jax.Array, denominator: jax.Array, maximum: jax.Array, may_be_empty: bool) -> jax.Array:
    if not may_be_empty:
        return maximum + jnp.log(denominator)
    # The inner where keeps the gradient of the branch that is not taken from being NaN.
    empty = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(empty, -jnp.inf, maximum + jnp.log(jnp.where(empty, 1.0, denominator)))
