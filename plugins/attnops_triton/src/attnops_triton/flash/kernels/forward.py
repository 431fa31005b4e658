"""The forward kernel: an online softmax of a tile of queries over its active tiles of keys."""

# Tuples are joined, and conditions nested, as Triton's language requires.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

from typing import Any, NamedTuple

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
    zero_masked,
)
from attnops_triton.flash.kernels.tokens import (
    column,
    find_row,
    full_tiles,
    keys,
    load_rows,
    partial_tiles,
    place_by_query,
    queries,
    store_rows,
    store_token,
)


class State(NamedTuple):
    """The online softmax so far.

    Attributes:
        m, l: [bq], the maximum and the denominator.
        acc: the chunks of the sums of values, [bq, width].
    """

    m: Any
    l: Any
    acc: Any


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
    acc = ()
    for i in tl.static_range(len(options.value_chunks)):
        acc = acc + (tl.full([options.bq, options.value_chunks[i][1]], 0.0, tl.float32),)
    state = State(m, l, acc)
    row = find_row(x, n, program, options)
    start, stop = full_tiles(x, n, row)
    for i in range(start, stop):
        state = attend(x, n, program, q, rows, values, state, column(x, row, i), 0, options, False)
    if x.ranges is not None or not options.is_even:
        start, stop = partial_tiles(x, n, row)
        for i in range(start, stop):
            tile = column(x, row, i)
            bits_at = 0
            if x.words is not None:
                bits_at = tl.load(x.first + row.index) + (i - start)
            state = attend(x, n, program, q, rows, values, state, tile, bits_at, options, True)
    m, l, factor, seen = denominator(x, n, program, state.m, state.l, options)
    out = ()
    for i in tl.static_range(len(options.value_chunks)):
        out = out + (state.acc[i] * factor[:, None],)
    store_rows(x.out, n, program, q, out, options.plan.H, True, True, options.out_dtype, options)
    store_token(x.m_out, n, program, q, tl.where(seen, m, float("-inf")), options)
    store_token(x.log2_sum_out, n, program, q, tl.log2(l), options)


@triton.jit
def attend(
    x, n, program, q, rows, values, state, tile, bits_at, options: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """The `State` after a tile of keys."""
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
    m = tl.maximum(state.m, tl.reduce(s, 1, largest))
    below = m
    if masked or options.has_bias:
        # If all scores so far are masked, m is −inf, and −inf − −inf would be NaN.
        below = tl.where(m == float("-inf"), 0.0, m)
    p = weights(s, below, None, options)
    alpha = tl.exp2((state.m - below) * options.unit)
    l = state.l * alpha + tl.reduce(p, 1, total)
    if x.dropout is not None:
        p = tl.where(dropout(values, kv, options), p, 0.0)
    v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, edge, options)
    if masked:
        if options.has_fully_masked and options.is_masked:
            v = zero_masked(v, ok, 0, options)
    p = p.to(options.dtype)
    acc = ()
    for i in tl.static_range(len(options.value_chunks)):
        acc = acc + (tl.dot(p, v[i], state.acc[i] * alpha[:, None], input_precision=options.precision),)
    return State(m, l, acc)
