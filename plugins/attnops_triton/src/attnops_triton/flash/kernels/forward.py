"""The forward kernel: an online softmax of a tile of queries over its active tiles of keys."""

# Tuples are joined, and conditions nested, as Triton's language requires.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.kernels.scores import (
    denominator,
    dropout,
    load_sink,
    load_values,
    new_maximum,
    product,
    score_tile,
    store_maximum,
    values_of,
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
    values = values_of(x, n, program, q, "q", not options.is_even, options)
    m = tl.full([options.bq], float("-inf"), tl.float32)
    l = tl.full([options.bq], 0.0, tl.float32)
    acc = zeros(options.bq, True, options)
    m, l, acc = over_tiles(attend, (m, l, acc), x, n, program, q, rows, values, options)
    store_maximum(x, n, program, q, m, l, options)
    m, l, factor, seen = denominator(load_sink(x, n, program, options), m, l, options)
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
    scores = score_tile(x, n, program, q, kv, s, values, bits_at, masked, options)
    m, below, alpha = new_maximum(scores.s, m_before, masked, options)
    p = weights(scores.s, below, None, options)
    l = l * alpha + tl.reduce(p, 1, total)
    if x.dropout is not None:
        p = tl.where(dropout(values, kv, options), p, 0.0)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    if masked:
        if options.has_fully_masked and options.is_masked:
            v = zero_masked_tokens(v, scores.ok, 0, options)
    p = p.to(options.dtype)
    acc = ()
    for i in tl.static_range(len(sums)):
        acc = acc + (tl.dot(p, v[i], sums[i] * alpha[:, None], input_precision=options.precision),)
    return m, l, acc
