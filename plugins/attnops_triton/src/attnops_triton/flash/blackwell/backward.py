"""The backward kernels for Blackwell: one by tiles of queries for dq, one by tiles of keys for dk and dv.

A program has 128 rows and four partitions: one loads, one issues all products, and two compute half the columns of a
tile each. Scores, the gradients of weights, and sums are in tensor memory. There the weights overwrite the scores of
their half, and the gradients of scores overwrite the gradients of weights, so that each half is multiplied as soon as
it is complete. Earlier products run while weights are computed.

Products run in the order in which they are issued, as in `attnops_triton.flash.blackwell.forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnops_triton.flash.blackwell.exponentials import exp2
from attnops_triton.flash.blackwell.memory import allocate, moved, operands
from attnops_triton.flash.hopper.shared import (
    advance,
    each_head,
    each_tile,
    find_tiles,
    head_of_group,
    load,
    make_barriers,
    place_output,
    place_tile,
    share,
    store_rows,
    tokens,
    values_of_head,
)
from attnops_triton.flash.kernels.parameters import Sizes
from attnops_triton.flash.kernels.scores import (
    cap_and_bias_vjp,
    exponents,
    load_values,
    score_gradients,
    score_tile,
    values_of,
)
from attnops_triton.flash.kernels.tokens import load_statistic, place_by_key, place_by_query


class Memory(NamedTuple):
    """Tensor memory, and barriers for it. The products s and dp are those of the held arrays and the rings."""

    s: Any  # products, then weights
    dp: Any  # products, then gradients of scores
    # The outputs: to the first the gradients of scores add, times the operand of s; to the second the weights, times
    # that of dp.
    sums: Any
    s_ready: Any  # the products are complete
    dp_ready: Any
    w_ready: Any  # a half has written its weights
    ds_ready: Any  # a half has written its gradients of scores
    finished: Any  # the sums are complete
    written: Any  # the outputs are in the held buffers


class Products(NamedTuple):
    """The state of the warp that issues products."""

    stage: Any  # the ring's buffer
    phase: Any  # its parity
    before: Any  # the buffer of the tile before
    done: Any  # the number of tiles so far


@gluon.jit
def attnops_flash_backward_query(x, n, options: gl.constexpr):
    """Dq of a tile of queries."""
    program = place_by_query(n, options)
    shared = share(x, program, new_memory(options), options)
    gl.warp_specialize(
        [(compute_by_query, (0, x, n, program, shared, options)),
         (compute_by_query, (1, x, n, program, shared, options)),
         (multiply, (x, n, program, shared, options)), (load_moved, (x, n, program, shared, options))],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def attnops_flash_backward_key(x, n, options: gl.constexpr):
    """Dk and dv of a tile of keys."""
    program = place_by_key(n, options)
    shared = share(x, program, new_memory(options), options)
    gl.warp_specialize(
        [(compute_by_key, (0, x, n, program, shared, options)), (compute_by_key, (1, x, n, program, shared, options)),
         (multiply, (x, n, program, shared, options)), (load_moved, (x, n, program, shared, options))],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def new_memory(options: gl.constexpr):
    """The program's `Memory`."""
    s = allocate(options.buffers, 2 * options.columns, options)
    dp = allocate(1, 2 * options.columns, options)
    first = allocate(1, options.plan.D, options)
    sums = (first,)
    if options.transposed:
        sums = (first, allocate(1, options.plan.D, options))
    return Memory(
        s, dp, sums, make_barriers(options.buffers, 1), make_barriers(1, 1), make_barriers(2, 1), make_barriers(2, 1),
        make_barriers(1, 1), make_barriers(1, 2),
    )  # fmt: skip


@gluon.jit
def moved_sizes(x, n, options: gl.constexpr, computes: gl.constexpr):
    """Opaque copies (`moved`) of the sizes that a partition uses."""
    T = n.T
    S = n.S
    batched = n.batched
    # If tiles divide the lengths, the compiler knows that T and S are multiples of 16. Copies would lose that.
    if computes:
        T = moved(T)
        S = moved(S)
        if options.is_even:
            T = gl.multiple_of(T, 16)
            S = gl.multiple_of(S, 16)
    if computes and (not options.transposed or len(options.masks) > 0):
        batched = moved(batched)
    inner = 0 if n.inner is None else n.inner
    starts = (0, 0, 0, 0)
    rows = 0
    maps = 0
    width = 0
    if x.ranges is None:
        starts = (moved(n.full_start), moved(n.full_stop), 0, 0)
        if not options.is_even:
            starts = (starts[0], starts[1], moved(n.partial_start), moved(n.partial_stop))
    else:
        rows = moved(n.rows)
        maps = moved(n.map_batch)
        if x.columns is not None:
            width = moved(n.width)
    return Sizes(T, S, batched, inner, rows, 0, 0, maps, width, starts[0], starts[1], starts[2], starts[3], 0, 0)


@gluon.jit
def load_moved(x, n, program, shared, options: gl.constexpr):
    """The loader."""
    load(x, moved_sizes(x, n, options, False), program, shared, options)


@gluon.jit
def half_of(memory, buffer, group: gl.constexpr, options: gl.constexpr):
    """A partition's half of products."""
    half = memory.index(buffer).slice(group * options.columns, options.columns)
    return half.load(options.scores_layout)


@gluon.jit
def operand(memory, half: gl.constexpr, options: gl.constexpr):
    """The tensor memory of half of the weights, which is that of s, or of the gradients of scores, that of dp."""
    columns: gl.constexpr = options.columns
    start: gl.constexpr = half * columns * options.packed
    return operands(memory.index(0), 2 * columns, options).slice(start, columns)


@gluon.jit
def compute_by_query(group: gl.constexpr, x, n, program, shared, options: gl.constexpr):
    """dq; this partition computes half the columns of each tile."""
    n = moved_sizes(x, n, options, True)
    edge: gl.constexpr = not options.is_even
    q = tokens(shared.first, n.T, True, options)
    values = values_of(x, n, program, q, "q", edge, options)
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    tiles = find_tiles(x, n, program, options)
    done = 0
    given = (q, values, m, log2_sum, delta)
    done = each_tile(query_step, done, group, x, n, program, tiles, shared, given, options)
    store_sums((x.dq,), group, n, program, shared, done, options)


@gluon.jit
def query_step(
    t, done, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """The gradients of scores of half a tile."""
    q, values, m, log2_sum, delta = given
    own = shared.own
    kv0 = place_tile(x, program, tiles, t, options, masked)[0] + group * options.columns
    kv = tokens(kv0, n.S, False, options)
    values = load_values(x, n, program, kv, values, "kv", masked and not options.is_even, options)
    mbarrier.wait(own.s_ready.index(done % 2), done // 2 & 1)
    s = half_of(own.s, done % 2, group, options)
    scores = score_tile(x, n, program, q, kv, s, values, 0, masked, options)
    p = exp2(exponents(scores.s, m, log2_sum, options), options)
    mbarrier.wait(own.dp_ready.index(0), done & 1)
    dp = half_of(own.dp, 0, group, options)
    ds = score_gradients(p, dp, delta, True, True, masked, options)
    ds = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)[0]
    operand(own.dp, group, options).store(ds.to(options.dtype))
    mbarrier.arrive(own.ds_ready.index(group))
    return done + 1


@gluon.jit
def compute_by_key(group: gl.constexpr, x, n, program, shared, options: gl.constexpr):
    """Dk and dv; this partition computes half the columns of each tile."""
    n = moved_sizes(x, n, options, True)
    kv = tokens(shared.first, n.S, True, options)
    state = (0, 0, 0)
    state = each_head(key_step, values_of_head, state, group, x, n, program, shared, kv, options)
    store_sums((x.dk, x.dv), group, n, program, shared, state[0], options)


@gluon.jit
def key_step(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """The weights and the gradients of scores of half a tile."""
    done, stage, phase = state
    own = shared.own
    columns: gl.constexpr = options.columns
    first, program = place_tile(x, program, tiles, t, options, masked)
    if options.flat:
        kv, values = values_of_head(x, n, program, given, options)
    else:
        kv, values = given
    q = tokens(first + group * columns, n.T, False, options)
    values = load_values(x, n, program, q, values, "q", masked and not options.is_even, options)
    statistics = shared.statistics.index(stage)
    mbarrier.wait(shared.rings[0].ready.index(stage), phase)
    lse = statistics.slice(0, 1, 0).slice(group * columns, columns, 1).load(options.scores_layout)
    mbarrier.wait(own.s_ready.index(0), done & 1)
    s = half_of(own.s, 0, group, options)
    scores = score_tile(x, n, program, q, kv, s, values, 0, masked, options)
    p = gl.exp2(scores.s * options.unit - lse)
    operand(own.s, group, options).store(p.to(options.dtype))
    mbarrier.arrive(own.w_ready.index(group))
    delta = statistics.slice(1, 1, 0).slice(group * columns, columns, 1).load(options.scores_layout)
    mbarrier.wait(own.dp_ready.index(0), done & 1)
    dp = half_of(own.dp, 0, group, options) - delta
    ds = score_gradients(p, dp, None, True, True, masked, options)
    ds = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)[0]
    operand(own.dp, group, options).store(ds.to(options.dtype))
    mbarrier.arrive(own.ds_ready.index(group))
    stage, phase = advance(stage, phase, options)
    return done + 1, stage, phase


@gluon.jit
def store_sums(outputs, group: gl.constexpr, n, program, shared, done, options: gl.constexpr):
    """Store the sums of ``done`` tiles. Each computing partition stores half the columns."""
    D: gl.constexpr = options.plan.D
    half: gl.constexpr = options.half
    chunk: gl.constexpr = options.chunk
    length, head, stride = place_output(n, program, options)
    own = shared.own
    mbarrier.wait(own.finished.index(0), 0)
    for i in gl.static_range(len(outputs)):
        if not options.stores_by_map:
            token = shared.first + gl.arange(0, options.rows, layout=options.sums_row_layout)
            at = outputs[i] + program.b.to(gl.int64) * length * stride + head.to(gl.int64) * D
            column = group * half + gl.arange(0, chunk, layout=gl.SliceLayout(0, options.sums_layout))
            at = at + (token.to(gl.int64) * stride)[:, None] + column[None, :]
        for start in gl.static_range(0, half, chunk):
            sums = own.sums[i].index(0).slice(group * half + start, chunk).load(options.sums_layout)
            if i == 0:
                sums = sums * options.scale
            # Without active tiles the sums were never written.
            sums = gl.where(done > 0, sums, 0.0)
            if options.stores_by_map:
                buffer = shared.held[i].tile.index(0).slice(group * half + start, chunk, 1)
                buffer.store(sums.to(options.dtype))
                gl.barrier()
            else:
                gl.store(at + start, sums.to(options.output_dtype), mask=(token < length)[:, None])
    if options.stores_by_map:
        fence_async_shared()
        mbarrier.arrive(own.written.index(0))
        if group == 0:
            mbarrier.wait(own.written.index(0), 0)
            for i in gl.static_range(len(outputs)):
                store_rows(outputs[i], i, 0, head, program, shared, options)
        tma.store_wait(0)


@gluon.jit
def multiply(x, n, program, shared, options: gl.constexpr):
    """The products of all tiles.

    The products of a tile's score gradients are issued after the product for the next tile's scores, whose operands are
    ready sooner.
    """
    n = moved_sizes(x, n, options, False)
    state = Products(0, 0, 0, 0)
    mbarrier.wait(shared.ready.index(0), 0)
    if options.loops_over_heads:
        for g in range(0, options.plan.G):
            state = multiply_row(state, x, n, head_of_group(program, g, options), shared, options)
    else:
        state = multiply_row(state, x, n, program, shared, options)
    if state.done > 0:
        multiply_gradients(shared, state, options)
    tcgen05_commit(shared.own.finished.index(0))


@gluon.jit
def multiply_row(state, x, n, program, shared, options: gl.constexpr):
    """The products of a row of tiles."""
    heads: gl.constexpr = options.plan.G if options.flat else 1
    count = find_tiles(x, n, program, options).count
    for _ in range(0, count * heads):
        state = multiply_tile(state, shared, options)
    return state


@gluon.jit
def multiply_tile(state, shared, options: gl.constexpr):
    """The products of a tile."""
    stage, phase, before, done = state
    buffer = done % options.buffers
    own = shared.own
    ring = shared.rings[0]
    mbarrier.wait(ring.ready.index(stage), phase)
    tcgen05_mma(
        shared.held[0].tile.index(0), ring.tile.index(stage).permute([1, 0]), own.s.index(buffer), use_acc=False,
        mbarriers=[own.s_ready.index(buffer)],
    )  # fmt: skip
    if done > 0:
        multiply_gradients(shared, state, options)
    other = shared.rings[1]
    mbarrier.wait(other.ready.index(stage), phase)
    if options.transposed:
        tcgen05_mma(
            shared.held[1].tile.index(0), other.tile.index(stage).permute([1, 0]), own.dp.index(0), use_acc=False,
            mbarriers=[own.dp_ready.index(0)],
        )  # fmt: skip
        multiply_halves(own.s, other, stage, own.sums[1], own.w_ready, done, options)
    else:
        tcgen05_mma(
            shared.held[1].tile.index(0), other.tile.index(stage).permute([1, 0]), own.dp.index(0), use_acc=False,
            mbarriers=[own.dp_ready.index(0), other.free.index(stage), other.free.index(stage)],
        )  # fmt: skip
    before = stage
    stage, phase = advance(stage, phase, options)
    return Products(stage, phase, before, done + 1)


@gluon.jit
def multiply_gradients(shared, state, options: gl.constexpr):
    """The products of the gradients of scores of the tile before."""
    own = shared.own
    multiply_halves(own.dp, shared.rings[0], state.before, own.sums[0], own.ds_ready, state.done - 1, options)


@gluon.jit
def multiply_halves(memory, ring, stage, sums, ready, turn, options: gl.constexpr):
    """Add the products of weights, or of gradients of scores, of the tile ``turn``."""
    columns: gl.constexpr = options.columns
    for half in gl.static_range(2):
        mbarrier.wait(ready.index(half), turn & 1)
        tcgen05_mma(
            operand(memory, half, options), ring.tile.index(stage).slice(half * columns, columns, 0), sums.index(0),
            use_acc=(turn > 0) | (half > 0), mbarriers=[ring.free.index(stage)],
        )  # fmt: skip
