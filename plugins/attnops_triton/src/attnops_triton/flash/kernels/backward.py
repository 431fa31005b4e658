"""The backward kernels: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Both recompute the weights from the logsumexp (Dao 2023, arXiv:2307.08691). They use no atomics and add in a fixed
order. They also compute the gradients of the values of an elementwise bias per query, key or head.
"""

# Tuples are joined, and conditions nested, as Triton's language requires.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.kernels.scores import (
    cap_and_bias_vjp,
    dropout,
    load_values,
    no_values,
    product,
    recompute_scores,
    score_gradients,
    weights,
    zero_masked,
)
from attnops_triton.flash.kernels.tokens import (
    Program,
    column,
    find_row,
    full_tiles,
    keys,
    load_rows,
    load_statistic,
    partial_tiles,
    place_by_key,
    place_by_query,
    queries,
    store_rows,
    store_token,
)


class Queries(NamedTuple):
    """What the kernel by queries loads once.

    Attributes:
        q, d_out: the chunks of the rows of queries and of the output's cotangent.
        m, log2_sum, delta: [bq].
    """

    q: Any
    d_out: Any
    m: Any
    log2_sum: Any
    delta: Any


class QuerySums(NamedTuple):
    """The sums of the kernel by queries: the chunks of dq, and the gradients of values of the bias, [bq] each."""

    dq: Any
    d_bias: Any


class KeySums(NamedTuple):
    """The sums of the kernel by keys: the chunks of dk and dv, and the gradients of values of the bias, [bk] each."""

    dk: Any
    dv: Any
    d_bias: Any


@triton.jit
def attnops_flash_backward_query(x, n, options: tl.constexpr):
    """The gradient of a tile of queries."""
    edge: tl.constexpr = not options.is_even
    program = place_by_query(n, options)
    q = queries(program.row * options.bq, n, options)
    rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, edge, options)
    d_out = load_rows(x.d_out, n, program, q, options.layouts.d_out.bit, True, True, edge, options)
    values = load_values(x, n, program, q, no_values(options), "", False, options)
    values = load_values(x, n, program, q, values, "q", edge, options)
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    given = Queries(rows, d_out, m, log2_sum, delta)
    sums = QuerySums(zeros(options.bq, options.chunks), no_bias_sums(options.bq, options))
    row = find_row(x, n, program, options)
    start, stop = full_tiles(x, n, row)
    for i in range(start, stop):
        sums = add_to_queries(x, n, program, q, given, values, sums, column(x, row, i), 0, options, False)
    if x.ranges is not None or not options.is_even:
        start, stop = partial_tiles(x, n, row)
        for i in range(start, stop):
            tile = column(x, row, i)
            bits_at = 0
            if x.words is not None:
                bits_at = tl.load(x.first + row.index) + (i - start)
            sums = add_to_queries(x, n, program, q, given, values, sums, tile, bits_at, options, True)
    dq = scaled(sums.dq, options)
    store_rows(x.dq, n, program, q, dq, options.plan.H, True, False, options.gradient_dtype, options)
    for i in tl.static_range(len(options.wanted)):
        store_token(x.dq_bias[i], n, program, q, sums.d_bias[i], options)


@triton.jit
def add_to_queries(
    x, n, program, q, given, values, sums, tile, bits_at, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The `QuerySums` after a tile of keys."""
    edge: tl.constexpr = masked and not options.is_even
    kv = keys(tile * options.bk, n, options)
    k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, edge, options)
    values = load_values(x, n, program, kv, values, "kv", edge, options)
    s = product(given.q, k, options)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    dp = product(given.d_out, v, options)
    scores = recompute_scores(x, n, program, q, kv, s, values, bits_at, masked, options)
    p = weights(scores.s, given.m, given.log2_sum, options)
    keep = True
    if x.dropout is not None:
        keep = dropout(values, kv, options)
    ds = score_gradients(p, dp, given.delta, keep, scores.ok, masked, options)
    ds, d_values = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)
    d_bias = ()
    for i in tl.static_range(len(options.wanted)):
        d_bias = d_bias + (sums.d_bias[i] + tl.reduce(d_values[i], 1, total),)
    if masked:
        if options.has_ok and options.has_fully_masked:
            k = zero_masked(k, scores.ok, 0, options)
    return QuerySums(add_products(sums.dq, ds.to(options.dtype), k, options), d_bias)


@triton.jit
def attnops_flash_backward_key(x, n, options: tl.constexpr):
    """The gradients of a tile of keys and its values."""
    edge: tl.constexpr = not options.is_even
    program = place_by_key(n, options)
    kv = keys(program.row * options.bk, n, options)
    k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, edge, options)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    dk = zeros(options.bk, options.chunks)
    dv = zeros(options.bk, options.value_chunks)
    if options.splits_groups or options.flat:
        dk, dv = add_heads(x, n, program, kv, k, v, dk, dv, options)
    else:
        for g in range(0, options.plan.G):
            head = Program(program.b, program.k * options.plan.G + g, program.k, program.row)
            dk, dv = add_heads(x, n, head, kv, k, v, dk, dv, options)
    dk = scaled(dk, options)
    if options.splits_groups:
        store_rows(x.dk, n, program, kv, dk, options.plan.H, True, False, tl.float32, options)
        store_rows(x.dv, n, program, kv, dv, options.plan.H, True, True, tl.float32, options)
    else:
        store_rows(x.dk, n, program, kv, dk, options.plan.K, False, False, options.gradient_dtype, options)
        store_rows(x.dv, n, program, kv, dv, options.plan.K, False, True, options.gradient_dtype, options)


@triton.jit
def add_heads(x, n, program, kv, k, v, dk, dv, options: tl.constexpr):
    """The sums after the program's query head, or all of its kv head if ``options.flat``."""
    heads: tl.constexpr = options.plan.G if options.flat else 1
    values = load_values(x, n, program, kv, no_values(options), "", False, options)
    values = load_values(x, n, program, kv, values, "kv", not options.is_even, options)
    sums = KeySums(dk, dv, no_bias_sums(options.bk, options))
    row = find_row(x, n, program, options)
    start, stop = full_tiles(x, n, row)
    for t in range(start * heads, stop * heads):
        sums = add_to_keys(x, n, program, kv, k, v, values, sums, row, start, t, options, False)
    if x.ranges is not None or not options.is_even:
        start, stop = partial_tiles(x, n, row)
        for t in range(start * heads, stop * heads):
            sums = add_to_keys(x, n, program, kv, k, v, values, sums, row, start, t, options, True)
    for i in tl.static_range(len(options.wanted)):
        store_token(x.dk_bias[i], n, program, kv, sums.d_bias[i], options)
    return sums.dk, sums.dv


@triton.jit
def add_to_keys(
    x, n, program, kv, k, v, values, sums, row, start, t, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The `KeySums` after the tile of queries ``t`` of a row; if ``options.flat``, ``t`` counts the tile's heads."""
    edge: tl.constexpr = masked and not options.is_even
    i = t
    if options.flat:
        program = Program(program.b, program.k * options.plan.G + t % options.plan.G, program.k, program.row)
        i = t // options.plan.G
    q = queries(column(x, row, i) * options.bq, n, options)
    bits_at = 0
    if masked:
        if x.words is not None:
            bits_at = tl.load(x.first + row.index) + (i - start)
    rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, edge, options)
    values = load_values(x, n, program, q, values, "q", edge, options)
    s = product(rows, k, options)
    # Loaded where they are used, which saves registers. The pipeline still fetches them a tile ahead.
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    scores = recompute_scores(x, n, program, q, kv, s, values, bits_at, masked, options)
    p = weights(scores.s, m, log2_sum, options)
    d_out = load_rows(x.d_out, n, program, q, options.layouts.d_out.bit, True, True, edge, options)
    if masked:
        if options.has_ok and options.has_fully_masked:
            rows = zero_masked(rows, scores.ok, 0, options)
            d_out = zero_masked(d_out, scores.ok, 0, options)
    keep = True
    kept = p
    if x.dropout is not None:
        keep = dropout(values, kv, options)
        kept = tl.where(keep, p * options.kept, 0.0)
    dv = add_products(sums.dv, kept.to(options.dtype), d_out, options)
    dp = product(d_out, v, options)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    ds = score_gradients(p, dp, delta, keep, scores.ok, masked, options)
    ds, d_values = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)
    d_bias = ()
    for i in tl.static_range(len(options.wanted)):
        d_bias = d_bias + (sums.d_bias[i] + tl.reduce(d_values[i], 1, total),)
    return KeySums(add_products(sums.dk, ds.to(options.dtype), rows, options), dv, d_bias)


@triton.jit
def zeros(rows: tl.constexpr, chunks: tl.constexpr):
    """Sums for chunks, [rows, width] each."""
    sums = ()
    for i in tl.static_range(len(chunks)):
        sums = sums + (tl.full([rows, chunks[i][1]], 0.0, tl.float32),)
    return sums


@triton.jit
def no_bias_sums(tokens: tl.constexpr, options: tl.constexpr):
    """Sums for the gradients of values of the bias, [tokens] each."""
    sums = ()
    for i in tl.static_range(len(options.wanted)):
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
def scaled(chunks, options: tl.constexpr):
    """Chunks times the softmax scale."""
    results = ()
    for i in tl.static_range(len(chunks)):
        results = results + (chunks[i] * options.scale,)
    return results
