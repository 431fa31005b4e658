"""The backward kernels: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Both recompute the weights from the logsumexp (Dao 2023, arXiv:2307.08691). They use no atomics and add in a fixed
order. They also compute the gradients of the values of an elementwise bias per query, key or head.
"""

# Tuples are joined, and conditions nested, as Triton's language requires.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.kernels.scores import (
    cap_and_bias_vjp,
    dropout,
    load_values,
    product,
    score_gradients,
    score_tile,
    values_of,
    weights,
    zero_masked_tokens,
)
from attnops_triton.flash.kernels.tokens import (
    Program,
    keys,
    load_rows,
    load_statistic,
    over_tiles,
    place_by_key,
    place_by_query,
    queries,
    store_rows,
    store_token,
    zeros,
)


@triton.jit
def attnops_flash_backward_query(x, n, options: tl.constexpr):
    """The gradient of a tile of queries."""
    edge: tl.constexpr = not options.is_even
    program = place_by_query(n, options)
    q = queries(program.row * options.bq, n, options)
    given, values = load_queries(x, n, program, q, edge, options)
    sums = (zeros(options.bq, False, options), no_bias_sums(options.bq, options))
    dq, d_bias = over_tiles(add_to_queries, sums, x, n, program, q, given, values, options)
    store_rows(x.dq, n, program, q, dq, options.scale, options.plan.H, True, False, options.gradient_dtype, options)
    for i in tl.static_range(len(options.wanted)):
        store_token(x.dq_bias[i], n, program, q, d_bias[i], options)


@triton.jit
def add_to_queries(
    sums, x, n, program, q, given, values, tile, bits_at, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The chunks of dq, and the gradients of values of the bias, [bq] each, after a tile of keys."""
    kv = keys(tile * options.bk, n, options)
    edge: tl.constexpr = masked and not options.is_even
    ds, scores, k, values = tile_gradients(x, n, program, q, kv, given, values, bits_at, edge, masked, options)
    ds, d_values = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)
    d_bias = add_bias(sums[1], d_values)
    if masked:
        if options.has_ok and options.has_fully_masked:
            k = zero_masked_tokens(k, scores.ok, 0, options)
    return add_products(sums[0], ds.to(options.dtype), k, options), d_bias


@triton.jit
def load_queries(x, n, program, q, edge: tl.constexpr, options: tl.constexpr):
    """What is loaded once for a tile of queries: rows of queries and of the output's cotangent, the statistics, and the
    `Values`.
    """
    rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, edge, options)
    d_out = load_rows(x.d_out, n, program, q, options.layouts.d_out.bit, True, True, edge, options)
    values = values_of(x, n, program, q, "q", edge, options)
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    return (rows, d_out, m, log2_sum, delta), values


@triton.jit
def tile_gradients(
    x, n, program, q, kv, given, values, bits_at, edge: tl.constexpr, masked: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """The gradients of a tile's scores, its `Scores`, the rows of its keys, and its `Values`."""
    rows, d_out, m, log2_sum, delta = given
    k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, edge, options)
    values = load_values(x, n, program, kv, values, "kv", edge, options)
    s = product(rows, k, options)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    dp = product(d_out, v, options)
    scores = score_tile(x, n, program, q, kv, s, values, bits_at, masked, options)
    p = weights(scores.s, m, log2_sum, options)
    keep = True
    if x.dropout is not None:
        keep = dropout(values, kv, options)
    return score_gradients(p, dp, delta, keep, scores.ok, masked, options), scores, k, values


@triton.jit
def attnops_flash_backward_key(x, n, options: tl.constexpr):
    """The gradients of a tile of keys and its values."""
    edge: tl.constexpr = not options.is_even
    program = place_by_key(n, options)
    kv = keys(program.row * options.bk, n, options)
    k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, edge, options)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    dk = zeros(options.bk, False, options)
    dv = zeros(options.bk, True, options)
    if options.splits_groups or options.flat:
        dk, dv = add_heads(x, n, program, kv, k, v, dk, dv, options)
    else:
        for g in range(0, options.plan.G):
            head = Program(program.b, program.k * options.plan.G + g, program.k, program.row)
            dk, dv = add_heads(x, n, head, kv, k, v, dk, dv, options)
    heads: tl.constexpr = options.plan.H if options.splits_groups else options.plan.K
    dtype: tl.constexpr = tl.float32 if options.splits_groups else options.gradient_dtype
    store_rows(x.dk, n, program, kv, dk, options.scale, heads, options.splits_groups, False, dtype, options)
    store_rows(x.dv, n, program, kv, dv, 1.0, heads, options.splits_groups, True, dtype, options)


@triton.jit
def add_heads(x, n, program, kv, k, v, dk, dv, options: tl.constexpr):
    """The sums after the program's query head, or all of its kv head if ``options.flat``."""
    values = values_of(x, n, program, kv, "kv", not options.is_even, options)
    sums = (dk, dv, no_bias_sums(options.bk, options))
    dk, dv, d_bias = over_tiles(add_to_keys, sums, x, n, program, kv, (k, v), values, options)
    for i in tl.static_range(len(options.wanted)):
        store_token(x.dk_bias[i], n, program, kv, d_bias[i], options)
    return dk, dv


@triton.jit
def add_to_keys(
    sums, x, n, program, kv, given, values, tile, bits_at, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The chunks of dk and dv, and the gradients of values of the bias, [bk] each, after a tile of queries."""
    k, v = given
    edge: tl.constexpr = masked and not options.is_even
    q = queries(tile * options.bq, n, options)
    rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, edge, options)
    values = load_values(x, n, program, q, values, "q", edge, options)
    s = product(rows, k, options)
    # Loaded where they are used, which saves registers. The pipeline still fetches them a tile ahead.
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    scores = score_tile(x, n, program, q, kv, s, values, bits_at, masked, options)
    p = weights(scores.s, m, log2_sum, options)
    d_out = load_rows(x.d_out, n, program, q, options.layouts.d_out.bit, True, True, edge, options)
    if masked:
        if options.has_ok and options.has_fully_masked:
            rows = zero_masked_tokens(rows, scores.ok, 0, options)
            d_out = zero_masked_tokens(d_out, scores.ok, 0, options)
    keep = True
    kept = p
    if x.dropout is not None:
        keep = dropout(values, kv, options)
        kept = tl.where(keep, p * options.kept, 0.0)
    dv = add_products(sums[1], kept.to(options.dtype), d_out, options)
    dp = product(d_out, v, options)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    ds = score_gradients(p, dp, delta, keep, scores.ok, masked, options)
    ds, d_values = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)
    d_bias = add_bias(sums[2], d_values)
    return add_products(sums[0], ds.to(options.dtype), rows, options), dv, d_bias


@triton.jit
def no_bias_sums(tokens: tl.constexpr, options: tl.constexpr):
    """Sums for the gradients of values of the bias, [tokens] each."""
    sums = ()
    for _ in tl.static_range(len(options.wanted)):
        sums = sums + (tl.full([tokens], 0.0, tl.float32),)
    return sums


@triton.jit
def add_products(sums, a, chunks, options: tl.constexpr):
    """Sums plus the products of ``a`` and each chunk."""
    added = ()
    for i in tl.static_range(len(chunks)):
        added = added + (tl.dot(a, chunks[i], sums[i], input_precision=options.precision),)
    return added


@triton.jit
def add_bias(sums, d_values):
    """Sums of gradients of values of the bias, with those of a tile."""
    added = ()
    for i in tl.static_range(len(sums)):
        added = added + (sums[i] + tl.reduce(d_values[i], 1, total),)
    return added
