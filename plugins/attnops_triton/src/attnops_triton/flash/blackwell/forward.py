"""The forward kernel for Blackwell, as in FlashAttention-4 and in Triton's examples of Gluon.

A program has two tiles of 128 queries and five partitions: one loads, one issues all products, two compute the weights
of one tile each, and one rescales the sums of both tiles when the maximum changes. Scores, weights and sums are in
tensor memory, where the weights of a tile overwrite its scores. The products of one tile run while the weights of the
other are computed.

Products run in the order in which they are issued. So when scores are ready, the product of weights and values that was
issued before has finished too: its sums may be rescaled, and the weights that it read may be overwritten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.standard import _sum_combine as total

from attnops_triton.flash.blackwell.exponentials import exp2
from attnops_triton.flash.blackwell.memory import allocate, moved, operands
from attnops_triton.flash.hopper.shared import (
    Tiles,
    advance,
    each_tile,
    find_tiles,
    load_held,
    load_tile,
    make_barriers,
    place_tile,
    share,
    store_rows,
    tokens,
)
from attnops_triton.flash.kernels.scores import (
    allowed,
    apply_cap_and_bias,
    denominator,
    exponents,
    load_sink,
    load_values,
    new_maximum,
    store_maximum,
    values_of,
)
from attnops_triton.flash.kernels.tokens import Tokens, place_by_query, store_token


class Memory(NamedTuple):
    """Memory with a copy for each tile of queries, and barriers with one for each."""

    s: Any  # tensor memory of scores, and of weights
    acc: Any  # tensor memory of sums
    alpha: Any  # the factors of sums, [2, rows]
    m: Any  # the statistics, [2, rows]
    l: Any
    alpha_ready: Any  # alpha has been written
    ml_ready: Any  # m and l have been written
    s_ready: Any  # the scores have been written
    w_ready: Any  # the weights have been written, and the sums have been rescaled for them
    done: Any  # the sums are complete


@gluon.jit
def attnops_flash_forward(x, n, options: gl.constexpr):
    """Attention of two tiles of queries."""
    program = place_by_query(n, options)
    tiles = find_tiles(x, n, program, options)
    if x.ranges is None:
        tiles = Tiles(
            tiles.row, moved(tiles.full_start), moved(tiles.partial_start), moved(tiles.partials), moved(tiles.count)
        )
    s = allocate(2, options.columns, options)
    acc = allocate(2, options.plan.D, options)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alpha = gl.allocate_shared_memory(gl.float32, [2, options.rows], layout)
    m = gl.allocate_shared_memory(gl.float32, [2, options.rows], layout)
    l = gl.allocate_shared_memory(gl.float32, [2, options.rows], layout)
    own = Memory(
        s, acc, alpha, m, l, make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 2),
        make_barriers(2, 1),
    )  # fmt: skip
    shared = share(x, program, own, options)
    gl.warp_specialize(
        [(correct, (x, n, program, tiles, shared, options)), (compute, (0, x, n, program, tiles, shared, options)),
         (compute, (1, x, n, program, tiles, shared, options)), (multiply, (tiles, shared, options)),
         (load_row, (x, n, program, tiles, shared, options))],
        [4, 4, 1, 1], [216, 216, 24, 24],
    )  # fmt: skip


@gluon.jit
def load_row(x, n, program, tiles, shared, options: gl.constexpr):
    """The loader."""
    load_held(n, program, shared, options)
    state = (0, 1)
    each_tile(load_tile, state, 0, x, n, program, tiles, shared, 0, options)


@gluon.jit
def issue_scores(shared, stage, half: gl.constexpr):
    """Issue the products for scores."""
    k = shared.rings[0]
    own = shared.own
    tcgen05_mma(
        shared.held[0].tile.index(half), k.tile.index(stage).permute([1, 0]), own.s.index(half), use_acc=False,
        mbarriers=[own.s_ready.index(half), k.free.index(stage)],
    )  # fmt: skip


@gluon.jit
def multiply(tiles, shared, options: gl.constexpr):
    """All products. The scores of a tile follow the previous tile's weights times values."""
    k, v = shared.rings
    own = shared.own
    bk: gl.constexpr = options.columns
    stage = 0
    phase = 0
    phase_of_weights = 0
    mbarrier.wait(shared.ready.index(0), 0)
    mbarrier.wait(shared.ready.index(1), 0)
    if tiles.count > 0:
        mbarrier.wait(k.ready.index(stage), phase)
        issue_scores(shared, stage, 0)
        issue_scores(shared, stage, 1)
        for t in range(1, tiles.count):
            before = stage
            phase_before = phase
            stage, phase = advance(stage, phase, options)
            mbarrier.wait(k.ready.index(stage), phase)
            mbarrier.wait(v.ready.index(before), phase_before)
            for half in gl.static_range(2):
                w = operands(own.s.index(half), bk, options).slice(0, bk)
                mbarrier.wait(own.w_ready.index(half), phase_of_weights)
                tcgen05_mma(
                    w, v.tile.index(before), own.acc.index(half), use_acc=t > 1, mbarriers=[v.free.index(before)]
                )
                issue_scores(shared, stage, half)
            phase_of_weights = phase_of_weights ^ 1
        mbarrier.wait(v.ready.index(stage), phase)
        for half in gl.static_range(2):
            w = operands(own.s.index(half), bk, options).slice(0, bk)
            mbarrier.wait(own.w_ready.index(half), phase_of_weights)
            tcgen05_mma(
                w, v.tile.index(stage), own.acc.index(half), use_acc=tiles.count > 1,
                mbarriers=[own.done.index(half)],
            )  # fmt: skip
    else:
        mbarrier.arrive(own.done.index(0))
        mbarrier.arrive(own.done.index(1))


@gluon.jit
def compute(group: gl.constexpr, x, n, program, tiles, shared, options: gl.constexpr):
    """The weights of all tiles of keys, and ``m`` and ``l``."""
    q = tokens(shared.first + group * options.rows, n.T, True, options)
    values = values_of(x, n, program, q, "q", not options.is_even, options)
    own = shared.own
    m = gl.full([options.rows], float("-inf"), gl.float32, options.row_layout)
    l = gl.full([options.rows], 0.0, gl.float32, options.row_layout)
    state = (m, l, 0)
    m, l, _ = each_tile(step, state, group, x, n, program, tiles, shared, (q, values), options)
    own.m.index(group).store(m)
    own.l.index(group).store(l)
    mbarrier.arrive(own.ml_ready.index(group))


@gluon.jit
def step(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """The weights of a tile and the updates of ``m`` and ``l``. ``alpha`` comes first, since the corrector waits for
    it.
    """
    m, l, phase = state
    q, values = given
    own = shared.own
    kv = tokens(place_tile(x, program, tiles, t, options, masked)[0], n.S, False, options)
    mbarrier.wait(own.s_ready.index(group), phase)
    s = own.s.index(group).load(options.scores_layout)
    values = load_values(x, n, program, kv, values, "kv", masked and not options.is_even, options)
    s = apply_cap_and_bias(x, n, program, q, kv, s, values, options)[0]
    if masked:
        # From the thread's index, which otherwise is kept for both partitions, and spilled.
        index = moved(q.first + gl.arange(0, options.rows, layout=options.row_layout))
        q = Tokens(q.first, index, index[:, None], q.stop)
        if options.has_ok:
            s = gl.where(allowed(x, n, program, q, kv, values, 0, options), s, float("-inf"))
    m, below, alpha = new_maximum(s, m, masked, options)
    own.alpha.index(group).store(alpha)
    mbarrier.arrive(own.alpha_ready.index(group))
    # It is over, and ends a basic block: the assembler would compute exponentials first.
    mbarrier.wait(own.s_ready.index(group), phase)
    p = exp2(exponents(s, below, None, options), options)
    l = l * alpha + gl.reduce(p, 1, total)
    w = operands(own.s.index(group), options.columns, options).slice(0, options.columns)
    w.store(p.to(options.dtype))
    mbarrier.arrive(own.w_ready.index(group))
    return m, l, phase ^ 1


@gluon.jit
def correct(x, n, program, tiles, shared, options: gl.constexpr):
    """Rescale both tiles' sums, for each tile of keys but the first, and store the outputs."""
    D: gl.constexpr = options.plan.D
    chunk: gl.constexpr = options.chunk
    own = shared.own
    phase = 0
    for t in range(0, tiles.count):
        for half in gl.static_range(2):
            mbarrier.wait(own.alpha_ready.index(half), phase)
            if t > 0:
                alpha = own.alpha.index(half).load(options.sums_row_layout)
                for start in gl.static_range(0, D, chunk):
                    acc = own.acc.index(half).slice(start, chunk)
                    acc.store(acc.load(options.sums_layout) * alpha[:, None])
            mbarrier.arrive(own.w_ready.index(half))
        phase = phase ^ 1
    for half in gl.static_range(2):
        mbarrier.wait(own.ml_ready.index(half), 0)
        highest = own.m.index(half).load(options.sums_row_layout)
        sum_before = own.l.index(half).load(options.sums_row_layout)
        m, l, factor, seen = denominator(load_sink(x, n, program, options), highest, sum_before, options)
        first = shared.first + half * options.rows
        index = first + gl.arange(0, options.rows, layout=options.sums_row_layout)
        q = Tokens(first, index, index, n.T)
        store_token(x.m_out, n, program, q, gl.where(seen, m, float("-inf")), options)
        store_token(x.log2_sum_out, n, program, q, gl.log2(l), options)
        store_maximum(x, n, program, q, highest, sum_before, options)
        mbarrier.wait(own.done.index(half), 0)
        for start in gl.static_range(0, D, chunk):
            acc = own.acc.index(half).slice(start, chunk)
            # Without active tiles the sums were never written.
            sums = gl.where(tiles.count > 0, acc.load(options.sums_layout) * factor[:, None], 0.0)
            shared.held[0].tile.index(half).slice(start, chunk, 1).store(sums.to(options.dtype))
            # Otherwise the assembler loads all columns first, and spills.
            gl.barrier()
        fence_async_shared()
        store_rows(x.out, 0, half, program.h, program, shared, options)
    tma.store_wait(0)
