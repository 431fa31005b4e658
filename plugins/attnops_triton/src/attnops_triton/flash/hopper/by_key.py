"""The backward kernel for Hopper by tiles of keys, for dk and dv.

Two partitions compute 64 keys each. Weights are computed while the products for scores and for the gradients of weights
run.

The kernel can also compute dq (`FlashPlan.fuses_dq`). Each partition then multiplies the score gradients of both
partitions by half the columns of the keys, and the copy engine adds the result to memory. The order of these additions
depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnops_triton.flash.hopper.shared import (
    advance,
    allocate_tiles,
    batch_of,
    each_head,
    load,
    make_barriers,
    nothing,
    place_tile,
    share,
    store_rows,
    tokens,
    values_of_head,
)
from attnops_triton.flash.hopper.steps import keep_order, new_product, no_sums, operand, store_sums, wait_held
from attnops_triton.flash.kernels.scores import cap_and_bias_vjp, load_values, score_gradients, score_tile
from attnops_triton.flash.kernels.tokens import place_by_key


class FusedDq(NamedTuple):
    """What a fused dq needs."""

    ds: Any  # the score gradients of two tiles, for both partitions
    ds_ready: Any  # their barrier
    tile: Any  # a buffer of dq for each partition
    ready: Any  # barriers of these buffers
    free: Any
    # Half the columns of half the keys each, [4, rows, D / 2], and their barrier; 0 if the keys' buffer can be sliced.
    keys: Any
    keys_ready: Any
    done: Any  # barriers of the buffers of dk and of dv


class State(NamedTuple):
    """The sums so far."""

    dk: Any  # [rows, D]
    dv: Any
    stage: Any  # the current buffer; with a fused dq the number of tiles so far
    phase: Any  # the parity of its barriers; with a fused dq 0


@gluon.jit
def attnops_flash_backward_key(x, n, options: gl.constexpr):
    """Dk and dv of a tile of keys."""
    start_partitions(x, n, options)


@gluon.jit
def attnops_flash_backward(x, n, options: gl.constexpr):
    """Dk and dv of a tile of keys; dq is added to."""
    start_partitions(x, n, options)


@gluon.jit
def start_partitions(x, n, options: gl.constexpr):
    """Either kernel."""
    program = place_by_key(n, options)
    if options.fuses_dq:
        shared = share(x, program, share_dq(options), options)
        gl.warp_specialize(
            [(compute, (0, x, n, program, shared, options)), (compute, (1, x, n, program, shared, options)),
             (load_all, (x, n, program, shared, options)), (add, (x, n, program, shared, options))],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
    else:
        shared = share(x, program, 0, options)
        gl.warp_specialize(
            [(compute, (0, x, n, program, shared, options)), (compute, (1, x, n, program, shared, options)),
             (load, (x, n, program, shared, options))],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def compute(group: gl.constexpr, x, n, program, shared, options: gl.constexpr):
    """Dk and dv of half the keys."""
    kv = tokens(shared.first + group * options.rows, n.S, True, options)
    if options.fuses_dq:
        if options.slices_keys:
            mbarrier.wait(shared.ready.index(1 - group), 0)
        else:
            mbarrier.wait(shared.own.keys_ready.index(0), 0)
    wait_held(shared, group)
    state = State(no_sums(options), no_sums(options), 0, 0)
    state = each_head(step, values_of_head, state, group, x, n, program, shared, kv, options)
    dk = state.dk * options.scale
    done = (0, 0)
    if options.fuses_dq:
        # dk is stored through the keys' buffer: wait for the other partition's last product for dq, which reads it.
        mbarrier.arrive(shared.own.ds_ready.index(0))
        mbarrier.wait(shared.own.ds_ready.index(0), state.stage & 1)
        done = shared.own.done
    store_sums(x.dk, 0, dk, done[0], group, n, program, shared, options)
    store_sums(x.dv, 1, state.dv, done[1], group, n, program, shared, options)
    if options.stores_by_map and not options.fuses_dq:
        tma.store_wait(0)


@gluon.jit
def step(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """Add a tile's part of dk and dv, and its dq."""
    first, program = place_tile(x, program, tiles, t, options, masked)
    if options.flat:
        kv, values = values_of_head(x, n, program, given, options)
    else:
        kv, values = given
    q = tokens(first, n.T, False, options)
    values = load_values(x, n, program, q, values, "q", masked and not options.is_even, options)
    stage = state.stage
    phase = state.phase
    done = stage
    if options.fuses_dq:
        # The three variables follow from one counter, to save registers.
        stage = done % options.tiles.stages
        phase = done // options.tiles.stages & 1
    k, v = shared.held
    q_ring, d_out_ring = shared.rings
    queries = q_ring.tile.index(stage)
    cotangents = d_out_ring.tile.index(stage)
    statistics = shared.statistics.index(stage)
    mbarrier.wait(q_ring.ready.index(stage), phase)
    s = new_product(k.tile.index(group), queries.permute([1, 0]), options)
    mbarrier.wait(d_out_ring.ready.index(stage), phase)
    dp = new_product(v.tile.index(group), cotangents.permute([1, 0]), options)
    s = warpgroup_mma_wait(1, deps=[s])
    # To save registers, the logsumexp has one term, and delta is read where it is used.
    lse = statistics.slice(0, 1, 0).load(options.scores_layout)
    scores = score_tile(x, n, program, q, kv, s, values, 0, masked, options)
    p = gl.exp2(scores.s * options.unit - lse)
    w = operand(p, options)
    dv = warpgroup_mma(w, cotangents, state.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = statistics.slice(1, 1, 0).load(options.scores_layout)
    ds = score_gradients(p, dp - delta, None, True, True, masked, options)
    ds = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)[0]
    keep_order(shared, group)
    dv, w = warpgroup_mma_wait(0, deps=[dv, w])
    mbarrier.arrive(d_out_ring.free.index(stage))
    ws = operand(ds, options)
    if options.fuses_dq:
        side = done & 1
        dq = multiply_dq(shared, ws, side, group, options)
        dk = warpgroup_mma(ws, queries, state.dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.wait(shared.own.free.index(group), side ^ 1)
        shared.own.tile.index(group).store(dq)
        fence_async_shared()
        mbarrier.arrive(shared.own.ready.index(group))
    else:
        dk = warpgroup_mma(ws, queries, state.dk, is_async=True)
    dk, ws = warpgroup_mma_wait(0, deps=[dk, ws])
    mbarrier.arrive(q_ring.free.index(stage))
    if options.fuses_dq:
        stage = done + 1
        phase = state.phase
    else:
        stage, phase = advance(stage, phase, options)
    return State(dk, dv, stage, phase)


@gluon.jit
def share_dq(options: gl.constexpr):
    """The `FusedDq`."""
    rows: gl.constexpr = options.rows
    half: gl.constexpr = options.half
    ds = allocate_tiles(4, rows, rows, options.dtype)
    dq = allocate_tiles(2, rows, half, gl.float32)
    ds_ready = make_barriers(1, 2)
    keys = 0
    keys_ready = 0
    if not options.slices_keys:
        keys = allocate_tiles(4, rows, half, options.dtype)
        keys_ready = make_barriers(1, 1)
    return FusedDq(
        ds, ds_ready, dq, make_barriers(2, 1), make_barriers(2, 1), keys, keys_ready,
        (make_barriers(2, 1), make_barriers(2, 1)),
    )  # fmt: skip


@gluon.jit
def load_all(x, n, program, shared, options: gl.constexpr):
    """The loader with a fused dq."""
    if not options.slices_keys:
        load_columns(x, n, program, shared, options)
    load(x, n, program, shared, options)


@gluon.jit
def load_columns(x, n, program, shared, options: gl.constexpr):
    """Copy each half of the keys' columns to separate buffers."""
    half: gl.constexpr = options.half
    ready = shared.own.keys_ready.index(0)
    mbarrier.expect(ready, 4 * options.rows * half * options.itemsize)
    for part in gl.static_range(4):
        at = program.k * options.plan.D + part % 2 * half
        corner = [batch_of(n, program, options.held_bits[0]), shared.first + part // 2 * options.rows, at]
        tma.async_load(x.k_columns, corner, ready, shared.own.keys.index(part))


@gluon.jit
def multiply_dq(shared, ws, side, group: gl.constexpr, options: gl.constexpr):
    """The products of the tile's ds with all keys, for half of the head dim: dq [64, D / 2].

    A buffer of ds is overwritten two tiles later. By then the other partition has arrived at the barrier of the tile in
    between, so it has read the buffer.
    """
    half: gl.constexpr = options.half
    dq = gl.full([options.rows, half], 0.0, gl.float32, options.dq_layout)
    shared.own.ds.index(side * 2 + group).store(ws)
    fence_async_shared()
    mbarrier.arrive(shared.own.ds_ready.index(0))
    mbarrier.wait(shared.own.ds_ready.index(0), side)
    for i in gl.static_range(2):
        if options.slices_keys:
            keys = shared.held[0].tile.index(i).slice(group * half, half, 1)
        else:
            keys = shared.own.keys.index(2 * i + group)
        ds = shared.own.ds.index(side * 2 + i).permute([1, 0])
        dq = warpgroup_mma(ds, keys, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def add(x, n, program, shared, options: gl.constexpr):
    """The partition that has the copy engine add each tile's dq to memory, and then stores dk and dv."""
    side = 0
    each_head(add_tile, nothing, side, 0, x, n, program, shared, 0, options)
    outputs = (x.dk, x.dv)
    for i in gl.static_range(2):
        for half in gl.static_range(2):
            mbarrier.wait(shared.own.done[i].index(half), 0)
            store_rows(outputs[i], i, half, program.k, program, shared, options)
    tma.store_wait(0)


@gluon.jit
def add_tile(
    t, side, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """Add a tile's dq."""
    first, program = place_tile(x, program, tiles, t, options, masked)
    dq = shared.own
    for half in gl.static_range(2):
        mbarrier.wait(dq.ready.index(half), side)
        at = program.h * options.plan.D + half * options.half
        tma.async_atomic_add(x.dq, [program.b, first, at], dq.tile.index(half))
    tma.store_wait(0)
    for half in gl.static_range(2):
        mbarrier.arrive(dq.free.index(half))
    return side ^ 1
