"""Attention in steps, which mutants override."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attnops.biases import Bias
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops.dropout import dropout_keep, dropout_rows, dropout_seed
from attnops.kernels.unseen import zero_masked_tokens
from attnops.output import OperationOutput


class Reference(OperationImpl):
    """Right, and plain; kv heads are repeated and everything is float32."""

    limits: ClassVar = {"native": Limits(bias_kinds=None, linear_memory=False)}

    @classmethod
    def get_impl_name(cls):
        return "reference"

    def forward_native(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask=None,
        bias=None,
        softmax_scale=None,
        logits_soft_cap=None,
        sinks=None,
        dropout_key=None,
        return_lse=False,
        return_weights=False,
        return_max_logits=False,
    ):
        (B, T, H, D), S = query.shape, key.shape[1]
        allowed = None if mask is None else jnp.broadcast_to(self.allowed(mask, B, H, T, S), (B, H, T, S))
        dtype = query.dtype
        if mask is not None and mask.has_fully_masked_tokens(T, S):
            query, key, value = self.hide(query, key, value, allowed)
        q, k, v = self.cast(query, key, value)
        k, v = self.repeat(k, H), self.repeat(v, H)
        scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
        scores = self.scale(scores, D**-0.5 if softmax_scale is None else softmax_scale)
        if logits_soft_cap is not None:
            scores = self.cap(scores, logits_soft_cap)
        if bias is not None:
            scores = self.bias(scores, bias)
        if allowed is not None:
            scores = jnp.where(allowed, scores, self.hidden_score)
        sink = jnp.full((1, H, 1, 1), -jnp.inf)
        if sinks is not None:
            sink = self.sink(sinks.astype(jnp.float32)).reshape(1, H, 1, 1)
        weights, logsumexp = self.softmax(scores, sink)
        if dropout_key is not None:
            weights = self.dropout(weights, dropout_key)
        out = self.combine(weights, v)
        return OperationOutput(
            self.finish_output(out).astype(dtype),
            weights.astype(dtype) if return_weights else None,
            self.finish_logsumexp(logsumexp)[..., 0] if return_lse else None,
            self.max_logits(scores, sink)[..., 0] if return_max_logits else None,
        )

    hidden_score = -jnp.inf

    def allowed(self, mask, B, H, T, S):
        return mask.dense(B, H, T, S)

    def hide(self, query, key, value, allowed):
        return zero_masked_tokens(query, key, value, allowed)

    def cast(self, query, key, value):
        return (x.astype(jnp.float32) for x in (query, key, value))

    def repeat(self, x, H):
        return jnp.repeat(x, H // x.shape[2], axis=2)

    def scale(self, scores, scale):
        return scores * scale

    def cap(self, scores, cap):
        return cap * jnp.tanh(scores / cap)

    def bias(self, scores, bias):
        if isinstance(bias, Bias):
            return bias.apply(scores, *jnp.ogrid[tuple(slice(n) for n in scores.shape)])
        return scores + bias.astype(jnp.float32)

    def sink(self, sinks):
        return sinks

    def softmax(self, scores, sink):
        """Weights, and logsumexp [B, H, T, 1]."""
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest(scores), sink))
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        numerator = jnp.exp(scores - highest)
        total = numerator.sum(-1, keepdims=True) + jnp.exp(sink - highest)
        empty = jnp.all(scores == -jnp.inf, -1, keepdims=True)
        total = jnp.where(empty, 1.0, total)
        return numerator / total, jnp.where(empty, -jnp.inf, highest + jnp.log(total))

    def highest(self, scores):
        return scores.max(-1, keepdims=True)

    def max_logits(self, scores, sink):
        """[B, H, T, 1]."""
        highest = jax.lax.stop_gradient(scores).max(-1, keepdims=True)
        return jnp.where(highest < jnp.inf, highest, jnp.nan)

    def keep(self, shape, key):
        b, h, i, j = jnp.ogrid[tuple(slice(n) for n in shape)]
        return dropout_keep(dropout_rows(dropout_seed(key), b, h, i), j, self.metadata.dropout_prob)

    def dropout(self, weights, key):
        return jnp.where(self.keep(weights.shape, key), weights / (1 - self.metadata.dropout_prob), 0.0)

    def combine(self, weights, v):
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")

    def finish_output(self, out):
        return out

    def finish_logsumexp(self, logsumexp):
        return logsumexp
