"""The backward kernels for Hopper: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Two partitions compute 64 rows each. Weights are computed while the products for scores and for the gradients of weights
run.

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
    writer = PartitionedWriter(plan, tiles, operands, schedule, held, streamed, (dq,) if dq.output else ())
    programs = place_by_query(writer, plan, tiles.bq)
    writer(f"q_first = row * {tiles.bq}")
    writer.share()
    writer.load_held()
    writer.load_streamed()
    write, tile = writer.computer, writer.tile
    write(*writer.layouts)
    writer.tokens()
    tile.load_values("", False)
    tile.load_values("q", not tile.even)
    tile.load_statistics(not tile.even)
    writer.find_tiles(write)
    write(f"dq = tl.full([{ROWS}, {D}], 0.0, tl.float32, sums_layout)")
    writer.zeros()
    write("q = q_tile.index(group)", "d_out = d_out_tile.index(group)", "stage = 0", "phase = 0")
    write("mbarrier.wait(held.index(group), 0)")
    writer.loop(write, 0, lambda masked: _query_step(writer, masked))
    writer.store(dq, "dq", f"tl.{plan.gradient_dtype}", "q", number(float(plan.scale)))
    return writer, programs


def _query_step(writer: PartitionedWriter, masked: bool) -> None:
    write, tile = writer.computer, writer.tile
    edge = masked and not tile.even
    writer.streamed_tokens()
    tile.load_values("kv", edge)
    writer.wait("k")
    writer.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    writer.wait("v")
    writer.multiply("dp", "d_out", "v_tile.index(stage).permute([1, 0])", add=False)
    writer.finish("s", 1)
    has_ok = recompute_weights(tile, masked, edge)
    writer.finish("dp", 0)
    writer.release("v")
    score_gradients(tile, has_ok)
    tile.cap_and_bias_vjp()
    write(f"w = tl.convert_layout(ds.to({dtype(writer.plan)}), weights_layout)")
    writer.multiply("dq", "w", "k_tile.index(stage)", add=True)
    writer.finish("dq", 0, "w")
    writer.release("k")
    writer.advance(write)


def write_by_key(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, padded: int
) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dk and dv and the size of its grid, for the operands of
    `attnops_triton.flash.backward`.

    The operand ``statistics``, [B, H, 2, padded], has the logsumexp to base 2 in one term, and delta, both padded to
    whole tiles of queries. If ``plan.fuses_dq``, the kernel also adds the unscaled dq to the output ``dq``.
    """
    tiles, D = plan.by_key, plan.D
    held = tuple(TokenBlock(name, "kv", plan.K, "k", D, ROWS) for name in ("k", "v"))
    streamed = tuple(TokenBlock(name, "q", plan.H, "h", D, tiles.bq) for name in ("q", "d_out"))
    by_map = plan.gradient_dtype == plan.dtype and not plan.splits_groups
    heads, head, sums = (plan.H, "h", "float32") if plan.splits_groups else (plan.K, "k", plan.gradient_dtype)
    dk, dv = (TokenBlock(name, "kv", heads, head, D, ROWS, output=by_map) for name in ("dk", "dv"))
    writer = PartitionedWriter(plan, tiles, operands, schedule, held, streamed, (dk, dv) if by_map else ())
    programs = place_by_key(writer, plan, tiles.bk)
    writer(f"kv_first = row * {tiles.bk}", f"heads_first = k * {plan.G}")
    writer.share()
    share_statistics(writer, padded)
    if plan.fuses_dq:
        _share_dq(writer)
        _add_dq(writer)
    writer.load_held()
    with writer.heads(writer.loader):
        writer.load_streamed()
    write = writer.computer
    write(*writer.layouts)
    writer.tokens()
    for name in ("dk", "dv"):
        write(f"{name} = tl.full([{ROWS}, {D}], 0.0, tl.float32, sums_layout)")
    writer.zeros()
    write(
        "keys = k_tile.index(group)",
        "values = v_tile.index(group)",
        *["done = 0"] if plan.fuses_dq else ("stage = 0", "phase = 0"),
    )
    write("mbarrier.wait(held.index(group), 0)")
    if plan.fuses_dq:
        write(f"mbarrier.wait({'held.index(1 - group)' if _slices_keys(plan) else 'columns.index(0)'}, 0)")
        write(f"dq_sums_layout: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {D // 2}, 16])")
        write(f"nothing = tl.full([{ROWS}, {D // 2}], 0.0, tl.float32, dq_sums_layout)")
    with writer.heads(write):
        if not writer.flat:
            _load_of_head(writer)
        writer.find_tiles(write)
        writer.loop(write, 0, lambda masked: _key_step(writer, masked))
    if plan.fuses_dq:
        # dk is stored through the keys' buffer: wait for the other partition's last product for dq, which reads it.
        write("mbarrier.arrive(ds_ready.index(0))", "mbarrier.wait(ds_ready.index(0), done & 1)")
    writer.store(dk, "dk", f"tl.{sums}", "k", number(float(plan.scale)))
    writer.store(dv, "dv", f"tl.{sums}", "v")
    if plan.fuses_dq:
        writer.adder("tma.store_wait(0)")
    return writer, programs


def _load_of_head(writer: PartitionedWriter) -> None:
    writer.tile.load_values("", False)
    writer.tile.load_values("kv", not writer.tile.even)


def _key_step(writer: PartitionedWriter, masked: bool) -> None:
    write, tile, plan = writer.computer, writer.tile, writer.plan
    edge = masked and not tile.even
    if writer.flat:
        _load_of_head(writer)
    writer.streamed_tokens()
    tile.load_values("q", edge)
    if plan.fuses_dq:
        # The three variables follow from one counter, to save registers.
        write(f"stage = done % {writer.stages}", f"phase = done // {writer.stages} & 1", "side = done & 1")
    writer.wait("q")
    writer.multiply("s", "keys", "q_tile.index(stage).permute([1, 0])", add=False)
    writer.wait("d_out")
    # To save registers, the logsumexp has one term and the sums of the product start from −delta.
    write("dp = zeros - statistics_tile.index(stage).slice(1, 1, 0).load(scores_layout)")
    writer.multiply("dp", "values", "d_out_tile.index(stage).permute([1, 0])", add=True)
    writer.finish("s", 1)
    write("lse = statistics_tile.index(stage).slice(0, 1, 0).load(scores_layout)")
    has_ok = recompute_weights(tile, masked, False, lse="lse")
    write(f"w = tl.convert_layout(p.to({dtype(plan)}), weights_layout)")
    writer.multiply("dv", "w", "d_out_tile.index(stage)", add=True)
    writer.finish("dp", 1)
    writer.finish("dv", 0, "w")
    writer.release("d_out")
    score_gradients(tile, has_ok, subtract=False)
    tile.cap_and_bias_vjp()
    write(f"ws = tl.convert_layout(ds.to({dtype(plan)}), weights_layout)")
    if plan.fuses_dq:
        _multiply_dq(writer)
    writer.multiply("dk", "ws", "q_tile.index(stage)", add=True)
    if plan.fuses_dq:
        writer.finish("dq", 1)
        write(
            "mbarrier.wait(dq_free.index(group), side ^ 1)",
            "dq_tile.index(group).store(dq)",
            "fence_async_shared()",
            "mbarrier.arrive(dq_ready.index(group))",
        )
    writer.finish("dk", 0, "ws")
    writer.release("q")
    write("done = done + 1") if plan.fuses_dq else writer.advance(write)


def share_statistics(writer: PartitionedWriter, padded: int) -> None:
    """Write the tensor map and the buffers of the statistics, which are copied together with the tiles of ``q``."""
    plan, bq = writer.plan, writer.tile.bq
    writer.maps += 1
    writer.integer("padded", padded)
    writer.integer("statistics_rows", plan.B * plan.H * 2)
    writer(
        "statistics_layout: tl.constexpr = tl.NVMMASharedLayout(0, 32, 2)",
        "statistics_map = tma.make_tensor_descriptor(statistics_ptr, [statistics_rows, padded], [padded, 1], "
        f"[2, {bq}], statistics_layout)",
        f"statistics_tile = tl.allocate_shared_memory(tl.float32, [{writer.stages}, 2, {bq}], statistics_layout)",
    )
    writer.companions["q"] = (
        f"tma.async_load(statistics_map, [(b * {plan.H} + h) * 2, q0], q_ready.index(stage), "
        "statistics_tile.index(stage))",
        2 * 4 * bq,
    )


def _share_dq(writer: PartitionedWriter) -> None:
    """Write the tensor map and the buffers of a fused dq, and the buffers of ds: of two tiles, for both partitions."""
    plan, half = writer.plan, writer.plan.D // 2
    stride = plan.H * plan.D
    writer.maps += 1
    writer(
        f"ds_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {ROWS}], {dtype(writer.plan)})",
        f"ds_tile = tl.allocate_shared_memory({dtype(writer.plan)}, [4, {ROWS}, {ROWS}], ds_layout)",
        f"dq_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {half}], tl.float32)",
        f"dq_map = tma.make_tensor_descriptor(dq_ptr + b.to(tl.int64) * T * {stride}, [T, {stride}], [{stride}, 1], "
        f"[{ROWS}, {half}], dq_layout)",
        f"dq_tile = tl.allocate_shared_memory(tl.float32, [2, {ROWS}, {half}], dq_layout)",
    )
    writer.barriers("ds_ready", 1, 2)
    if not _slices_keys(plan):
        _load_columns(writer)
    for name in ("dq_ready", "dq_free"):
        writer.barriers(name, 2, 1)


def _slices_keys(plan: FlashPlan) -> bool:
    """Whether half the columns of the keys' buffer can be an operand: 128 bytes per row, the unit of swizzling."""
    return plan.D >= 128


def _load_columns(writer: PartitionedWriter) -> None:
    """Write the copies of each half of the keys' columns to separate buffers."""
    write, plan, half = writer.loader, writer.plan, writer.plan.D // 2
    stride, batch = plan.K * plan.D, f"(b * {writer.tile.batched['k']})"
    writer.maps += 1
    writer(
        f"columns_layout: tl.constexpr = tl.NVMMASharedLayout.get_default_for([{ROWS}, {half}], {dtype(plan)})",
        f"columns_map = tma.make_tensor_descriptor(k_ptr + {batch}.to(tl.int64) * S * {stride}, [S, {stride}], "
        f"[{stride}, 1], [{ROWS}, {half}], columns_layout)",
        f"columns_tile = tl.allocate_shared_memory({dtype(plan)}, [4, {ROWS}, {half}], columns_layout)",
    )
    writer.barriers("columns", 1, 1)
    write(f"mbarrier.expect(columns.index(0), {4 * ROWS * half * plan.itemsize})")
    with write.block("for part in tl.static_range(4):"):
        write(
            f"tma.async_load(columns_map, [kv_first + part // 2 * {ROWS}, k * {plan.D} + part % 2 * {half}], "
            "columns.index(0), columns_tile.index(part))"
        )


def _multiply_dq(writer: PartitionedWriter) -> None:
    """Write the products of the tile's ds with all keys, for half of the head dim: ``dq`` [64, D / 2].

    A buffer of ds is overwritten two tiles later. By then the other partition has arrived at the barrier of the tile in
    between, so it has read the buffer.
    """
    write, half = writer.computer, writer.plan.D // 2
    keys = f"k_tile.index({{i}}).slice(group * {half}, {half}, 1)" if _slices_keys(writer.plan) else (
        "columns_tile.index(2 * {i} + group)"
    )  # fmt: skip
    write(
        "ds_tile.index(side * 2 + group).store(ws)",
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


def _add_dq(writer: PartitionedWriter) -> None:
    """Write the loop in which the copy engine adds each tile's dq to memory."""
    write, D = writer.adder, writer.plan.D

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
    with writer.heads(write):
        writer.find_tiles(write)
        writer.loop(write, 0, add)
