"""The gradients of biases that have an element per score or per distance."""

from __future__ import annotations

import triton
import triton.language as tl

from attnops_triton.flash.kernels.backward import load_queries, tile_gradients
from attnops_triton.flash.kernels.tokens import Program, base, keys, queries


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
        given, values = load_queries(x, n, program, q, True, options)
        ds, _, _, _ = tile_gradients(x, n, program, q, kv, given, values, bits_at, True, True, options)
        acc += ds
    return acc
