"""Partial softmaxes: attention over some of the keys, and how partial results are merged.

With a sequence that is sharded over devices, a cache that is read in splits or a paged cache, attention is computed
over some of the keys at a time. `PartialSoftmax` is such a result; `merge` combines several (Milakov and Gimelshein
2018, arXiv:1805.02867), and `contribution` is the term of one in a softmax whose logsumexp is known. All arrays are
float32, in the layout "BTHD"; a partial softmax needs O(B · T · H · Dv) memory.

With scores near −1e38 (a large negative bias used as a mask), float32 rounding loses log(l) in ``m + log(l)``, which
depends on the number of keys. The residual of this sum is therefore a separate array.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "Contribution",
    "PartialSoftmax",
    "contribution",
    "exp_sum",
    "identity",
    "log_sum",
    "merge",
    "with_sinks",
]


class PartialSoftmax(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: the output, float32 [B, T, H, Dv]; 0 for a fully masked row.
        lse: the logsumexp of the scores, natural logarithm, float32 [B, H, T]; −inf for a fully masked row.
        lse_residual: the rounding error of ``lse``, to be added to it, float32 [B, H, T]; it has no gradient.
        max_logits: the largest score, float32 [B, H, T], −inf for a fully masked row; it has no gradient. None unless
            asked for.
    """

    out: jax.Array
    lse: jax.Array
    lse_residual: jax.Array
    max_logits: jax.Array | None = None


class Contribution(NamedTuple):
    """The term of some of the keys in a softmax over all keys.

    Attributes:
        out: ``Σ exp(s − lse) · v`` over these keys, float32 [B, T, H, Dv]; contributions add up to the output.
        weight: ``Σ exp(s − lse)`` over these keys, float32 [B, H, T]; weights add up to 1.
    """

    out: jax.Array
    weight: jax.Array


def identity(query: jax.Array, value: jax.Array, max_logits: bool = False) -> PartialSoftmax:
    """The partial softmax over no keys, the identity of `merge`.

    Args:
        query: [B, T, H, D].
        value: [B, S, K, Dv].
        max_logits: whether it has the largest score.
    """
    B, T, H, _ = query.shape
    out = jnp.zeros_like(query, shape=(B, T, H, value.shape[3]), dtype=jnp.float32)
    zeros = jnp.zeros_like(query, shape=(B, H, T), dtype=jnp.float32)
    lowest = zeros - jnp.inf
    return PartialSoftmax(out, lowest, zeros, lowest if max_logits else None)


def merge(*parts: PartialSoftmax) -> PartialSoftmax:
    """Partial softmaxes over disjoint sets of keys as one over all of them."""
    m = functools.reduce(jnp.maximum, (part.lse for part in parts))
    sums = [exp_sum(part.lse, part.lse_residual, m) for part in parts]
    l = functools.reduce(jnp.add, sums)
    seen = l != 0  # NaN too
    scale = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    outs = [part.out * (x * scale).swapaxes(1, 2)[..., None] for part, x in zip(parts, sums, strict=True)]
    highest = [part.max_logits for part in parts if part.max_logits is not None]
    max_logits = functools.reduce(jnp.maximum, highest) if len(highest) == len(parts) else None
    return PartialSoftmax(functools.reduce(jnp.add, outs), *log_sum(m, l), max_logits)


def with_sinks(part: PartialSoftmax, sinks: jax.Array) -> PartialSoftmax:
    """``part`` with one more logit per head, ``sinks`` [H], whose value is 0; fully masked rows are unchanged."""
    sink = jnp.where(part.lse > -jnp.inf, sinks.astype(jnp.float32)[None, :, None], -jnp.inf)
    of_sinks = PartialSoftmax(jnp.zeros_like(part.out), sink, jnp.zeros_like(sink))
    return merge(part, of_sinks)._replace(max_logits=part.max_logits)


def contribution(part: PartialSoftmax, lse: jax.Array, lse_residual: jax.Array) -> Contribution:
    """The contribution of a partial softmax to one over more keys, whose logsumexp is known.

    Args:
        part: the partial softmax over some of the keys.
        lse: the logsumexp over all keys, float32 [B, H, T].
        lse_residual: the rounding error of ``lse``, float32 [B, H, T].
    """
    # ``part.lse`` is −inf for a row that sees none of these keys, and ``lse`` too if it sees no key at all.
    base = jnp.where(lse == -jnp.inf, 0.0, lse)
    weight = jnp.exp((part.lse - base) + (part.lse_residual - lse_residual))
    return Contribution(part.out * weight.swapaxes(1, 2)[..., None], weight)


def exp_sum(lse: jax.Array, lse_residual: jax.Array, m: jax.Array) -> jax.Array:
    """``exp(lse + lse_residual − m)``, the sum of exponentials relative to ``exp(m)``; 0 where ``lse`` is −inf."""
    # The difference of two close numbers is exact; the residual is added to the small result.
    base = lax.stop_gradient(jnp.where(m == -jnp.inf, 0.0, m))
    return jnp.exp((lse - base) + lse_residual)


def log_sum(m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``m + log(l)`` and its rounding error; −inf and 0 where ``l`` is 0."""
    seen = l != 0  # NaN too
    base, log = lax.stop_gradient(jnp.where(seen, m, 0.0)), jnp.log(jnp.where(seen, l, 1.0))
    lse = base + log
    residual = jnp.where(seen, lax.stop_gradient((base - lse) + log), 0.0)
    return jnp.where(seen, lse, -jnp.inf), residual
