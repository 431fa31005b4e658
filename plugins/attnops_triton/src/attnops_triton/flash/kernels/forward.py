"""The forward kernel: an online softmax of a tile of queries over its active tiles of keys."""

# Tuples are joined, and conditions nested, as Triton's language requires.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.kernels.scores import (
    allowed,
    apply_cap_and_bias,
    denominator,
    dropout,
    load_values,
    no_values,
    product,
    weights,
    zero_masked_tokens,
)
from attnops_triton.flash.kernels.tokens import (
    keys,
    load_rows,
    over_tiles,
    place_by_query,
    queries,
    store_rows,
    store_token,
    zeros,
)


@triton.jit
def attnops_flash_forward(x, n, options: tl.constexpr):
    """The output of a tile of queries. Fully masked queries get an output of 0 and a maximum of −inf."""
    program = place_by_query(n, options)
    q = queries(program.row * options.bq, n, options)
    rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, not options.is_even, options)
    values = load_values(x, n, program, q, no_values(options), "", False, options)
    values = load_values(x, n, program, q, values, "q", not options.is_even, options)
    m = tl.full([options.bq], float("-inf"), tl.float32)
    l = tl.full([options.bq], 0.0, tl.float32)
    acc = zeros(options.bq, True, options)
    m, l, acc = over_tiles(attend, (m, l, acc), x, n, program, q, rows, values, options)
    m, l, factor, seen = denominator(x, n, program, m, l, options)
    store_rows(x.out, n, program, q, acc, factor[:, None], options.plan.H, True, True, options.out_dtype, options)
    store_token(x.m_out, n, program, q, tl.where(seen, m, float("-inf")), options)
    store_token(x.log2_sum_out, n, program, q, tl.log2(l), options)


@triton.jit
def attend(
    state, x, n, program, q, rows, values, tile, bits_at, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The maximum and the denominator, [bq], and the chunks of the sums of values, after a tile of keys."""
    m_before, l, sums = state
    edge: tl.constexpr = masked and not options.is_even
    kv = keys(tile * options.bk, n, options)
    k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, edge, options)
    values = load_values(x, n, program, kv, values, "kv", edge, options)
    s = product(rows, k, options)
    s, _, _ = apply_cap_and_bias(x, n, program, q, kv, s, values, options)
    ok = True
    if masked:
        if options.has_ok:
            ok = allowed(x, n, program, q, kv, values, bits_at, options)
            s = tl.where(ok, s, float("-inf"))
    m = tl.maximum(m_before, tl.reduce(s, 1, largest))
    below = m
    if masked or options.has_bias:
        # If all scores so far are masked, m is −inf, and −inf − −inf would be NaN.
        below = tl.where(m == float("-inf"), 0.0, m)
    p = weights(s, below, None, options)
    alpha = tl.exp2((m_before - below) * options.unit)
    l = l * alpha + tl.reduce(p, 1, total)
    if x.dropout is not None:
        p = tl.where(dropout(values, kv, options), p, 0.0)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    if masked:
        if options.has_fully_masked and options.is_masked:
            v = zero_masked_tokens(v, ok, 0, options)
    p = p.to(options.dtype)
    acc = ()
    for i in tl.static_range(len(sums)):
        acc = acc + (tl.dot(p, v[i], sums[i] * alpha[:, None], input_precision=options.precision),)
    return m, l, acc
