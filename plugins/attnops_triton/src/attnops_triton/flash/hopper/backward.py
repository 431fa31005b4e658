"""The backward kernels for Hopper: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Two partitions compute 64 rows each. The products for scores and for the gradients of weights run while weights are
computed.

The kernel by keys can also compute dq (`FlashPlan.fuses_dq`). Each partition then multiplies the score gradients of
both partitions by half the columns of the keys, and the copy engine adds the result to memory. The order of these
additions depends on the order in which programs run.
"""

from __future__ import annotations

from attnops_triton.flash.hopper.partitions import ROWS, PartitionedWriter, TokenBlock
from attnops_triton.flash.loops import place_by_key, place_by_query
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import number


def write_by_query(plan: FlashPlan, operands: list[Operand], schedule: TileSchedule) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dq and the size of its grid, for the operands of `attnops_triton.flash.backward`."""
    tiles, D = plan.by_query, plan.D
    held = tuple(TokenBlock(name, "q", plan.H, "h", D, ROWS) for name in ("q", "d_out"))
    streamed = tuple(TokenBlock(name, "kv", plan.K, "k", D, tiles.bk) for name in ("k", "v"))
    dq = TokenBlock("dq", "q", plan.H, "h", D, ROWS, output=plan.gradient_dtype == plan.dtype)
    parts = PartitionedWriter(plan, tiles, operands, schedule, held, streamed, (dq,) if dq.output else ())
    programs = place_by_query(parts, plan, tiles.bq)
    parts(f"q_first = row * {tiles.bq}")
    parts.share()
    parts.load_held()
    parts.load_streamed()
    write, tile = parts.computer, parts.tile
    write(*parts.layouts)
    parts.tokens()
    tile.load_values("", False)
    tile.load_values("q", not tile.even)
    tile.load_statistics(not tile.even)
    parts.find_tiles(write)
    write(f"dq = tl.full([{ROWS}, {D}], 0.0, tl.float32, of_sums)")
    parts.zeros()
    write("q = q_tile.index(own)", "d_out = d_out_tile.index(own)", "stage = 0", "phase = 0")
    write("mbarrier.wait(held.index(own), 0)")
    parts.loop(write, 0, lambda masked: _query_step(parts, masked))
    parts.store(dq, "dq", f"tl.{plan.gradient_dtype}", "q", number(float(plan.scale)))
    return parts, programs


def _query_step(parts: PartitionedWriter, masked: bool) -> None:
    write, tile = parts.computer, parts.tile
    edge = masked and not tile.even
    parts.streamed_tokens()
    tile.load_values("kv", edge)
    parts.wait("k")
    parts.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    parts.wait("v")
    parts.multiply("dp", "d_out", "v_tile.index(stage).permute([1, 0])", add=False)
    parts.finish("s", 1)
    has_ok = recompute_weights(tile, masked, edge)
    parts.finish("dp", 0)
    parts.release("v")
    score_gradients(tile, has_ok)
    tile.cap_and_bias_vjp()
    write(f"w = tl.convert_layout(ds.to({dtype(parts.plan)}), of_weights)")
    parts.multiply("dq", "w", "k_tile.index(stage)", add=True)
    parts.finish("dq", 0, "w")
    parts.release("k")
    parts.advance(write)


def write_by_key(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, padded: int
) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dk and dv and the size of its grid, for the operands of
    `attnops_triton.flash.backward`.

    The operand ``statistics``, [B, H, 2, padded], has the logsumexp to base 2 as one term, and delta, padded to whole
    tiles of queries. If ``plan.fuses_dq``, the kernel also adds the unscaled dq to the output ``dq``.
    """
    tiles, D = plan.by_key, plan.D
    held = tuple(TokenBlock(name, "kv", plan.K, "k", D, ROWS) for name in ("k", "v"))
    streamed = tuple(TokenBlock(name, "q", plan.H, "h", D, tiles.bq) for name in ("q", "d_out"))
    by_map = plan.gradient_dtype == plan.dtype and not plan.splits_groups
    heads, head, sums = (plan.H, "h", "float32") if plan.splits_groups else (plan.K, "k", plan.gradient_dtype)
    dk, dv = (TokenBlock(name, "kv", heads, head, D, ROWS, output=by_map) for name in ("dk", "dv"))
    parts = PartitionedWriter(plan, tiles, operands, schedule, held, streamed, (dk, dv) if by_map else ())
    programs = place_by_key(parts, plan, tiles.bk)
    parts(f"kv_first = row * {tiles.bk}", f"heads_first = k * {plan.G}")
    parts.share()
    share_statistics(parts, padded)
    if plan.fuses_dq:
        _share_dq(parts)
        _add_dq(parts)
    parts.load_held()
    with parts.heads(parts.loader):
        parts.load_streamed()
    write = parts.computer
    write(*parts.layouts)
    parts.tokens()
    for name in ("dk", "dv"):
        write(f"{name} = tl.full([{ROWS}, {D}], 0.0, tl.float32, of_sums)")
    parts.zeros()
    write(
        "keys = k_tile.index(own)",
        "values = v_tile.index(own)",
        *["done = 0"] if plan.fuses_dq else ("stage = 0", "phase = 0"),
    )
    write("mbarrier.wait(held.index(own), 0)")
    if plan.fuses_dq:
        write(f"mbarrier.wait({'held.index(1 - own)' if _slices_keys(plan) else 'columns.index(0)'}, 0)")
        write(f"of_dq: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {D // 2}, 16])")
        write(f"nothing = tl.full([{ROWS}, {D // 2}], 0.0, tl.float32, of_dq)")
    with parts.heads(write):
        if not parts.flat:
            _load_of_head(parts)
        parts.find_tiles(write)
        parts.loop(write, 0, lambda masked: _key_step(parts, masked))
    if plan.fuses_dq:
        # Wait: the other partition's last product for dq reads the keys' buffer, through which dk is stored.
        write("mbarrier.arrive(ds_ready.index(0))", "mbarrier.wait(ds_ready.index(0), done & 1)")
    parts.store(dk, "dk", f"tl.{sums}", "k", number(float(plan.scale)))
    parts.store(dv, "dv", f"tl.{sums}", "v")
    if plan.fuses_dq:
        parts.adder("tma.store_wait(0)")
    return parts, programs


def _load_of_head(parts: PartitionedWriter) -> None:
    parts.tile.load_values("", False)
    parts.tile.load_values("kv", not parts.tile.even)


def _key_step(parts: PartitionedWriter, masked: bool) -> None:
    write, tile, plan = parts.computer, parts.tile, parts.plan
    edge = masked and not tile.even
    if parts.flat:
        _load_of_head(parts)
    parts.streamed_tokens()
    tile.load_values("q", edge)
    if plan.fuses_dq:
        # One variable in place of three, to save registers.
        write(f"stage = done % {parts.stages}", f"phase = done // {parts.stages} & 1", "side = done & 1")
    parts.wait("q")
    parts.multiply("s", "keys", "q_tile.index(stage).permute([1, 0])", add=False)
    parts.wait("d_out")
    # To save registers, the logsumexp is one term, and the product starts from −delta.
    write("dp = zeros - statistics_tile.index(stage).slice(1, 1, 0).load(of_scores)")
    parts.multiply("dp", "values", "d_out_tile.index(stage).permute([1, 0])", add=True)
    parts.finish("s", 1)
    write("lse = statistics_tile.index(stage).slice(0, 1, 0).load(of_scores)")
    has_ok = recompute_weights(tile, masked, False, lse="lse")
    write(f"w = tl.convert_layout(p.to({dtype(plan)}), of_weights)")
    parts.multiply("dv", "w", "d_out_tile.index(stage)", add=True)
    parts.finish("dp", 1)
    parts.finish("dv", 0, "w")
    parts.release("d_out")
    score_gradients(tile, has_ok, subtract=False)
    tile.cap_and_bias_vjp()
    write(f"ws = tl.convert_layout(ds.to({dtype(plan)}), of_weights)")
    if plan.fuses_dq:
        _multiply_dq(parts)
    parts.multiply("dk", "ws", "q_tile.index(stage)", add=True)
    if plan.fuses_dq:
        parts.finish("dq", 1)
        write(
            "mbarrier.wait(dq_free.index(own), side ^ 1)",
            "dq_tile.index(own).store(dq)",
            "fence_async_shared()",
            "mbarrier.arrive(dq_ready.index(own))",
        )
    parts.finish("dk", 0, "ws")
    parts.release("q")
    write("done = done + 1") if plan.fuses_dq else parts.advance(write)


def share_statistics(parts: PartitionedWriter, padded: int) -> None:
    """Write the tensor map and the buffers of the statistics per query, which are copied together with the tiles of
    ``q``.
    """
    plan, bq = parts.plan, parts.tile.bq
    parts.maps += 1
    parts.integer("padded", padded)
    parts.integer("of_heads", plan.B * plan.H * 2)
    parts(
        "statistics_layout: tl.constexpr = tl.NVMMASharedLayout(0, 32, 2)",
        f"statistics_map = tma.make_tensor_descriptor(statistics_ptr, [of_heads, padded], [padded, 1], [2, {bq}], "
        "statistics_layout)",
        f"statistics_tile = tl.allocate_shared_memory(tl.float32, [{parts.stages}, 2, {bq}], statistics_layout)",
    )
    parts.companions["q"] = (
        f"tma.async_load(statistics_map, [(b * {plan.H} + h) * 2, q0], q_ready.index(stage), "
        "statistics_tile.index(stage))",
        2 * 4 * bq,
    )


def _share_dq(parts: PartitionedWriter) -> None:
    """Write what a fused dq needs: its tensor map, and buffers of dq and of ds, the latter of both partitions for two
    tiles.
    """
    plan, half = parts.plan, parts.plan.D // 2
    stride = plan.H * plan.D
    parts.maps += 1
    parts(
        f"ds_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {ROWS}], {dtype(parts.plan)})",
        f"ds_tile = tl.allocate_shared_memory({dtype(parts.plan)}, [4, {ROWS}, {ROWS}], ds_layout)",
        f"dq_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {half}], tl.float32)",
        f"dq_map = tma.make_tensor_descriptor(dq_ptr + b.to(tl.int64) * T * {stride}, [T, {stride}], [{stride}, 1], "
        f"[{ROWS}, {half}], dq_layout)",
        f"dq_tile = tl.allocate_shared_memory(tl.float32, [2, {ROWS}, {half}], dq_layout)",
    )
    parts.barriers("ds_ready", 1, 2)
    if not _slices_keys(plan):
        _load_columns(parts)
    for name in ("dq_ready", "dq_free"):
        parts.barriers(name, 2, 1)


def _slices_keys(plan: FlashPlan) -> bool:
    """Whether half the columns of the keys' buffer can be an operand: they must have 128 bytes per row, the unit of
    swizzling.
    """
    return plan.D >= 128


def _load_columns(parts: PartitionedWriter) -> None:
    """Write the copies of each half of the keys' columns to separate buffers."""
    write, plan, half = parts.loader, parts.plan, parts.plan.D // 2
    stride, batch = plan.K * plan.D, f"(b * {parts.tile.batched['k']})"
    parts.maps += 1
    parts(
        f"columns_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {half}], {dtype(plan)})",
        f"columns_map = tma.make_tensor_descriptor(k_ptr + {batch}.to(tl.int64) * S * {stride}, [S, {stride}], "
        f"[{stride}, 1], [{ROWS}, {half}], columns_layout)",
        f"columns_tile = tl.allocate_shared_memory({dtype(plan)}, [4, {ROWS}, {half}], columns_layout)",
    )
    parts.barriers("columns", 1, 1)
    write(f"mbarrier.expect(columns.index(0), {4 * ROWS * half * plan.itemsize})")
    with write.block("for part in tl.static_range(4):"):
        write(
            f"tma.async_load(columns_map, [kv_first + part // 2 * {ROWS}, k * {plan.D} + part % 2 * {half}], "
            "columns.index(0), columns_tile.index(part))"
        )


def _multiply_dq(parts: PartitionedWriter) -> None:
    """Write the products of the tile's ds with all keys, for half of the head dim: ``dq`` [64, D / 2].

    A buffer of ds is overwritten two tiles later. By then the other partition has arrived at the barrier of the tile in
    between, and so has read the buffer.
    """
    write, half = parts.computer, parts.plan.D // 2
    keys = f"k_tile.index({{i}}).slice(own * {half}, {half}, 1)" if _slices_keys(parts.plan) else (
        "columns_tile.index(2 * {i} + own)"
    )  # fmt: skip
    write(
        "ds_tile.index(side * 2 + own).store(ws)",
        "fence_async_shared()",
        "mbarrier.arrive(ds_ready.index(0))",
        "mbarrier.wait(ds_ready.index(0), side)",
    )
    for i in range(2):
        sums = "dq, " if i else "nothing, use_acc=False, "
        write(
            f"dq = warpgroup_mma(ds_tile.index(side * 2 + {i}).permute([1, 0]), "
            f"{keys.format(i=i)}, {sums}is_async=True)"
        )


def _add_dq(parts: PartitionedWriter) -> None:
    """Write the loop in which the copy engine adds each tile's dq to memory."""
    write, D = parts.adder, parts.plan.D

    def add(masked: bool) -> None:
        with write.block("for half in tl.static_range(2):"):
            write(
                "mbarrier.wait(dq_ready.index(half), side)",
                f"tma.async_atomic_add(dq_map, [q0, h * {D} + half * {D // 2}], dq_tile.index(half))",
            )
        write("tma.store_wait(0)")
        with write.block("for half in tl.static_range(2):"):
            write("mbarrier.arrive(dq_free.index(half))")
        write("side = side ^ 1")

    write("side = 0")
    with parts.heads(write):
        parts.find_tiles(write)
        parts.loop(write, 0, add)
