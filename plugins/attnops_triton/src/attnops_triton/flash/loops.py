"""Triton source that finds the row of tiles of a program, and the loops over the row's active tiles."""

from __future__ import annotations

from collections.abc import Callable

from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, cdiv
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import SourceWriter

# Bytes of keys and values that neighbouring programs read together, so that they stay in the L2 cache.
_CACHE = 24 << 20


def place_by_query(write: SourceWriter, plan: FlashPlan, bq: int) -> int:
    """Write ``b``, ``h``, ``k`` and ``row`` of a program for one tile of queries. Returns the number of programs.

    The last rows come first, since they are the longest with a causal mask. Programs of as many heads as fit the L2
    cache are neighbours, and so are those of the query heads of a kv head.
    """
    rows = cdiv(plan.T, bq)
    per_head = plan.S * (plan.D + plan.Dv) * plan.itemsize
    _place(write, rows, plan.B * plan.H, max(1, _CACHE // per_head) * plan.G)
    write("row = rows - 1 - place", f"b = bh // {plan.H}", f"h = bh % {plan.H}", f"k = h // {plan.G}")
    return rows * plan.B * plan.H


def place_by_key(write: SourceWriter, plan: FlashPlan, bk: int) -> int:
    """Write ``b``, ``k`` and ``row`` of a program for one tile of keys. Returns the number of programs.

    If ``plan.splits_groups``, also writes ``h``, whose kv head is ``k``.
    """
    rows = cdiv(plan.S, bk)
    if plan.splits_groups:
        _place(write, rows, plan.B * plan.H, plan.B * plan.H)
        write("row = place", f"b = bh // {plan.H}", f"h = bh % {plan.H}", f"k = h // {plan.G}")
        return rows * plan.B * plan.H
    per_head = plan.T * plan.G * (plan.D + plan.Dv) * plan.itemsize
    _place(write, rows, plan.B * plan.K, max(1, _CACHE // per_head))
    write("row = place", f"b = bh // {plan.K}", f"k = bh % {plan.K}")
    return rows * plan.B * plan.K


def _place(write: SourceWriter, rows: int, heads: int, together: int) -> None:
    """Write ``place``, an index below ``rows``, and ``bh``, an index of batch and head.

    Programs iterate over ``together`` heads first, then over the rows, then over further heads.
    """
    write.integer("rows", rows)
    write.integer("heads", heads)
    write.integer("together", min(together, heads))
    write(
        "pid = tl.program_id(0)",
        "section = pid // (together * rows)",
        "within = pid % (together * rows)",
        "size = tl.minimum(together, heads - section * together)",
        "place = within // size",
        "bh = section * together + within % size",
    )


def schedule_operands(schedule: TileSchedule) -> list[Operand]:
    """The arrays that the loops read."""
    named = [(name, getattr(schedule, name)) for name in ("ranges", "columns", "words", "first")]
    return [Operand(name, array) for name, array in named if array is not None]


def tile_loops(
    write: SourceWriter, schedule: TileSchedule, first: str, block: int, even: bool, body: Callable[[bool], None],
    heads: int = 0,
) -> None:  # fmt: skip
    """Write loops over the active tiles of ``row``: FULL ones, then PARTIAL ones.

    Args:
        write: the kernel's lines.
        schedule: the active tiles.
        first: name of the variable that the loops set to a tile's first token, "q0" or "kv0".
        block: tokens per tile.
        even: whether the tile sizes divide the lengths.
        body: writes the computation of a tile; its argument is whether the tile is PARTIAL.
        heads: the number of query heads per kv head, if the loops also iterate over these heads and write ``h``. This
            needs the same tiles for all of them. 0 if ``h`` is written before.
    """
    if schedule.constant is None:
        by_batch = write.integer("map_batch", schedule.map_shape[1] * (schedule.map_shape[0] > 1))
        map_index = f"b * {by_batch}" + " + h" * (schedule.map_shape[1] > 1)
        write(f"map_row = ({map_index}) * {write.integer('rows', schedule.rows)} + row")
    if schedule.columns is not None:
        write(f"columns_at = columns_ptr + map_row.to(tl.int64) * {write.integer('width', schedule.width)}")
    for masked in (False, True):
        if masked and schedule.constant is not None and even:
            continue
        names = ("partial_start", "partial_stop") if masked else ("full_start", "full_stop")
        for i, name in enumerate(names, 2 * masked):
            if schedule.constant is not None:
                write.integer(name, schedule.constant[i])
            else:
                write(f"{name} = tl.load(ranges_ptr + map_row * 4 + {i})")
        start, stop = names
        bounds = f"t in range(0, ({stop} - {start}) * {heads})" if heads else f"i in range({start}, {stop})"
        with write.block(f"for {bounds}:"):
            if heads:
                write(f"h = k * {heads} + t % {heads}", f"i = {start} + t // {heads}")
            column = "i" if schedule.columns is None else "tl.load(columns_at + i)"
            write(f"{first} = {column} * {block}")
            if masked and schedule.words is not None:
                write(f"bits_at = tl.load(first_ptr + map_row) + (i - {start})")
            body(masked)
