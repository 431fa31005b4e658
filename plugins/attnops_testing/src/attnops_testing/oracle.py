"""The oracle: attention and its gradients in numpy, written from the contract only, not from an implementation.

Shapes are those of the layout "BTHD". Heads are repeated, masks and biases are arrays, and all T × S scores are in
memory at once, since the plainest computation is the easiest to trust. ``dtype`` is float64, except for the tolerance
rule, which needs the error of the same computation in a narrower dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of attention.

    Attributes:
        out: [B, T, H, Dv].
        weights: [B, H, T, S], after softmax and dropout.
        logsumexp: [B, H, T].
        max_logits: the largest visible score, [B, H, T].
        out_magnitude: like ``out``, computed with absolute values; rounding errors are relative to it.
    """

    out: Array
    weights: Array
    logsumexp: Array
    max_logits: Array
    out_magnitude: Array


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients with respect to each input that was given, in its shape, and their magnitudes (see `Result`)."""

    values: dict[str, Array]
    magnitudes: dict[str, Array]


@dataclasses.dataclass(frozen=True)
class _Forward:
    q: Array
    k: Array  # heads repeated
    v: Array
    tanh: Array | None  # of the capped scores
    p: Array  # probabilities before dropout
    p_sink: Array  # the shares of sinks, [B, H, T, n]
    w: Array  # after dropout
    keep_scale: Array | float
    empty: Array  # rows that see no key, [B, H, T, 1]
    logsumexp: Array
    max_logits: Array
    scale: float


def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, dtype: DTypeLike = np.float64, **options: Any
) -> Result:
    """Attention by the contract.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        dtype: the dtype of the computation.
        **options: the contract's options: softmax_scale, logits_soft_cap, sinks, and arrays ``mask``, ``bias`` and
            ``keep`` (dropout) that broadcast to [B, H, T, S].
    """
    f = _forward(query, key, value, dtype, **options)
    out = _einsum("bhts,bshd->bthd", f.w, f.v)
    magnitude = _einsum("bhts,bshd->bthd", f.w, np.abs(f.v))
    return Result(out, f.w, f.logsumexp, f.max_logits, magnitude)


# One parameter for each option of the contract.
def _forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    dtype: DTypeLike,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    keep: ArrayLike | None = None,
    dropout_prob: float = 0.0,
) -> _Forward:
    """The forward pass, with the contract's options. ``mask``, ``keep`` and ``bias`` broadcast to [B, H, T, S]."""
    q, k, v = (np.asarray(x).astype(dtype) for x in (query, key, value))
    B, T, H, D = q.shape
    S, groups = k.shape[1], H // k.shape[2]
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    scale = D**-0.5 if softmax_scale is None else softmax_scale

    scores = _einsum("bthd,bshd->bhts", q, k) * np.asarray(scale, dtype)
    tanh = None
    if logits_soft_cap is not None:
        cap = np.asarray(logits_soft_cap, dtype)
        tanh = np.tanh(scores / cap)
        scores = cap * tanh
    if bias is not None:
        scores = scores + np.asarray(bias).astype(dtype)
    visible = np.broadcast_to(True if mask is None else np.asarray(mask), (B, H, T, S)) & (scores != -np.inf)
    empty = ~visible.any(axis=-1, keepdims=True)

    sink = None if sinks is None else np.asarray(sinks).astype(dtype).reshape(1, H, 1, -1)
    maximum = np.where(visible, scores, -np.inf).max(axis=-1, keepdims=True)
    max_logits = np.where(maximum == np.inf, np.nan, maximum)[..., 0]  # NaN, as all of such a row is
    if sink is not None:
        maximum = np.maximum(maximum, sink.max(axis=-1, keepdims=True))
    maximum = np.where(maximum == -np.inf, np.asarray(0, dtype), maximum).astype(dtype)
    with np.errstate(invalid="ignore"):  # +inf − (+inf) is NaN, and makes the whole row NaN
        exponentials = np.where(visible, np.exp(np.where(visible, scores, maximum) - maximum), 0).astype(dtype)
        sink_share = np.zeros_like(maximum) if sink is None else np.exp(sink - maximum)
    denominator = exponentials.sum(axis=-1, keepdims=True) + sink_share.sum(axis=-1, keepdims=True)
    denominator = np.where(empty | (denominator == 0), np.asarray(1, dtype), denominator)
    p, p_sink = exponentials / denominator, sink_share / denominator
    logsumexp = np.where(empty, -np.inf, maximum + np.log(denominator))[..., 0]

    keep_scale: Array | float = 1.0
    if keep is not None:
        keep_scale = (np.broadcast_to(np.asarray(keep), p.shape) / (1 - dropout_prob)).astype(dtype)
    w = (p * keep_scale).astype(dtype)
    return _Forward(q, k, v, tanh, p, p_sink, w, keep_scale, empty, logsumexp, max_logits, scale)


def attention_gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    d_out: ArrayLike,
    d_logsumexp: ArrayLike | None = None,
    d_weights: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
    **options: Any,
) -> Gradients:
    """Gradients of ``sum(d_out · out) + sum(d_logsumexp · logsumexp) + sum(d_weights · weights)``.

    A fully masked row has no gradient: its logsumexp is a constant.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        d_out: [B, T, H, Dv].
        d_logsumexp: [B, H, T], or None.
        d_weights: [B, H, T, S], or None.
        dtype: the dtype of the computation.
        **options: the contract's options: softmax_scale, logits_soft_cap, sinks, and arrays ``mask``, ``bias`` and
            ``keep`` (dropout) that broadcast to [B, H, T, S].
    """
    f = _forward(query, key, value, dtype, **options)
    d_out = np.asarray(d_out).astype(dtype)
    d_w = _einsum("bthd,bshd->bhts", d_out, f.v)
    d_w_magnitude = _einsum("bthd,bshd->bhts", np.abs(d_out), np.abs(f.v))
    if d_weights is not None:
        d_w = d_w + np.asarray(d_weights).astype(dtype)
        d_w_magnitude = d_w_magnitude + np.abs(np.asarray(d_weights).astype(dtype))
    d_p, d_p_magnitude = d_w * f.keep_scale, d_w_magnitude * f.keep_scale
    d_lse = np.zeros((), dtype)
    if d_logsumexp is not None:
        d_lse = np.where(f.empty, 0, np.asarray(d_logsumexp).astype(dtype)[..., None])

    # The softmax, with the sink as one more logit whose value is 0.
    mean = (d_p * f.p).sum(axis=-1, keepdims=True)
    mean_magnitude = (d_p_magnitude * f.p).sum(axis=-1, keepdims=True)
    d_scores = f.p * (d_p - mean + d_lse)
    magnitude = f.p * (d_p_magnitude + mean_magnitude + np.abs(d_lse))
    values, magnitudes = {}, {}
    if options.get("bias") is not None:
        shape = np.shape(options["bias"])
        # The products q · k are rounded too, and a weight's relative error is its score's absolute error. In ``dtype``
        # these errors cancel in the sum over a row, but not if scores are recomputed in another order.
        products = _einsum("bthd,bshd->bhts", np.abs(f.q), np.abs(f.k)) * abs(f.scale)
        rounded = magnitude + np.abs(d_scores) * products
        values["bias"], magnitudes["bias"] = (_sum_to(x, shape) for x in (d_scores, rounded))
    if options.get("sinks") is not None:
        sink = np.where(f.empty, 0, f.p_sink)
        shape = np.shape(options["sinks"])
        values["sinks"] = (sink * (d_lse - mean)).sum(axis=(0, 2)).reshape(shape)
        magnitudes["sinks"] = (sink * (np.abs(d_lse) + mean_magnitude)).sum(axis=(0, 2)).reshape(shape)
    if f.tanh is not None:
        d_scores, magnitude = (x * (1 - f.tanh**2) for x in (d_scores, magnitude))
    d_scores, magnitude = (x * np.asarray(f.scale, dtype) for x in (d_scores, magnitude))
    magnitude = np.abs(magnitude)

    kv_heads = np.shape(key)[2]
    for into, scores, w, q, k, out in (
        (values, d_scores, f.w, f.q, f.k, d_out),
        (magnitudes, magnitude, f.w, np.abs(f.q), np.abs(f.k), np.abs(d_out)),
    ):
        into["query"] = _einsum("bhts,bshd->bthd", scores, k)
        into["key"] = _sum_groups(_einsum("bhts,bthd->bshd", scores, q), kv_heads)
        into["value"] = _sum_groups(_einsum("bhts,bthd->bshd", w, out), kv_heads)
    return Gradients(values, magnitudes)


@dataclasses.dataclass(frozen=True)
class Tangents:
    """The directional derivatives of the results, and of each gradient by the name of its input.

    Attributes:
        out: [B, T, H, Dv].
        logsumexp: [B, H, T]; 0 for a fully masked row.
        gradients: of query, key and value; of bias and sinks if these were given.
    """

    out: Array
    logsumexp: Array
    gradients: dict[str, Array]


def attention_tangents(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    tangents: Mapping[str, ArrayLike],
    d_out: ArrayLike,
    d_logsumexp: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
    **options: Any,
) -> Tangents:
    """Directional derivatives of `attention` and, with the cotangents fixed, of `attention_gradients`.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        tangents: the direction, by the names of query, key, value and, if these are given, bias and sinks.
        d_out: [B, T, H, Dv].
        d_logsumexp: [B, H, T], or None.
        dtype: the dtype of the computation.
        **options: as those of `attention`.
    """
    f = _forward(query, key, value, dtype, **options)
    H, kv_heads = f.q.shape[2], np.shape(key)[2]
    t = {name: np.asarray(x).astype(dtype) for name, x in tangents.items()}
    t_q, t_k, t_v = t["query"], *(np.repeat(t[name], H // kv_heads, axis=2) for name in ("key", "value"))
    d_out, scale = np.asarray(d_out).astype(dtype), np.asarray(f.scale, dtype)
    d_lse = np.zeros((), dtype)
    if d_logsumexp is not None:
        d_lse = np.where(f.empty, 0, np.asarray(d_logsumexp).astype(dtype)[..., None])

    t_raw = (_einsum("bthd,bshd->bhts", t_q, f.k) + _einsum("bthd,bshd->bhts", f.q, t_k)) * scale
    slope = np.ones((), dtype) if f.tanh is None else 1 - f.tanh**2
    t_s = t_raw * slope + t.get("bias", np.zeros((), dtype))
    t_sink = t["sinks"].reshape(1, H, 1, -1) if "sinks" in t else np.zeros((), dtype)
    p_sink = np.where(f.empty, 0, f.p_sink)
    t_lse = (f.p * t_s).sum(axis=-1, keepdims=True) + (p_sink * t_sink).sum(axis=-1, keepdims=True)
    t_p, t_p_sink = f.p * (t_s - t_lse), p_sink * (t_sink - t_lse)
    t_w = (t_p * f.keep_scale).astype(dtype)
    t_out = _einsum("bhts,bshd->bthd", t_w, f.v) + _einsum("bhts,bshd->bthd", f.w, t_v)

    # Each line is the derivative of a line of `attention_gradients`.
    d_p = _einsum("bthd,bshd->bhts", d_out, f.v) * f.keep_scale
    t_d_p = _einsum("bthd,bshd->bhts", d_out, t_v) * f.keep_scale
    mean = (d_p * f.p).sum(axis=-1, keepdims=True)
    t_mean = (t_d_p * f.p + d_p * t_p).sum(axis=-1, keepdims=True)
    d_s = f.p * (d_p - mean + d_lse)
    t_d_s = t_p * (d_p - mean + d_lse) + f.p * (t_d_p - t_mean)
    gradients = {}
    if options.get("bias") is not None:
        gradients["bias"] = _sum_to(t_d_s, np.shape(options["bias"]))
    if options.get("sinks") is not None:
        t_d_sinks = t_p_sink * (d_lse - mean) - p_sink * t_mean
        gradients["sinks"] = t_d_sinks.sum(axis=(0, 2)).reshape(np.shape(options["sinks"]))
    t_slope = np.zeros((), dtype)
    if f.tanh is not None:
        t_slope = -2 * f.tanh * slope * t_raw / np.asarray(options["logits_soft_cap"], dtype)
    d_raw, t_d_raw = d_s * slope * scale, (t_d_s * slope + d_s * t_slope) * scale
    gradients["query"] = _einsum("bhts,bshd->bthd", t_d_raw, f.k) + _einsum("bhts,bshd->bthd", d_raw, t_k)
    t_d_key = _einsum("bhts,bthd->bshd", t_d_raw, f.q) + _einsum("bhts,bthd->bshd", d_raw, t_q)
    gradients["key"] = _sum_groups(t_d_key, kv_heads)
    gradients["value"] = _sum_groups(_einsum("bhts,bthd->bshd", t_w, d_out), kv_heads)
    return Tangents(t_out, t_lse[..., 0], gradients)


def _einsum(spec: str, x: Array, y: Array) -> Array:
    """`numpy.einsum` over one contracted axis.

    float32 is summed in order, as in a plain loop: numpy, BLAS and kernels don't specify their order of summation, and
    the tolerance rule must not depend on it. 16-bit inputs are accumulated in float32 and the result is rounded, as
    processors do.
    """
    if x.dtype.itemsize <= 2:
        return np.einsum(spec, x.astype(np.float32), y.astype(np.float32)).astype(x.dtype)
    if x.dtype == np.float64:
        return np.einsum(spec, x, y)
    inputs, output = spec.split("->")
    left, right = inputs.split(",")
    (axis,) = set(left) & set(right) - set(output)
    step = f"{left.replace(axis, '')},{right.replace(axis, '')}->{output}"
    pairs = zip(np.moveaxis(x, left.index(axis), 0), np.moveaxis(y, right.index(axis), 0), strict=True)
    total = 0.0
    for a, b in pairs:
        total = total + np.einsum(step, a, b)
    return np.asarray(total, x.dtype)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that ``shape`` broadcasts."""
    return x.sum(axis=tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] > 1), keepdims=True)


def _sum_groups(x: Array, kv_heads: int) -> Array:
    """[B, S, H, D] to [B, S, K, D]."""
    B, S, H, D = x.shape
    return x.reshape(B, S, kv_heads, H // kv_heads, D).sum(axis=3)


def alibi(slopes: ArrayLike, T: int, S: int) -> Array:
    """ALiBi's bias, [1, H, T, S]: minus the slope times the distance, queries aligned at the end."""
    return -np.asarray(slopes, np.float64)[None, :, None, None] * np.abs(_distance(T, S))


def alibi_gradient(d_bias: Array, slopes: ArrayLike, T: int, S: int) -> Array:
    """The gradient of ALiBi's slopes, [H], from that of its bias."""
    return -(d_bias * np.abs(_distance(T, S))).sum(axis=(0, 2, 3))


def score_pattern(factors: ArrayLike, pattern: Array) -> Array:
    """A bias [1, H, T, S]: one factor per head times a pattern [T, S]."""
    return np.asarray(factors, np.float64)[None, :, None, None] * pattern


def score_pattern_gradient(d_bias: Array, factors: ArrayLike, pattern: Array) -> Array:
    """The gradient of the factors, [H], from that of the bias."""
    return (d_bias * pattern).sum(axis=(0, 2, 3))


def relative_position(table: Array, T: int, S: int, bidirectional: bool, max_distance: int) -> Array:
    """T5's bias, [1, H, T, S], from its table [buckets, H]."""
    buckets = relative_position_buckets(len(table), T, S, bidirectional, max_distance)
    return np.asarray(table, np.float64)[buckets].transpose(2, 0, 1)[None]


def relative_position_gradient(
    d_bias: Array, table: Array, T: int, S: int, bidirectional: bool, max_distance: int
) -> Array:
    """The gradient of T5's table, [buckets, H], from that of its bias."""
    gradient = np.zeros(np.shape(table))
    buckets = relative_position_buckets(len(table), T, S, bidirectional, max_distance)
    np.add.at(gradient, buckets, d_bias.sum(axis=0).transpose(1, 2, 0))
    return gradient


def relative_position_buckets(buckets: int, T: int, S: int, bidirectional: bool, max_distance: int) -> Array:
    """The bucket of each pair, [T, S], computed one pair at a time as the T5 paper defines it."""

    def bucket(distance: int) -> int:
        count, first = buckets, 0
        if bidirectional:
            count //= 2
            first = count if distance > 0 else 0
            far = abs(distance)
        else:
            far = max(-distance, 0)
        exact = count // 2
        if far < exact:
            return first + far
        # In float32, as the models are trained: at a bucket's border the rounding decides.
        ratio = np.log(np.float32(far) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
        return first + min(exact + int(ratio * np.float32(count - exact)), count - 1)

    by_distance = {int(d): bucket(int(d)) for d in np.unique(_distance(T, S))}
    return np.vectorize(by_distance.__getitem__)(_distance(T, S))


def _distance(T: int, S: int) -> Array:
    """Each key's position minus each query's, [T, S]; the last query is at the last key."""
    return np.arange(S)[None, :] - (np.arange(T)[:, None] + S - T)


def dropout_keep(words: ArrayLike, prob: float, shape: tuple[int, int, int, int]) -> Array:
    """Which weights the portable dropout keeps, boolean [B, H, T, S], computed with Python integers.

    Args:
        words: the first two words of `attnops.dropout.dropout_seed`, 32 bits each.
        prob: the probability that a weight is dropped.
        shape: (B, H, T, S).
    """

    def mix(x: Array) -> Array:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    # Products of two 32-bit numbers fit 64 bits, so that nothing but the modulus wraps.
    b, h, i, j = (
        np.arange(size, dtype=np.uint64).reshape([-1 if a == axis else 1 for a in range(4)])
        for axis, size in enumerate(shape)
    )
    first, second = (np.uint64(int(word)) for word in np.asarray(words))
    x = mix((first + b * 0x9E3779B1) % 2**32)
    x = mix(((x ^ second) + h * 0x85EBCA77) % 2**32)
    x = mix((x + i * 0xC2B2AE3D) % 2**32)
    x = mix((x + j * 0x27D4EB2F) % 2**32)
    return (x >> 8) >= round(prob * 2**24)
