"""The forward kernel for Hopper, as in FlashAttention-3 (arXiv:2407.08608).

Two partitions compute 64 queries each. They alternate: one multiplies matrices while the other computes exponentials.
Within a partition, the scores of a tile are computed while the weights of the previous tile are multiplied by its
values.
"""

from __future__ import annotations

from attnops_triton.flash.hopper.partitions import ROWS, PartitionedWriter, TokenBlock
from attnops_triton.flash.loops import place_by_query
from attnops_triton.flash.operands import Operand, base
from attnops_triton.flash.plan import LOG2E, FlashPlan
from attnops_triton.flash.steps import write_denominator
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import number


def write_forward(plan: FlashPlan, operands: list[Operand], schedule: TileSchedule) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel and the size of its grid, for the operands of `attnops_triton.flash.forward.forward`."""
    tiles, D = plan.forward, plan.D
    q = TokenBlock("q", "q", plan.H, "h", D, ROWS)
    k, v = (TokenBlock(name, "kv", plan.K, "k", D, tiles.bk) for name in ("k", "v"))
    out = TokenBlock("out", "q", plan.H, "h", D, ROWS, output=True)
    writer = PartitionedWriter(plan, tiles, operands, schedule, (q,), (k, v), (out,))
    programs = place_by_query(writer, plan, tiles.bq)
    writer(f"q_first = row * {tiles.bq}")
    writer.share()
    writer.barriers("turn", 2, 1)
    writer("mbarrier.arrive(turn.index(0))")
    writer.load_held()
    writer.load_streamed()
    _compute(writer)
    _finish(writer, out)
    return writer, programs


def _compute(writer: PartitionedWriter) -> None:
    """Write the sums over the tiles: ``m``, ``l`` and ``acc``."""
    write, tile = writer.computer, writer.tile
    write(*writer.layouts)
    writer.tokens()
    tile.load_values("", False)
    tile.load_values("q", not tile.even)
    writer.find_tiles(write)
    write(
        f'm = tl.full([{ROWS}], float("-inf"), tl.float32, row_layout)',
        f"l = tl.full([{ROWS}], 0.0, tl.float32, row_layout)",
        f"acc = tl.full([{ROWS}, {writer.plan.D}], 0.0, tl.float32, sums_layout)",
    )
    writer.zeros()
    write("q = q_tile.index(group)", "stage = 0", "phase = 0", "turn_phase = 0", "mbarrier.wait(held.index(group), 0)")
    with write.block("if count > 0:"):
        write("t = 0")
        _scores(writer, writer.has_partial)
        _weights(writer, writer.has_partial, first=True)
        writer.loop(write, 1, lambda masked: _step(writer, masked))
        writer.wait("v")
        writer.multiply("acc", "w", "v_tile.index(stage)", add=True)
        writer.finish("acc", 0, "w")


def _scores(writer: PartitionedWriter, masked: bool) -> None:
    """Write the products ``s`` of the first tile, and the tile's keys."""
    writer.place_tile(writer.computer, None if masked else False)
    _keys(writer, masked)
    writer.wait("k")
    writer.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    writer.finish("s", 0)
    writer.release("k")


def _keys(writer: PartitionedWriter, masked: bool) -> None:
    writer.streamed_tokens()
    writer.tile.load_values("kv", masked and not writer.tile.even)


def _step(writer: PartitionedWriter, masked: bool) -> None:
    """Write a tile's scores and weights, and the product of the previous tile's weights and values."""
    write = writer.computer
    write("before = stage", "phase_before = phase")
    writer.advance(write)
    _keys(writer, masked)
    writer.wait("k")
    write("mbarrier.wait(turn.index(group), turn_phase)")
    writer.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    writer.wait("v", "before", "phase_before")
    writer.multiply("acc", "w", "v_tile.index(before)", add=True)
    write("mbarrier.arrive(turn.index(1 - group))", "turn_phase = turn_phase ^ 1")
    writer.finish("s", 1)
    writer.release("k")
    _weights(writer, masked, first=False)


def _weights(writer: PartitionedWriter, masked: bool, first: bool) -> None:
    """Write ``w``, the weights of a tile, and the updates of ``m`` and ``l``.

    Except for the first tile, ``acc`` is rescaled to the new ``m``.
    """
    write, tile, plan = writer.computer, writer.tile, writer.plan
    tile.apply_cap_and_bias()
    if masked and tile.allowed(not tile.even):
        write('s = tl.where(ok, s, float("-inf"))')
    write("m_new = tl.maximum(m, tl.reduce(s, 1, largest))")
    # If all scores so far are masked, m_new is −inf, and −inf − −inf would be NaN.
    write('base = tl.where(m_new == float("-inf"), 0.0, m_new)' if masked else "base = m_new")
    tile.weights("base")
    write(
        f"alpha = tl.exp2((m - base) * {number(plan.score_unit * LOG2E)})",
        "l = l * alpha + tl.reduce(p, 1, total)",
        "m = m_new",
    )
    if not first:
        writer.finish("acc", 0, "w")
        writer.release("v", "before")
        write("acc = acc * tl.convert_layout(alpha, sums_row_layout)[:, None]")
    write(f"w = tl.convert_layout(p.to({dtype(plan)}), weights_layout)")


def _finish(writer: PartitionedWriter, out: TokenBlock) -> None:
    write, tile, plan = writer.computer, writer.tile, writer.plan
    write_denominator(tile)
    writer.store(out, "acc", f"tl.{plan.out_dtype}", "q", "tl.convert_layout(factor, sums_row_layout)[:, None]")
    masked = "" if tile.even else ", mask=qi < T"
    write(f'tl.store({base(write, "m_out", "", plan.H, "T")} + qi, tl.where(seen, m, float("-inf")){masked})')
    write(f"tl.store({base(write, 'log2_sum_out', '', plan.H, 'T')} + qi, tl.log2(l){masked})")
