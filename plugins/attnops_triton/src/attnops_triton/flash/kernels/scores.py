"""The scores of a tile: products, soft cap, bias, mask, weights, dropout, and their gradients.

A tile is [queries, keys], or transposed [keys, queries]. Gluon kernels call these functions too, without bias, dropout
and masks that are loaded by score; `product` is for others.
"""

# Tuples are joined, and conditions nested, as Triton's language requires.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest

from attnops_triton.flash.kernels.tokens import base, by_key, by_query, load_token, store_token


class Values(NamedTuple):
    """Values of a tile, each a number or broadcasting to the tile; 0 for those that are not loaded yet."""

    masks: Any  # those of the mask
    biases: Any  # those of the bias
    dropout: Any  # the hash of each query


class Scores(NamedTuple):
    """Scores and what their gradients need."""

    s: Any  # the scores, −inf where masked
    unbiased: Any  # the scores without bias
    curve: Any  # the hyperbolic tangent of the soft cap
    ok: Any  # where scores are not masked; True without a mask


@triton.jit
def no_values(options: tl.constexpr):
    """`Values` before any are loaded."""
    return Values(zero_each(len(options.masks)), zero_each(len(options.biases)), 0)


@triton.jit
def values_of(x, n, program, tokens, axis: tl.constexpr, edge: tl.constexpr, options: tl.constexpr):
    """The `Values` per head, and those of the axis of a program's own tokens."""
    values = load_values(x, n, program, tokens, no_values(options), "", False, options)
    return load_values(x, n, program, tokens, values, axis, edge, options)


@triton.jit
def zero_each(count: tl.constexpr):
    """A 0 for each value."""
    zeros = ()
    for _ in tl.static_range(count):
        zeros = zeros + (0,)
    return zeros


@triton.jit
def load_values(
    x, n, program, tokens, before, axis: tl.constexpr, edge: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """The `Values` with those of an axis: "q", "kv", or "" for values per head; the others are those of ``before``.

    ``edge``: whether tokens may be beyond the last one.
    """
    masks = load_group(x.mask, n, program, tokens, before.masks, True, axis, edge, options)
    biases = load_group(x.bias, n, program, tokens, before.biases, False, axis, edge, options)
    dropout = before.dropout
    if axis == "q":
        if x.dropout is not None:
            dropout = by_query(load_token(x.dropout, n, program, tokens, options.layouts.dropout, edge), options)
    return Values(masks, biases, dropout)


@triton.jit
def load_group(
    arrays, n, program, tokens, before, of_mask: tl.constexpr, axis: tl.constexpr, edge: tl.constexpr,
    options: tl.constexpr,
):  # fmt: skip
    """The values of the mask or the bias: those of an axis, and the others of ``before``."""
    values: tl.constexpr = options.masks if of_mask else options.biases
    loaded = ()
    for i in tl.static_range(len(values)):
        if values[i].axis == axis:
            loaded = loaded + (load_value(arrays[i], n, program, tokens, i, of_mask, edge, options),)
        else:
            loaded = loaded + (before[i],)
    return loaded


@triton.jit
def load_value(
    array, n, program, tokens, i: tl.constexpr, of_mask: tl.constexpr, edge: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """The value ``i`` of the mask or the bias, which broadcasts to the tile."""
    value: tl.constexpr = options.masks[i] if of_mask else options.biases[i]
    layout: tl.constexpr = options.layouts.mask[i] if of_mask else options.layouts.bias[i]
    if value.axis == "":
        loaded = tl.load(base(array, n, program, 1, layout))
    elif value.axis == "q":
        loaded = by_query(load_token(array, n, program, tokens, layout, edge), options)
    else:
        loaded = by_key(load_token(array, n, program, tokens, layout, edge), options)
    return loaded.to(value.dtype)


@triton.jit
def product(q, k, options: tl.constexpr):
    """The products of the rows of queries and of keys, summed over chunks."""
    s = None
    for i in tl.static_range(len(q)):
        if options.transposed and not options.swaps:
            s = tl.dot(k[i], tl.trans(q[i]), s, input_precision=options.precision)
        else:
            s = tl.dot(q[i], tl.trans(k[i]), s, input_precision=options.precision)
    if options.swaps:
        s = tl.trans(s)
    return s


@triton.jit
def at_score(array, n, program, q, kv, layout: tl.constexpr):
    """Pointers to the tile's elements of an array [B or 1, H or 1, T, S]."""
    corner = base(array, n, program, n.T, layout, n.S) + q.first.to(tl.int64) * n.S + kv.first.to(tl.int64)
    return corner + (q.spread - q.first) * n.S + (kv.spread - kv.first)


@triton.jit
def load_score(array, n, program, q, kv, other: tl.constexpr, layout: tl.constexpr, options: tl.constexpr):
    """The tile of an array [B or 1, H or 1, T, S]; ``other`` fills it beyond the ends."""
    mask = None if options.is_even else (q.spread < n.T) & (kv.spread < n.S)
    at = at_score(array, n, program, q, kv, layout)
    return tl.load(at, mask=mask, other=None if options.is_even else other)


@triton.jit
def load_chosen(array, n, program, qx, kx, i: tl.constexpr, options: tl.constexpr):
    """Whether the block of each key was chosen for the block of each query, in an array [B or 1, H or 1, nq, nk]."""
    q_block: tl.constexpr = options.plan.scoring.chosen[i][0]
    kv_block: tl.constexpr = options.plan.scoring.chosen[i][1]
    nk = (n.S + (kv_block - 1)) // kv_block
    at = base(array, n, program, (n.T + (q_block - 1)) // q_block, options.layouts.chosen[i], nk)
    return tl.load(at + (qx // q_block) * nk + kx // kv_block) != 0


@triton.jit
def indices(n, program, q, kv, options: tl.constexpr):
    """The indices of batch, queries and keys for functions. Tokens beyond the last one have its index, so that no index
    is out of range.
    """
    qx = q.spread
    kx = kv.spread
    if not options.is_even:
        qx = tl.minimum(qx, n.T - 1)
        kx = tl.minimum(kx, n.S - 1)
    return program.b % n.inner, qx, kx


@triton.jit
def apply_cap_and_bias(x, n, program, q, kv, s, values, options: tl.constexpr):
    """Products with scale, soft cap and bias: the scores, those without bias, and the curve of the soft cap."""
    if options.scales_first:
        s = s * options.scale
    unbiased = s
    curve = s
    if options.score is not None:
        b, qx, kx = indices(n, program, q, kv, options)
        s, unbiased, curve = options.score(s, b, program.h, qx, kx, values.biases)
        if options.is_elementwise:
            s = s + tl.full(options.shape, 0.0, tl.float32)
    if x.table is not None:
        at = base(x.table, n, program, n.T + n.S - 1, options.layouts.table) + (kv.spread - q.spread + (n.T - 1))
        s = s + tl.load(at, mask=(kv.spread < n.S) & (q.spread < n.T), other=0.0)
    if x.array is not None:
        s = s + load_score(x.array, n, program, q, kv, 0.0, options.layouts.array, options).to(tl.float32)
    return s, unbiased, curve


@triton.jit
def allowed(x, n, program, q, kv, values, bits_at, options: tl.constexpr):
    """True where a score of a PARTIAL tile is not masked; only if ``options.has_ok``.

    ``bits_at`` is the index of the tile's bits in ``words``.
    """
    ok = True
    if options.mask is not None:
        dense = ()
        for i in tl.static_range(len(x.dense)):
            loaded = load_score(x.dense[i], n, program, q, kv, 0, options.layouts.dense[i], options)
            dense = dense + (loaded != 0,)
        b, qx, kx = indices(n, program, q, kv, options)
        for i in tl.static_range(len(x.chosen)):
            dense = dense + (load_chosen(x.chosen[i], n, program, qx, kx, i, options),)
        ok = options.mask(b, program.h, qx, kx, values.masks, dense)
    if options.plan.bit_mask:
        word: tl.constexpr = options.word
        at = x.words + bits_at.to(tl.int64) * (options.bq * options.words)
        at = at + (q.spread - q.first) * options.words + (kv.spread - kv.first) // word
        ok = ok & ((tl.load(at) >> ((kv.spread - kv.first) % word)) & 1 != 0)
    if not options.is_even:
        if options.has_fully_masked or not options.transposed:
            ok = ok & (kv.spread < n.S)
        if options.has_fully_masked:
            # A query beyond the last one must not count as one that sees a key.
            ok = ok & (q.spread < n.T)
    if not options.tiles.specialised:
        ok = ok & tl.full(options.shape, 1, tl.int1)
    return ok


@triton.jit
def score_tile(x, n, program, q, kv, s, values, bits_at, masked: tl.constexpr, options: tl.constexpr):
    """The `Scores` of products."""
    ok = True
    if masked:
        if options.has_ok:
            ok = allowed(x, n, program, q, kv, values, bits_at, options)
            if options.has_fully_masked:
                if options.has_bias or options.plan.scoring.cap is not None:
                    # Fully masked tokens may hold NaN. Their derivatives would be NaN too, and 0 · NaN is NaN.
                    s = tl.where(ok, s, 0.0)
    s, unbiased, curve = apply_cap_and_bias(x, n, program, q, kv, s, values, options)
    if masked:
        if options.has_ok:
            s = tl.where(ok, s, float("-inf"))
    return Scores(s, unbiased, curve, ok)


@triton.jit
def new_maximum(s, m, masked: tl.constexpr, options: tl.constexpr):
    """The maximum of each query after a tile of scores, what its scores are compared with, and the factor of earlier
    sums.
    """
    m_new = tl.maximum(m, tl.reduce(s, 1, largest))
    below = m_new
    if masked or options.has_bias:
        # If all scores so far are masked, m_new is −inf, and −inf − −inf would be NaN.
        below = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, below, tl.exp2((m - below) * options.unit)


@triton.jit
def exponents(s, m, log2_sum, options: tl.constexpr):
    """The exponents of base 2 of `weights`."""
    if options.subtracts_first:
        exponent = (s - by_query(m, options)) * options.unit
        if log2_sum is not None:
            exponent = exponent - by_query(log2_sum, options)
    else:
        below = m * options.unit
        if log2_sum is not None:
            below = below + log2_sum
        exponent = s * options.unit - by_query(below, options)
    return exponent


@triton.jit
def weights(s, m, log2_sum, options: tl.constexpr):
    """The weights ``exp(s − m) / sum``.

    ``m`` [bq] is in units of scores; ``log2_sum`` [bq] is log2 of the sum, None for a sum of 1.
    """
    return tl.exp2(exponents(s, m, log2_sum, options))


@triton.jit
def dropout(values, kv, options: tl.constexpr):
    """Which weights dropout keeps."""
    x = values.dropout + by_key(kv.index.to(tl.uint32) * options.dropout_spread, options)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= options.dropout_threshold


@triton.jit
def load_sink(x, n, program, options: tl.constexpr):
    """The sink of the head; None without sinks."""
    sink = None
    if x.sinks is not None:
        sink = tl.load(base(x.sinks, n, program, 1, options.layouts.sinks))
    return sink


@triton.jit
def store_maximum(x, n, program, q, m, l, options: tl.constexpr):
    """Store ``m`` without sinks, if it is asked for; NaN where a score is NaN or +inf."""
    if x.max_out is not None:
        store_token(x.max_out, n, program, q, tl.where(l == l, m, float("nan")), options)


@triton.jit
def denominator(given, m, l, options: tl.constexpr):
    """``m`` and ``l`` with a sink or None, the reciprocal of the denominator, and which queries are not fully masked.

    The reciprocal includes the factor of weights that dropout keeps. It is 0 for fully masked queries.
    """
    # The sum decides: a NaN score always makes the sum NaN, but not always the maximum.
    seen = l != 0.0
    m = tl.where(seen, m, 0.0)
    factor = options.kept
    if given is not None:
        sink = tl.minimum(given * (1 / options.score_unit), 3e38)
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2((m - m_new) * options.unit)
        l = l * alpha + tl.exp2((sink - m_new) * options.unit)
        l = tl.where((given == given) & (given < float("inf")), l, float("nan"))
        factor = factor * alpha
        m = m_new
    l = tl.where(seen, l, 1.0)
    return m, l, tl.where(seen, factor / l, 0.0), seen


@triton.jit
def score_gradients(p, dp, delta, keep, ok, masked: tl.constexpr, options: tl.constexpr):
    """The gradients of scores.

    ``delta`` [bq] is subtracted from ``dp``; None if that was done before. ``keep``: which weights dropout keeps.
    """
    if options.plan.scoring.dropout_prob > 0:
        dp = tl.where(keep, dp * options.kept, 0.0)
    if delta is not None:
        dp = dp - by_query(delta, options)
    ds = p * dp
    if masked:
        if options.has_ok and options.has_fully_masked:
            ds = tl.where(ok, ds, 0.0)
    return ds


@triton.jit
def cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options: tl.constexpr):
    """The gradients of the unscaled products, and those of values of the bias that ``options.wanted`` names, per
    score.
    """
    d_values = ()
    if options.score_vjp is not None:
        b, qx, kx = indices(n, program, q, kv, options)
        found = options.score_vjp(scores.unbiased, b, program.h, qx, kx, values.biases, ds)
        for i in tl.static_range(len(options.wanted)):
            d_values = d_values + (found[1 + options.wanted[i]] + tl.full(options.shape, 0.0, tl.float32),)
        ds = found[0] + tl.full(options.shape, 0.0, tl.float32)
    if options.plan.scoring.cap is not None:
        ds = ds * (1.0 - scores.curve * scores.curve)
    return ds, d_values


@triton.jit
def zero_masked_tokens(chunks, ok, axis: tl.constexpr, options: tl.constexpr):
    """Chunks of rows of queries or keys with zeros for those that are fully masked in the tile, since they may hold
    NaN.

    ``axis``: the axis of the tile over which no score is allowed: that of keys for queries.
    """
    # A bitwise and: for `tl.where` on operands of a product the compiler fails on some architectures.
    any_seen = (0 - tl.reduce(ok.to(tl.int32), axis, largest)).to(options.bits)[:, None]
    zeroed = ()
    for i in tl.static_range(len(chunks)):
        zeroed = zeroed + ((chunks[i].to(options.bits, bitcast=True) & any_seen).to(options.dtype, bitcast=True),)
    return zeroed
