"""The backward kernels for Hopper: one by tiles of queries for dq, one by tiles of keys for dk and dv.

Two partitions compute 64 rows each. Scores and the gradients of weights are multiplied while the weights are computed.
"""

from __future__ import annotations

from attnops_triton.flash.hopper.partitions import ROWS, Partitions, Rows
from attnops_triton.flash.loops import place_by_key, place_by_query
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import Plan
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import number


def write_by_query(plan: Plan, operands: list[Operand], schedule: TileSchedule) -> tuple[Partitions, int]:
    """The lines of the kernel for dq and the size of its grid, for the operands of `attnops_triton.flash.backward`."""
    tiles, D = plan.by_query, plan.D
    held = tuple(Rows(name, "q", plan.H, "h", D, ROWS) for name in ("q", "d_out"))
    streamed = tuple(Rows(name, "kv", plan.K, "k", D, tiles.bk) for name in ("k", "v"))
    dq = Rows("dq", "q", plan.H, "h", D, ROWS, output=plan.gradient_dtype == plan.dtype)
    parts = Partitions(plan, tiles, operands, schedule, held, streamed, (dq,) if dq.output else ())
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


def _query_step(parts: Partitions, masked: bool) -> None:
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


def write_by_key(plan: Plan, operands: list[Operand], schedule: TileSchedule) -> tuple[Partitions, int]:
    """The lines of the kernel for dk and dv, and the size of its grid; see `write_by_query`.

    The operand ``m`` is the logsumexp to base 2, in one term.
    """
    tiles, D = plan.by_key, plan.D
    held = tuple(Rows(name, "kv", plan.K, "k", D, ROWS) for name in ("k", "v"))
    streamed = tuple(Rows(name, "q", plan.H, "h", D, tiles.bq) for name in ("q", "d_out"))
    by_map = plan.gradient_dtype == plan.dtype and not plan.splits_groups
    heads, head, sums = (plan.H, "h", "float32") if plan.splits_groups else (plan.K, "k", plan.gradient_dtype)
    dk, dv = (Rows(name, "kv", heads, head, D, ROWS, output=by_map) for name in ("dk", "dv"))
    parts = Partitions(plan, tiles, operands, schedule, held, streamed, (dk, dv) if by_map else ())
    programs = place_by_key(parts, plan, tiles.bk)
    parts(f"kv_first = row * {tiles.bk}", f"heads_first = k * {plan.G}")
    parts.share()
    parts.load_held()
    with parts.heads(parts.loader):
        parts.load_streamed()
    write = parts.computer
    write(*parts.layouts)
    parts.tokens()
    for name in ("dk", "dv"):
        write(f"{name} = tl.full([{ROWS}, {D}], 0.0, tl.float32, of_sums)")
    parts.zeros()
    write("keys = k_tile.index(own)", "values = v_tile.index(own)", "stage = 0", "phase = 0")
    write("mbarrier.wait(held.index(own), 0)")
    with parts.heads(write):
        if not parts.flat:
            _load_of_head(parts)
        parts.find_tiles(write)
        parts.loop(write, 0, lambda masked: _key_step(parts, masked))
    parts.store(dk, "dk", f"tl.{sums}", "k", number(float(plan.scale)))
    parts.store(dv, "dv", f"tl.{sums}", "v")
    return parts, programs


def _load_of_head(parts: Partitions) -> None:
    parts.tile.load_values("", False)
    parts.tile.load_values("kv", not parts.tile.even)


def _key_step(parts: Partitions, masked: bool) -> None:
    write, tile, plan = parts.computer, parts.tile, parts.plan
    edge = masked and not tile.even
    if parts.flat:
        _load_of_head(parts)
    parts.streamed_tokens()
    tile.load_values("q", edge)
    parts.wait("q")
    parts.multiply("s", "keys", "q_tile.index(stage).permute([1, 0])", add=False)
    parts.wait("d_out")
    # Registers are few here: the logsumexp is one term, and the product starts from −delta.
    tile.load_statistics(edge, ("m", "delta"))
    write("dp = zeros - delta[None, :]")
    parts.multiply("dp", "values", "d_out_tile.index(stage).permute([1, 0])", add=True)
    parts.finish("s", 1)
    has_ok = recompute_weights(tile, masked, False, lse="m")
    write(f"w = tl.convert_layout(p.to({dtype(plan)}), of_weights)")
    parts.multiply("dv", "w", "d_out_tile.index(stage)", add=True)
    parts.finish("dp", 1)
    parts.finish("dv", 0, "w")
    parts.release("d_out")
    score_gradients(tile, has_ok, subtract=False)
    tile.cap_and_bias_vjp()
    write(f"ws = tl.convert_layout(ds.to({dtype(plan)}), of_weights)")
    parts.multiply("dk", "ws", "q_tile.index(stage)", add=True)
    parts.finish("dk", 0, "ws")
    parts.release("q")
    parts.advance(write)
