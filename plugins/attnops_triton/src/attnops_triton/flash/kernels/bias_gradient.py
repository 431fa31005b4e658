"""The gradients of biases that have an element per score or per distance."""

from __future__ import annotations

import triton
import triton.language as tl

from attnops_triton.flash.kernels.scores import (
    dropout,
    load_values,
    no_values,
    product,
    recompute_scores,
    score_gradients,
    weights,
)
from attnops_triton.flash.kernels.tokens import Program, base, keys, load_rows, load_statistic, queries


@triton.jit
def attnops_flash_array_gradient(x, n, options: tl.constexpr):
    """The gradient of a tile of an array bias, summed over the batches and heads that share it."""
    pid = tl.program_id(0)
    row = pid // n.columns % n.rows
    column = pid % n.columns
    lead = pid // (n.rows * n.columns)
    acc = tl.full(options.shape, 0.0, tl.float32)
    q = queries(row * options.bq, n, options)
    kv = keys(column * options.bk, n, options)
    heads: tl.constexpr = options.plan.H if options.layouts.array.heads == 1 else 1
    for r in range(0, n.batches * heads):
        h = lead % options.layouts.array.heads + r % heads
        program = Program(lead // options.layouts.array.heads + r // heads, h, h // options.plan.G, row)
        acc = add_tile(x, n, program, q, kv, column, acc, options)
    at = x.d_array + lead.to(tl.int64) * n.T * n.S + q.first.to(tl.int64) * n.S + kv.first.to(tl.int64)
    mask = (q.spread < n.T) & (kv.spread < n.S)
    tl.store(at + (q.spread - q.first) * n.S + (kv.spread - kv.first), acc, mask=mask)


@triton.jit
def attnops_flash_table_gradient(x, n, options: tl.constexpr):
    """The sum of the gradients of all tiles of a block diagonal, over all batches."""
    pid = tl.program_id(0)
    h = pid // (n.rows + n.columns - 1)
    ahead = pid % (n.rows + n.columns - 1) - (n.rows - 1)
    first = tl.maximum(0, -ahead)
    last = tl.minimum(n.rows, n.columns - ahead)
    acc = tl.full(options.shape, 0.0, tl.float32)
    for r in range(first, last):
        row = r + 0
        column = row + ahead
        q = queries(row * options.bq, n, options)
        kv = keys(column * options.bk, n, options)
        for batch in range(0, n.batches):
            program = Program(h * 0 + batch, h, h // options.plan.G, row)
            acc = add_tile(x, n, program, q, kv, column, acc, options)
    i = tl.arange(0, options.bq)
    at = x.sums + pid.to(tl.int64) * (options.bq * options.bq) + i[:, None] * options.bq + i[None, :]
    tl.store(at, acc)


@triton.jit
def add_tile(x, n, program, q, kv, column, acc, options: tl.constexpr):
    """``acc`` and the gradients of a tile's scores."""
    at = base(x.coverage, n, program, n.rows, options.layouts.coverage, n.columns) + program.row * n.columns + column
    if tl.load(at) > 0:
        bits_at = 0
        if x.numbers is not None:
            numbers = base(x.numbers, n, program, n.rows, options.layouts.numbers, n.columns)
            bits_at = tl.load(numbers + program.row * n.columns + column)
        rows = load_rows(x.q, n, program, q, options.layouts.q.bit, True, False, True, options)
        d_out = load_rows(x.d_out, n, program, q, options.layouts.d_out.bit, True, True, True, options)
        values = load_values(x, n, program, q, no_values(options), "", False, options)
        values = load_values(x, n, program, q, values, "q", True, options)
        m = load_statistic(x.m, n, program, q, True, float("inf"), options.layouts.m)
        log2_sum = load_statistic(x.log2_sum, n, program, q, True, 0.0, options.layouts.log2_sum)
        delta = load_statistic(x.delta, n, program, q, True, 0.0, options.layouts.delta)
        k = load_rows(x.k, n, program, kv, options.layouts.k.bit, False, False, True, options)
        values = load_values(x, n, program, kv, values, "kv", True, options)
        s = product(rows, k, options)
        v = load_rows(x.v, n, program, kv, options.layouts.v.bit, False, True, True, options)
        dp = product(d_out, v, options)
        scores = recompute_scores(x, n, program, q, kv, s, values, bits_at, True, options)
        p = weights(scores.s, m, log2_sum, options)
        keep = True
        if x.dropout is not None:
            keep = dropout(values, kv, options)
        acc += score_gradients(p, dp, delta, keep, scores.ok, True, options)
    return acc
