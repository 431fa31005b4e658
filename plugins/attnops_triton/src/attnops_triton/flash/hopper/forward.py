"""The forward kernel for Hopper, as in FlashAttention-3 (arXiv:2407.08608).

Two partitions compute 64 queries each. They alternate: one multiplies matrices while the other computes exponentials.
Within a partition, the scores of a tile are computed while the weights of the previous tile are multiplied by its
values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.hopper.shared import (
    advance,
    each_tile,
    find_tiles,
    first_token,
    load,
    make_barriers,
    place_tile,
    share,
    store_rows,
    tokens,
)
from attnops_triton.flash.hopper.steps import fill, keep_order, new_product, no_sums, operand, wait_held
from attnops_triton.flash.kernels.scores import (
    denominator,
    load_sink,
    load_values,
    new_maximum,
    score_tile,
    store_maximum,
    values_of,
    weights,
)
from attnops_triton.flash.kernels.tokens import place_by_query, store_token


class State(NamedTuple):
    """The online softmax so far."""

    m: Any  # the maximum, [rows]
    l: Any  # the denominator, [rows]
    acc: Any  # the sums of values, [rows, D], without the last tile's
    w: Any  # the last tile's weights
    stage: Any  # the last tile's buffer
    phase: Any  # the parity of its barriers
    turn: Any  # the parity of the turn's barrier


@gluon.jit
def attnops_flash_forward(x, n, options: gl.constexpr):
    """Attention of a tile of queries."""
    program = place_by_query(n, options)
    # Barriers by which the computing partitions alternate.
    turn = make_barriers(2, 1)
    shared = share(x, program, turn, options)
    mbarrier.arrive(turn.index(0))
    gl.warp_specialize(
        [(compute, (0, x, n, program, shared, options)), (compute, (1, x, n, program, shared, options)),
         (load, (x, n, program, shared, options))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def compute(group: gl.constexpr, x, n, program, shared, options: gl.constexpr):
    """The output of half the queries."""
    q = tokens(shared.first + group * options.rows, n.T, True, options)
    values = values_of(x, n, program, q, "q", not options.is_even, options)
    tiles = find_tiles(x, n, program, options)
    k, v = shared.rings
    m = gl.full([options.rows], float("-inf"), gl.float32, options.row_layout)
    l = gl.full([options.rows], 0.0, gl.float32, options.row_layout)
    acc = no_sums(options)
    wait_held(shared, group)
    if tiles.count > 0:
        # The first tile may be PARTIAL or FULL.
        masked: gl.constexpr = x.ranges is not None or not options.is_even
        i = tiles.full_start - tiles.partials
        if masked:
            i = gl.where(tiles.partials > 0, tiles.partial_start, i)
        kv = tokens(first_token(x, tiles, i, options), n.S, False, options)
        found = load_values(x, n, program, kv, values, "kv", masked and not options.is_even, options)
        mbarrier.wait(k.ready.index(0), 0)
        s = new_product(shared.held[0].tile.index(group), k.tile.index(0).permute([1, 0]), options)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k.free.index(0))
        m, l, _, p = softmax(x, n, program, q, kv, s, m, l, found, options, masked)
        state = State(m, l, acc, operand(p, options), 0, 0, 0)
        state = each_tile(step, state, group, x, n, program, tiles, shared, (q, values), options, 1)
        mbarrier.wait(v.ready.index(state.stage), state.phase)
        acc = warpgroup_mma(state.w, v.tile.index(state.stage), state.acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[acc, state.w])
        m = state.m
        l = state.l
    store_maximum(x, n, program, q, m, l, options)
    m, l, factor, seen = denominator(load_sink(x, n, program, options), m, l, options)
    acc = acc * gl.convert_layout(factor, options.sums_row_layout)[:, None]
    fill(shared.held[0].tile.index(group), acc, options)
    store_rows(x.out, 0, group, program.h, program, shared, options)
    store_token(x.m_out, n, program, q, gl.where(seen, m, float("-inf")), options)
    store_token(x.log2_sum_out, n, program, q, gl.log2(l), options)
    tma.store_wait(0)


@gluon.jit
def step(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """A tile's scores and weights, and the product of the previous tile's weights and values."""
    q, values = given
    k, v = shared.rings
    turn = shared.own
    before = state.stage
    phase_before = state.phase
    stage, phase = advance(before, phase_before, options)
    kv = tokens(place_tile(x, program, tiles, t, options, masked)[0], n.S, False, options)
    values = load_values(x, n, program, kv, values, "kv", masked and not options.is_even, options)
    mbarrier.wait(k.ready.index(stage), phase)
    mbarrier.wait(turn.index(group), state.turn)
    s = new_product(shared.held[0].tile.index(group), k.tile.index(stage).permute([1, 0]), options)
    mbarrier.wait(v.ready.index(before), phase_before)
    acc = warpgroup_mma(state.w, v.tile.index(before), state.acc, is_async=True)
    mbarrier.arrive(turn.index(1 - group))
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k.free.index(stage))
    m, l, alpha, p = softmax(x, n, program, q, kv, s, state.m, state.l, values, options, masked)
    keep_order(shared, group)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, state.w])
    mbarrier.arrive(v.free.index(before))
    acc = acc * gl.convert_layout(alpha, options.sums_row_layout)[:, None]
    return State(m, l, acc, operand(p, options), stage, phase, state.turn ^ 1)


@gluon.jit
def softmax(x, n, program, q, kv, s, m, l, values, options: gl.constexpr, masked: gl.constexpr):
    """``m`` and ``l`` with a tile's products, the factor of earlier sums, and the tile's weights."""
    scores = score_tile(x, n, program, q, kv, s, values, 0, masked, options)
    m, below, alpha = new_maximum(scores.s, m, masked, options)
    p = weights(scores.s, below, None, options)
    return m, l * alpha + gl.reduce(p, 1, total), alpha, p
