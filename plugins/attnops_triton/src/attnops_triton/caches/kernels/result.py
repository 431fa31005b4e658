"""What a program stores: its rows of the output, or its split; and the kernel that merges splits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest
from triton.language.standard import _sum_combine as total

from attnops_triton.caches.kernels.storage import columns_of, mask_of
from attnops_triton.flash.kernels.scores import denominator
from attnops_triton.flash.plan import LN2 as _LN2

LN2 = tl.constexpr(_LN2)


@triton.jit
def store_partial(x, n, program, state, options: tl.constexpr):
    """Store a split, all float32: the sums before the division, the maximum, and the denominator.

    The arrays are [items, kv heads, tiles of heads, splits, rows, …]. A row that sees no key stores only its
    denominator, 0.
    """
    tile = (program.item * options.K + program.k) * options.head_blocks + program.part
    at = (tile.to(tl.int64) * n.splits + program.split) * options.tiles.rows + program.place
    tl.store(x.part_m + at, state.m)
    tl.store(x.part_l + at, state.l)
    for i in tl.static_range(len(options.values.chunks)):
        target = x.part + at[:, None] * options.Dv + columns_of(i, options, False)
        tl.store(target, unscaled(state, i, options), mask=mask_of(i, state.l != 0.0, options, False))


@triton.jit
def unscaled(state, i: tl.constexpr, options: tl.constexpr):
    """A chunk of the sums, multiplied by the values' scales."""
    acc = state.acc[i]
    if options.has_unit or options.has_value_factor:
        acc = acc * state.unit
    return acc


@triton.jit
def store_result(x, n, program, state, options: tl.constexpr):
    """Divide by the denominator, sinks included, and store output and logsumexp."""
    scaling, seen_any, lse = normaliser(x, state.m, state.l, program.hr, options)
    stored = program.real
    if options.is_packed:
        stored = stored & seen_any
    at, at_lse = output_rows(n, program.b, program.qr, program.hr, options)
    for i in tl.static_range(len(options.values.chunks)):
        out = unscaled(state, i, options) * scaling[:, None]
        target = x.out + at[:, None] * options.Dv + columns_of(i, options, False)
        tl.store(target, out, mask=mask_of(i, stored, options, False))
    if x.lse is not None:
        tl.store(x.lse + at_lse, lse, mask=stored)


@triton.jit
def output_rows(n, b, qr, hr, options: tl.constexpr):
    """The indices of a query and head among the rows of the output, and of the logsumexp."""
    row = qr.to(tl.int64)
    lse_row = hr.to(tl.int64) * n.T + qr
    if not options.is_packed:
        row = b.to(tl.int64) * n.T + qr
        lse_row = (b.to(tl.int64) * options.H + hr) * n.T + qr
    return row * options.H + hr, lse_row


@triton.jit
def normaliser(x, m, l, hr, options: tl.constexpr):
    """The factor of sums, whether any key is seen, and the logsumexp. Rows that see no key give 0 and −inf."""
    sink = None
    if x.sinks is not None:
        sink = tl.load(x.sinks + hr)
    m, l, scaling, seen_any = denominator(sink, m, l, options)
    return scaling, seen_any, tl.where(seen_any, m * options.score_unit + tl.log2(l) * LN2, float("-inf"))


@triton.jit
def attnops_ragged_merge(x, n, options: tl.constexpr):
    """Merge the splits of one row of a tile."""
    rest = tl.program_id(0)
    place = rest % (options.bq * options.heads)
    rest = rest // (options.bq * options.heads)
    part = rest % options.head_blocks
    rest = rest // options.head_blocks
    k = rest % options.K
    item = rest // options.K
    if options.is_packed:
        tile = tl.load(x.tile + item)
        b = tile
    else:
        tile = item % n.nq
        b = item // n.nq
    qr = tile * options.bq + place // options.heads
    g = place % options.heads + part * options.heads
    hr = k * options.G + tl.minimum(g, options.G - 1)
    first = ((item * options.K + k) * options.head_blocks + part).to(tl.int64) * n.splits
    each = tl.arange(0, options.merged)
    at = (first + each) * options.tiles.rows + place
    ls = tl.load(x.part_l + at, mask=each < n.splits, other=0.0)
    ms = tl.load(x.part_m + at, mask=ls != 0.0, other=float("-inf"))
    m = tl.reduce(ms, 0, largest)
    below = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.where(ls != 0.0, tl.exp2((ms - below) * options.unit), 0.0)
    scaling, seen_any, lse = normaliser(x, m, tl.reduce(ls * weights, 0, total), hr, options)
    stored = qr < n.T
    if options.G % options.heads > 0:
        stored = stored & (g < options.G)
    if options.is_packed:
        stored = stored & seen_any
    dims: tl.constexpr = triton.next_power_of_2(options.Dv)
    columns = tl.arange(0, dims)
    acc = tl.full([dims], 0.0, tl.float32)
    # A fixed number of splits at a time, in order, so that a row's result does not depend on the rest of the batch.
    for turn in range(0, options.merged // 16):
        some = turn * 16 + tl.arange(0, 16)
        some_at = (first + some) * options.tiles.rows + place
        some_l = tl.load(x.part_l + some_at, mask=some < n.splits, other=0.0)
        some_m = tl.load(x.part_m + some_at, mask=some_l != 0.0, other=float("-inf"))
        weight = tl.where(some_l != 0.0, tl.exp2((some_m - below) * options.unit), 0.0)
        loaded = (some_l != 0.0)[:, None] & (columns < options.Dv)[None, :]
        sums = tl.load(x.part + some_at[:, None] * options.Dv + columns[None, :], mask=loaded, other=0.0)
        acc = acc + tl.reduce(sums * weight[:, None], 0, total)
    row, lse_row = output_rows(n, b, qr, hr, options)
    tl.store(x.out + row * options.Dv + columns, acc * scaling, mask=columns < tl.where(stored, options.Dv, 0))
    if x.lse is not None:
        one = tl.arange(0, 1)
        tl.store(x.lse + lse_row + one, lse, mask=one < tl.where(stored, 1, 0))
