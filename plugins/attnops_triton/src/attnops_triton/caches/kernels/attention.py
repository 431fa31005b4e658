"""The attention kernel: online softmax over the tiles of keys of an item, or of one of its splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest
from triton.language.standard import _sum_combine as total

from attnops_triton.caches.kernels.result import output_rows, store_partial, store_result
from attnops_triton.caches.kernels.scores import allowed, apply_score, load_values, tiles_within
from attnops_triton.caches.kernels.storage import (
    columns_of,
    first_missing_page,
    load_entry,
    load_scales,
    load_tokens,
    locate_tile,
    mask_of,
)
from attnops_triton.caches.kernels.write import write_tokens
from attnops_triton.flash.kernels.scores import new_maximum


class Program(NamedTuple):
    """What a program computes."""

    item: Any
    row: Any  # the item's row of the cache
    base: Any  # the cache's first block in its arrays, of blocks of all layers
    k: Any  # the kv head
    scale: Any  # the index of its scale, where scales are by head or tensor
    part: Any  # the tile of query heads
    split: Any
    b: Any  # the batch index for masks and biases
    first: Any  # its tiles of keys
    stop: Any
    full_start: Any  # those that need no mask
    full_stop: Any
    place: Any  # [rows], the place of each row in the tile of scores
    qr: Any  # [rows], their queries and heads, clamped to the valid range
    hr: Any
    real: Any  # [rows], whether they exist


class State(NamedTuple):
    """The online softmax so far."""

    m: Any  # [rows], the maximum
    l: Any  # [rows], the denominator
    unit: (
        Any  # what ``acc`` is to be multiplied by: the only scale of values, or the largest (`KernelOptions.has_unit`)
    )
    acc: Any  # the chunks of the sums of values, [rows, width]


@triton.jit
def attnops_ragged(x, n, options: tl.constexpr):
    """Attention of one item, kv head and split."""
    program = locate_program(x, n, options)
    if options.writes:
        write_tokens(x, n, program, options)
    q, factor = load_queries(x, n, program, options)
    biases = load_values(x.bias, program, None, (), n, options, False, False)
    masks = ()
    # With one scale of values or one per head, late: otherwise ptxas 12.9 spills two registers on sm_80 and sm_89 at
    # D 128. In other calls it is the late load that spills (sm_89, T 512).
    if not options.has_value_factor:
        masks = load_values(x.mask, program, None, (), n, options, True, False)
    unit = program.k.to(tl.float32) * 0.0
    if options.has_value_factor:
        unit = tl.load((x.stored.key_scale if options.is_latent else x.stored.value_scale) + program.scale)
    acc = ()
    for i in tl.static_range(len(options.values.chunks)):
        acc = acc + (tl.full([options.tiles.rows, options.values.chunks[i].width], 0.0, tl.float32),)
    m = tl.full([options.tiles.rows], float("-inf"), tl.float32)
    state = State(m, tl.full([options.tiles.rows], 0.0, tl.float32), unit, acc)
    # A tile's entries of the table are loaded a tile ahead: loads that depend on loads of the same tile would be copied
    # to one buffer less.
    entry = load_entry(x, n, program, program.full_start * options.tiles.bk, options)
    for i in range(program.full_start, program.full_stop):
        after = load_entry(x, n, program, (i + 1) * options.tiles.bk, options)
        state = attend(x, n, program, q, factor, biases, masks, state, i * options.tiles.bk, entry, options, False)
        entry = after
    if options.has_value_factor:
        masks = load_values(x.mask, program, None, (), n, options, True, False)
    before = program.full_start - program.first
    start = masked_start(program, before, 0, options)
    entry = load_entry(x, n, program, start, options)
    for j in range(0, before + program.stop - program.full_stop):
        start = masked_start(program, before, j, options)
        after = load_entry(x, n, program, masked_start(program, before, j + 1, options), options)
        state = attend(x, n, program, q, factor, biases, masks, state, start, entry, options, True)
        entry = after
    if x.part is not None:
        store_partial(x, n, program, state, options)
    else:
        store_result(x, n, program, state, options)


@triton.jit
def locate_program(x, n, options: tl.constexpr):
    """The `Program`. Programs that read the same keys are neighbours."""
    rest = tl.program_id(0)
    if options.is_packed:
        item = rest % n.items
        rest = rest // n.items
        tile = tl.load(x.tile + item)
        row = tl.load(x.row + item)
        b = row * 0
    else:
        tile = rest % n.nq
        rest = rest // n.nq
    part = rest % options.head_blocks
    rest = rest // options.head_blocks
    split = 0
    if x.part is not None:
        split = rest % n.splits
        rest = rest // n.splits
    k = rest % options.K
    if not options.is_packed:
        row = rest // options.K
        b = row
        item = row * n.nq + tile
    if len(x.ranges) > 0:
        first = tl.load(x.ranges[0] + item)
        stop = tl.load(x.ranges[1] + item)
        full_start = tl.load(x.ranges[2] + item)
        full_stop = tl.load(x.ranges[3] + item)
    else:
        first, stop, full_start, full_stop = tiles_within(x, n, row, tile, options)
    if x.part is not None:
        if options.in_order:
            each = tl.load(x.ranges[4] + item)
            stop = tl.minimum(stop, (split + 1) * each)
            first = tl.maximum(first, split * each)
        else:
            each = (stop - first + n.splits - 1) // n.splits
            first = first + split * each
            stop = tl.minimum(stop, first + each)
    stop = tl.maximum(first, stop)
    full_start = tl.minimum(tl.maximum(full_start, first), stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)
    if options.page > 0:
        first_page = full_start * options.tiles.bk // options.page
        stop_page = (full_stop * options.tiles.bk + options.page - 1) // options.page
        missing = first_missing_page(x, n, row, first_page, stop_page, options)
        if missing < stop_page:
            full_stop = tl.maximum(full_start, missing * options.page // options.tiles.bk)
    place = tl.arange(0, options.tiles.rows)
    qi = tile * options.bq + place // options.heads
    hi = part * options.heads + place % options.heads
    real = qi < n.T
    if options.bq * options.heads < options.tiles.rows:
        real = real & (place < options.bq * options.heads)
    if options.G % options.heads > 0:
        real = real & (hi < options.G)
    # Rows that don't exist have the last query and head: with other indices a function might divide by 0.
    qr = tl.minimum(qi, n.T - 1)
    hr = k * options.G + tl.minimum(hi, options.G - 1)
    scale = k if options.scales == "head" else 0
    if x.layer is not None:
        scale = scale + tl.load(x.layer + row) * (options.K if options.scales == "head" else 1)
    return Program(
        item, row, tl.load(x.base + row), k, scale, part, split, b, first, stop, full_start, full_stop, place, qr, hr,
        real,
    )  # fmt: skip


@triton.jit
def masked_start(program, before, j, options: tl.constexpr):
    """The first slot of the tile ``j`` of those that need a mask, of which ``before`` precede the others."""
    return tl.where(j < before, program.first + j, program.full_stop + j - before) * options.tiles.bk


@triton.jit
def load_queries(x, n, program, options: tl.constexpr):
    """The chunks of queries, [rows, width], and the factor of their products with keys, a number or [rows, 1]."""
    at = x.q + output_rows(n, program.b, program.qr, program.hr, options)[0] * options.D
    loaded = ()
    for i in tl.static_range(len(options.keys.chunks)):
        mask = mask_of(i, program.real, options, True)
        loaded = loaded + (tl.load(at[:, None] + columns_of(i, options, True), mask=mask, other=0.0),)
    factor = options.scale
    if options.scales_queries:
        size = tl.reduce(tl.abs(loaded[0].to(tl.float32)), 1, largest)
        for i in tl.static_range(1, len(options.keys.chunks)):
            size = tl.maximum(size, tl.reduce(tl.abs(loaded[i].to(tl.float32)), 1, largest))
        exponent = tl.floor(tl.log2(tl.where((size > 1e-30) & (size < 1e30), size, 1.0)))
        inverse = tl.exp2(-exponent)[:, None]
        factor = (tl.exp2(exponent) * options.scale)[:, None]
    q = ()
    for i in tl.static_range(len(options.keys.chunks)):
        if options.scales_queries:
            q = q + ((loaded[i].to(tl.float32) * inverse).to(options.operand),)
        else:
            q = q + (loaded[i].to(options.operand),)
    if options.has_value_factor:
        factor = factor * tl.load(x.stored.key_scale + program.scale)
    return q, factor


@triton.jit
def attend(x, n, program, q, factor, biases, masks, state, start, entry, options: tl.constexpr, masked: tl.constexpr):
    """The `State` after the tile of keys from the slot ``start`` on, whose `storage.load_entry` is ``entry``."""
    tile = locate_tile(n, program, start, entry, options, not masked)
    kx = tile.slot
    if masked and not options.is_even:
        kx = tl.minimum(kx, n.S - 1)
    if options.is_packed:
        kx = kx + program.row * n.S
    biases = load_values(x.bias, program, kx, biases, n, options, False, True)
    seen = None
    if masked:
        masks = load_values(x.mask, program, kx, masks, n, options, True, True)
        ok = allowed(x, n, program, tile, kx, masks, options)
        seen = tl.reduce(ok.to(tl.int32), 0, largest) != 0
    # What is written is read through the same pointers.
    tokens = x.stored if x.written.key is None else x.written
    k = load_tokens(tokens.key, tile, program.k, seen, options, True, masked)
    s = tl.dot(q[0], tl.trans(k[0]), input_precision=options.precision)
    for i in tl.static_range(1, len(options.keys.chunks)):
        s = tl.dot(q[i], tl.trans(k[i]), s, input_precision=options.precision)
    if options.scales_first:
        s = s * factor
    if options.by_token:
        scales = load_scales(tokens.key_scale, tile, program.k, seen, options, masked)
        s = s * scales[None, :]
    s = apply_score(x, n, program, s, kx, biases, options)
    if masked:
        s = tl.where(ok, s, float("-inf"))

    m, below, alpha = new_maximum(s, state.m, masked, options)
    if options.has_bias or options.precision is not None:
        # Exact: with large biases a difference of products would not be.
        p = tl.exp2((s - below[:, None]) * options.unit)
    else:
        p = tl.exp2(s * options.unit - (below * options.unit)[:, None])
    l = state.l * alpha + tl.reduce(p, 1, total)

    if options.is_latent:
        v = k
    else:
        values = tokens.key if options.is_joined else tokens.value
        v = load_tokens(values, tile, program.k, seen, options, False, masked)
    unit = state.unit
    if options.by_token:
        if not options.is_latent:
            scales = load_scales(tokens.value_scale, tile, program.k, seen, options, masked)
        if options.has_unit:
            unit = tl.maximum(unit, tl.reduce(scales, 0, largest))
            inverse = tl.where(unit > 0.0, 1.0 / unit, 0.0)
            alpha = alpha * (state.unit * inverse)
            scales = scales * inverse
        p = p * scales[None, :]
    p = p.to(options.operand)
    acc = ()
    for i in tl.static_range(len(options.values.chunks)):
        acc = acc + (tl.dot(p, v[i], state.acc[i] * alpha[:, None], input_precision=options.precision),)
    return State(m, l, unit, acc)
