"""The backward kernel for Hopper by tiles of queries, for dq.

Two partitions compute 64 queries each. Weights are computed while the products for scores and for the gradients of
weights run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from attnops_triton.flash.hopper.shared import (
    advance,
    each_tile,
    find_tiles,
    load,
    place_tile,
    share,
    tokens,
)
from attnops_triton.flash.hopper.steps import keep_order, new_product, no_sums, operand, store_sums, wait_held
from attnops_triton.flash.kernels.scores import (
    cap_and_bias_vjp,
    load_values,
    score_gradients,
    score_tile,
    values_of,
    weights,
)
from attnops_triton.flash.kernels.tokens import load_statistic, place_by_query


@gluon.jit
def attnops_flash_backward_query(x, n, options: gl.constexpr):
    """Dq of a tile of queries."""
    program = place_by_query(n, options)
    shared = share(x, program, 0, options)
    gl.warp_specialize(
        [(compute, (0, x, n, program, shared, options)), (compute, (1, x, n, program, shared, options)),
         (load, (x, n, program, shared, options))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def compute(group: gl.constexpr, x, n, program, shared, options: gl.constexpr):
    """Dq of half the queries."""
    q = tokens(shared.first + group * options.rows, n.T, True, options)
    edge: gl.constexpr = not options.is_even
    values = values_of(x, n, program, q, "q", edge, options)
    m = load_statistic(x.m, n, program, q, edge, float("inf"), options.layouts.m)
    log2_sum = load_statistic(x.log2_sum, n, program, q, edge, 0.0, options.layouts.log2_sum)
    delta = load_statistic(x.delta, n, program, q, edge, 0.0, options.layouts.delta)
    tiles = find_tiles(x, n, program, options)
    wait_held(shared, group)
    state = (no_sums(options), 0, 0)
    given = (q, values, m, log2_sum, delta)
    state = each_tile(step, state, group, x, n, program, tiles, shared, given, options)
    dq = state[0] * options.scale
    store_sums(x.dq, 0, dq, 0, group, n, program, shared, options)
    if options.stores_by_map:
        tma.store_wait(0)


@gluon.jit
def step(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """Add a tile's part of dq."""
    dq, stage, phase = state
    q, values, m, log2_sum, delta = given
    k, v = shared.rings
    q_rows, d_out = shared.held
    kv = tokens(place_tile(x, program, tiles, t, options, masked)[0], n.S, False, options)
    values = load_values(x, n, program, kv, values, "kv", masked and not options.is_even, options)
    mbarrier.wait(k.ready.index(stage), phase)
    s = new_product(q_rows.tile.index(group), k.tile.index(stage).permute([1, 0]), options)
    mbarrier.wait(v.ready.index(stage), phase)
    dp = new_product(d_out.tile.index(group), v.tile.index(stage).permute([1, 0]), options)
    s = warpgroup_mma_wait(1, deps=[s])
    scores = score_tile(x, n, program, q, kv, s, values, 0, masked, options)
    p = weights(scores.s, m, log2_sum, options)
    keep_order(shared, group)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v.free.index(stage))
    ds = score_gradients(p, dp, delta, True, True, masked, options)
    ds = cap_and_bias_vjp(n, program, q, kv, ds, scores, values, options)[0]
    w = operand(ds, options)
    dq = warpgroup_mma(w, k.tile.index(stage), dq, is_async=True)
    dq, w = warpgroup_mma_wait(0, deps=[dq, w])
    mbarrier.arrive(k.free.index(stage))
    stage, phase = advance(stage, phase, options)
    return dq, stage, phase
