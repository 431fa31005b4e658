"""Which tile a program computes, and the loops over the tiles that it visits, written as Triton source."""

from __future__ import annotations

from collections.abc import Callable

from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import Plan, cdiv
from attnops_triton.flash.visits import Visits
from attnops_triton.language.source import Writer

# What of the keys and values of neighbouring programs is to stay in the second-level cache.
_CACHE = 24 << 20


def place_by_query(write: Writer, plan: Plan, bq: int) -> int:
    """Write ``b``, ``h``, ``k`` and ``row`` of a program that has one tile of queries; how many programs there are.

    The last rows come first, which are the longest where the mask is causal, for so many heads at a time as share the
    cache; the heads of a kv head are neighbours.
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
    """Write ``b``, ``k`` and ``row`` of a program that has one tile of keys; how many programs there are."""
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


def visit_operands(visits: Visits) -> list[Operand]:
    """What the loops read."""
    named = [(name, getattr(visits, name)) for name in ("ranges", "columns", "words", "first")]
    return [Operand(name, array) for name, array in named if array is not None]


def visit_loops(write: Writer, visits: Visits, first: str, block: int, body: Callable[[bool], None]) -> None:
    """Loops over the tiles of ``row``: FULL ones, then PARTIAL ones.

    Args:
        write: where to.
        visits: the tiles.
        first: the name of a tile's first token, which the loops set.
        block: tokens a tile.
        body: writes what is done with a tile; given whether it is to be masked.
    """
    if visits.constant is None or visits.words is not None:
        which = " + ".join([f"b * {visits.maps[1]}"] * (visits.maps[0] > 1) + ["h"] * (visits.maps[1] > 1))
        write(f"visited = ({which or '0'}) * {visits.rows} + row")
    if visits.columns is not None:
        write(f"columns_at = columns_ptr + visited.to(tl.int64) * {visits.width}")
    for masked, wanted in ((False, visits.full), (True, visits.partial)):
        if not wanted:
            continue
        at = 2 * masked
        if visits.constant is not None:
            start, stop = str(visits.constant[at]), str(visits.constant[at + 1])
        else:
            start, stop = ("partial_start", "partial_stop") if masked else ("full_start", "full_stop")
            write(
                f"{start} = tl.load(ranges_ptr + visited * 4 + {at})",
                f"{stop} = tl.load(ranges_ptr + visited * 4 + {at + 1})",
            )
        with write.block(f"for i in range({start}, {stop}):"):
            column = "i" if visits.columns is None else "tl.load(columns_at + i)"
            write(f"{first} = {column} * {block}")
            if masked and visits.words is not None:
                write(f"bits_at = tl.load(first_ptr + visited) + (i - {start})")
            body(masked)
