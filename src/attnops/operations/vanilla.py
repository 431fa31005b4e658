"""vanilla: the complete attention contract in plain jnp, the reference on every platform."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from attnops.biases import Bias
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.forwards import check_named
from attnops.dispatch.limits import SYMBOLIC, Limits
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.options import AttentionOptions
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import Request
from attnops.dropout import dropout_mask
from attnops.kernels.unseen import zero_masked_tokens
from attnops.output import OperationOutput
from attnops.typing import PyTree

__all__ = ["VanillaAttention"]


class VanillaAttention(OperationImpl):
    """Softmax attention as it is written in the papers; O(B · H · T · S) memory, forward and backward.

    All computations are in float32. Serves every request of the contract on every platform.
    """

    computes: ClassVar[str | None] = ATTENTION
    is_partitioned: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None, linear_memory=False, symbolic=SYMBOLIC)}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "vanilla"

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        inherited = super().rank(request)
        return Rank.REFERENCE if inherited is Rank.NATIVE else inherited  # a subclass keeps its kernel's rank

    def forward_native(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[AttentionOptions]
    ) -> OperationOutput:
        """See `OperationImpl.__call__`. Heads are grouped as [K, G], so that no kv head is repeated."""
        check_named(VanillaAttention.forward_native, options)
        B, T, H, D = query.shape
        _, S, K, Dv = value.shape
        out_dtype = query.dtype
        mask, bias, soft_cap = options.get("mask"), options.get("bias"), options.get("logits_soft_cap")
        scale, sinks, return_lse = options.get("softmax_scale"), options.get("sinks"), options.get("return_lse")
        allowed = None if mask is None else mask.dense(B, H, T, S)
        if mask is not None and allowed is not None and mask.has_fully_masked_tokens(T, S):
            query, key, value = zero_masked_tokens(query, key, value, allowed)
        # With heads before lengths, each product is one batched matmul without a transpose of a T × S array.
        q = query.astype(jnp.float32).reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4)
        k, v = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (key, value))
        precision = lax.Precision.HIGHEST if self.metadata.precision is None else self.metadata.precision

        scores = _products(q, k, precision) * (D**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if isinstance(bias, Bias):
            indices = (jnp.arange(n).reshape([-1 if a == dim else 1 for a in range(4)]) for dim, n in
                       enumerate((B, H, T, S)))  # fmt: skip
            scores = bias.apply(scores.reshape(B, H, T, S), *indices).reshape(scores.shape)
        elif bias is not None:
            scores = scores + _group(bias.astype(jnp.float32), K)
        if allowed is not None:
            scores = jnp.where(_group(allowed, K), scores, -jnp.inf)
        highest = None
        if options.get("return_max_logits"):
            highest = lax.stop_gradient(scores).max(axis=-1)
            highest = jnp.where(highest < jnp.inf, highest, jnp.nan).reshape(B, H, T)
        sink = None if sinks is None else sinks.astype(jnp.float32).reshape(K, H // K, 1, 1)

        weights, _, logsumexp = _softmax(scores, sink)
        if return_lse:  # a constant has no gradient, even if the cotangent of a fully masked row is NaN
            logsumexp = jnp.where(logsumexp == -jnp.inf, -jnp.inf, logsumexp)
        if (dropout_key := options.get("dropout_key")) is not None:
            prob = self.metadata.dropout_prob
            keep = dropout_mask(dropout_key, prob, (B, H, T, S)).reshape(weights.shape)
            weights = jnp.where(keep, weights / (1 - prob), 0.0)
        out = lax.dot_general(weights, v, (((4,), (2,)), ((0, 1), (0, 1))), precision=precision)
        return OperationOutput(
            out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, Dv).astype(out_dtype),
            weights.reshape(B, H, T, S).astype(out_dtype) if options.get("return_weights") else None,
            logsumexp.reshape(B, H, T) if return_lse else None,
            highest,
        )


def _products(q: jax.Array, k: jax.Array, precision: lax.Precision) -> jax.Array:
    """q·k, [B, K, G, T, S], of [B, K, G, T, D] and [B, K, S, D].

    128 features at a time: a CPU's matrix product adds features one by one, and for a large head_dim the float32
    rounding error of this sum exceeds the tolerance rule.
    """
    chunks = (slice(first, first + 128) for first in range(0, q.shape[-1], 128))
    dimensions = (((4,), (3,)), ((0, 1), (0, 1)))
    if q.shape[-1] <= 128:  # eagerly, a slice of everything is a copy
        return lax.dot_general(q, k, dimensions, precision=precision)
    products = (lax.dot_general(q[..., chunk], k[..., chunk], dimensions, precision=precision) for chunk in chunks)
    return functools.reduce(jnp.add, products)


def _group(x: jax.Array, K: int) -> jax.Array:
    """[B, H, T, S] to [B, K, G, T, S]; each dimension may be 1."""
    B, H, T, S = x.shape
    return x.reshape(B, 1, 1, T, S) if H == 1 else x.reshape(B, K, H // K, T, S)


@jax.custom_jvp
def _softmax(scores: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The softmax over the last axis, the sink's probability, and the logsumexp. A row of −inf gives 0, 0 and −inf.

    `maximum` rather than `where` avoids NaN in rows of −inf: XLA's CPU compiler fuses maximum, exponential, sum and
    quotient only without a `where` between them.
    """
    m = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        sink = jnp.where(m == -jnp.inf, -jnp.inf, sink)
        m = jnp.maximum(m, sink)
    m = lax.max(m, jnp.finfo(m.dtype).min)
    numerator = jnp.exp(scores - m)
    l = numerator.sum(axis=-1, keepdims=True)
    at_sink = None if sink is None else jnp.exp(sink - m)
    if at_sink is not None:
        l = l + at_sink
    # The maximum contributes 1 to every other row.
    denominator = lax.max(l, l.dtype.type(0.5))
    return numerator / denominator, None if at_sink is None else at_sink / denominator, m + jnp.log(l)


@_softmax.defjvp
def _softmax_jvp(primals: tuple[PyTree, PyTree], tangents: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """From the results alone, in two passes over the scores; JAX's derivative needs five."""
    weights, at_sink, logsumexp = _softmax(*primals)
    d_scores, d_sink = tangents
    d_logsumexp = (weights * d_scores).sum(axis=-1, keepdims=True)
    if at_sink is not None:
        d_logsumexp = d_logsumexp + at_sink * d_sink
    d_at_sink = None if at_sink is None else at_sink * (d_sink - d_logsumexp)
    return (weights, at_sink, logsumexp), (weights * (d_scores - d_logsumexp), d_at_sink, d_logsumexp)
