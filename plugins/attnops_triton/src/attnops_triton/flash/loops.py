"""The row of tiles that a program computes, and the loops over its active tiles, as Triton source."""

from __future__ import annotations

from collections.abc import Callable

from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import Plan, cdiv
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import Writer

# Bytes of the keys and values of neighbouring programs that should fit the second-level cache.
_CACHE = 24 << 20


def place_by_query(write: Writer, plan: Plan, bq: int) -> int:
    """Write ``b``, ``h``, ``k`` and ``row`` of a program for one tile of queries. Returns the number of programs.

    The last rows, which are the longest of a causal mask, come first, for as many heads at a time as fit the cache. The
    query heads of a kv head are neighbours.
    """
    rows, heads = cdiv(plan.T, bq), plan.B * plan.H
    per_head = plan.S * (plan.D + plan.Dv) * plan.itemsize
    section = max(1, _CACHE // per_head) * plan.G
    write("pid = tl.program_id(0)")
    if section >= heads:
        write(f"row = {rows - 1} - pid // {heads}", f"bh = pid % {heads}")
    else:
        write(
            f"section = pid // {section * rows}",
            f"within = pid % {section * rows}",
            f"size = tl.minimum({section}, {heads} - section * {section})",
            f"row = {rows - 1} - within // size",
            f"bh = section * {section} + within % size",
        )
    write(f"b = bh // {plan.H}", f"h = bh % {plan.H}", f"k = h // {plan.G}")
    return rows * heads


def place_by_key(write: Writer, plan: Plan, bk: int) -> int:
    """Write ``b``, ``k`` and ``row`` of a program for one tile of keys. Returns the number of programs."""
    rows, heads = cdiv(plan.S, bk), plan.B * plan.K
    per_head = plan.T * plan.G * (plan.D + plan.Dv) * plan.itemsize
    section = max(1, _CACHE // per_head)
    write("pid = tl.program_id(0)")
    if section >= heads:
        write(f"row = pid // {heads}", f"bk = pid % {heads}")
    else:
        write(
            f"section = pid // {section * rows}",
            f"within = pid % {section * rows}",
            f"size = tl.minimum({section}, {heads} - section * {section})",
            "row = within // size",
            f"bk = section * {section} + within % size",
        )
    write(f"b = bk // {plan.K}", f"k = bk % {plan.K}")
    return rows * heads


def schedule_operands(schedule: TileSchedule) -> list[Operand]:
    """The arrays that the loops read."""
    named = [(name, getattr(schedule, name)) for name in ("ranges", "columns", "words", "first")]
    return [Operand(name, array) for name, array in named if array is not None]


def tile_loops(write: Writer, schedule: TileSchedule, first: str, block: int, body: Callable[[bool], None]) -> None:
    """Write loops over the active tiles of ``row``: FULL ones, then PARTIAL ones.

    Args:
        write: the kernel's lines.
        schedule: the active tiles.
        first: name of the variable for a tile's first token, which the loops set.
        block: tokens a tile.
        body: writes the computation of a tile; its argument is whether the tile is masked.
    """
    if schedule.constant is None or schedule.words is not None:
        which = " + ".join(
            [f"b * {schedule.map_shape[1]}"] * (schedule.map_shape[0] > 1) + ["h"] * (schedule.map_shape[1] > 1)
        )
        write(f"map_row = ({which or '0'}) * {schedule.rows} + row")
    if schedule.columns is not None:
        write(f"columns_at = columns_ptr + map_row.to(tl.int64) * {schedule.width}")
    for masked, wanted in ((False, schedule.any_full), (True, schedule.any_partial)):
        if not wanted:
            continue
        at = 2 * masked
        if schedule.constant is not None:
            start, stop = str(schedule.constant[at]), str(schedule.constant[at + 1])
        else:
            start, stop = ("partial_start", "partial_stop") if masked else ("full_start", "full_stop")
            write(
                f"{start} = tl.load(ranges_ptr + map_row * 4 + {at})",
                f"{stop} = tl.load(ranges_ptr + map_row * 4 + {at + 1})",
            )
        with write.block(f"for i in range({start}, {stop}):"):
            column = "i" if schedule.columns is None else "tl.load(columns_at + i)"
            write(f"{first} = {column} * {block}")
            if masked and schedule.words is not None:
                write(f"bits_at = tl.load(first_ptr + map_row) + (i - {start})")
            body(masked)
