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
    parts = PartitionedWriter(plan, tiles, operands, schedule, (q,), (k, v), (out,))
    programs = place_by_query(parts, plan, tiles.bq)
    parts(f"q_first = row * {tiles.bq}")
    parts.share()
    parts.barriers("turn", 2, 1)
    parts("mbarrier.arrive(turn.index(0))")
    parts.load_held()
    parts.load_streamed()
    _compute(parts)
    _finish(parts, out)
    return parts, programs


def _compute(parts: PartitionedWriter) -> None:
    """Write the sums over the tiles: ``m``, ``l`` and ``acc``."""
    write, tile = parts.computer, parts.tile
    write(*parts.layouts)
    parts.tokens()
    tile.load_values("", False)
    tile.load_values("q", not tile.even)
    parts.find_tiles(write)
    write(
        f'm = tl.full([{ROWS}], float("-inf"), tl.float32, by_row)',
        f"l = tl.full([{ROWS}], 0.0, tl.float32, by_row)",
        f"acc = tl.full([{ROWS}, {parts.plan.D}], 0.0, tl.float32, of_sums)",
    )
    parts.zeros()
    write("q = q_tile.index(own)", "stage = 0", "phase = 0", "turn_phase = 0", "mbarrier.wait(held.index(own), 0)")
    with write.block("if count > 0:"):
        write("t = 0")
        _scores(parts, parts.has_partial)
        _weights(parts, parts.has_partial, first=True)
        parts.loop(write, 1, lambda masked: _step(parts, masked))
        parts.wait("v")
        parts.multiply("acc", "w", "v_tile.index(stage)", add=True)
        parts.finish("acc", 0, "w")


def _scores(parts: PartitionedWriter, masked: bool) -> None:
    """Write the products ``s`` of the first tile, and the tile's keys."""
    parts.place_tile(parts.computer, None if masked else False)
    _keys(parts, masked)
    parts.wait("k")
    parts.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    parts.finish("s", 0)
    parts.release("k")


def _keys(parts: PartitionedWriter, masked: bool) -> None:
    parts.streamed_tokens()
    parts.tile.load_values("kv", masked and not parts.tile.even)


def _step(parts: PartitionedWriter, masked: bool) -> None:
    """Write a tile's scores and weights, and the products of the previous tile's weights with its values."""
    write = parts.computer
    write("before = stage", "phase_before = phase")
    parts.advance(write)
    _keys(parts, masked)
    parts.wait("k")
    write("mbarrier.wait(turn.index(own), turn_phase)")
    parts.multiply("s", "q", "k_tile.index(stage).permute([1, 0])", add=False)
    parts.wait("v", "before", "phase_before")
    parts.multiply("acc", "w", "v_tile.index(before)", add=True)
    write("mbarrier.arrive(turn.index(1 - own))", "turn_phase = turn_phase ^ 1")
    parts.finish("s", 1)
    parts.release("k")
    _weights(parts, masked, first=False)


def _weights(parts: PartitionedWriter, masked: bool, first: bool) -> None:
    """Write ``w``, the weights of a tile, and the update of ``m`` and ``l``; ``acc`` must then be rescaled to the new
    ``m``.
    """
    write, tile, plan = parts.computer, parts.tile, parts.plan
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
        parts.finish("acc", 0, "w")
        parts.release("v", "before")
        write("acc = acc * tl.convert_layout(alpha, by_sum)[:, None]")
    write(f"w = tl.convert_layout(p.to({dtype(plan)}), of_weights)")


def _finish(parts: PartitionedWriter, out: TokenBlock) -> None:
    write, tile, plan = parts.computer, parts.tile, parts.plan
    write_denominator(tile)
    parts.store(out, "acc", f"tl.{plan.out_dtype}", "q", "tl.convert_layout(factor, by_sum)[:, None]")
    masked = "" if tile.even else ", mask=qi < T"
    write(f'tl.store({base(write, "m", "", plan.H, "T")} + qi, tl.where(seen, m, float("-inf")){masked})')
    write(f"tl.store({base(write, 'log2_sum', '', plan.H, 'T')} + qi, tl.log2(l){masked})")
