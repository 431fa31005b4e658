"""What a program stores: its rows of the output, or the partial softmax of its split; and the kernel that merges
splits.
"""

from __future__ import annotations

from attnops_triton.caches.plan import CachePlan
from attnops_triton.flash.plan import LN2, LOG2E
from attnops_triton.language.source import SourceWriter, number


def write_partial(write: SourceWriter, plan: CachePlan) -> None:
    """Write the stores of a split, all float32: the sums before the division, the maximum, and the denominator.

    The arrays are [items, kv heads, tiles of heads, splits, rows, …]. A row that sees no key stores only its
    denominator, 0.
    """
    write("at = " + _partial_rows(plan) + " + of_tile")
    write("tl.store(part_m_ptr + at, m)", "tl.store(part_l_ptr + at, l)")
    _unscaled(write, plan)
    for i, (start, width, stop) in enumerate(plan.value_chunks):
        columns = f"({start} + tl.arange(0, {width}))[None, :]"
        conditions = ["(l != 0.0)[:, None]"] + [f"({columns} < {stop})"] * (start + width > stop)
        target = f"part_ptr + at[:, None] * {plan.Dv} + {columns}"
        write(f"tl.store({target}, acc_{i}, mask={' & '.join(conditions)})")


def _partial_rows(plan: CachePlan) -> str:
    blocks = plan.head_blocks
    tile = f"(item * {plan.K} + k)" + (f" * {blocks} + part" if blocks > 1 else "")
    return f"(({tile}).to(tl.int64) * splits + split) * {plan.tiles.rows}"


def _unscaled(write: SourceWriter, plan: CachePlan) -> None:
    """Multiply the accumulators by the values' scales."""
    if not plan.scales or (plan.scales == "token_head" and plan.dtype != "float16"):
        return
    factor = "unit" if plan.scales == "token_head" else "value_factor"
    for i in range(len(plan.value_chunks)):
        write(f"acc_{i} = acc_{i} * {factor}")


def write_result(write: SourceWriter, plan: CachePlan) -> None:
    """Write the division by the denominator, sinks included, and the stores of output and logsumexp."""
    _unscaled(write, plan)
    write_denominator(write, plan, "hr")
    write("stored = real & seen_any" if plan.is_packed else "stored = real")
    write(f"at = {_query_rows(plan)} * {plan.H} + hr")
    for i, (start, width, stop) in enumerate(plan.value_chunks):
        write(f"acc_{i} = acc_{i} * scaling[:, None]")
        columns = f"({start} + tl.arange(0, {width}))[None, :]"
        conditions = ["stored[:, None]"] + [f"({columns} < {stop})"] * (start + width > stop)
        target = f"out_ptr + at[:, None] * {plan.Dv} + {columns}"
        write(f"tl.store({target}, acc_{i}.to(tl.{plan.out_dtype}), mask={' & '.join(conditions)})")
    if plan.wants_lse:
        write(f"tl.store(lse_ptr + {_lse_rows(plan)}, lse, mask=stored)")


def _query_rows(plan: CachePlan) -> str:
    return "qr.to(tl.int64)" if plan.is_packed else "(b.to(tl.int64) * T + qr)"


def _lse_rows(plan: CachePlan) -> str:
    return "hr.to(tl.int64) * T + qr" if plan.is_packed else f"(b.to(tl.int64) * {plan.H} + hr) * T + qr"


def write_denominator(write: SourceWriter, plan: CachePlan, head: str) -> None:
    """Write ``scaling``, by which sums are multiplied, ``seen_any``, and ``lse`` if wanted, from ``m`` and ``l``.

    Rows that see no key give 0 and −inf.
    """
    unit = number(plan.score_unit * LOG2E)
    # Decided by the sum: a NaN score always makes the sum NaN, but not always the maximum.
    write("seen_any = l != 0.0", "m = tl.where(seen_any, m, 0.0)")
    if plan.scoring.sinks:
        write(
            f"given = tl.load(sinks_ptr + {head})",
            f"sink = tl.minimum(given * {number(1 / plan.score_unit)}, 3e38)",
            "m_new = tl.maximum(m, sink)",
            f"alpha = tl.exp2((m - m_new) * {unit})",
            f"l = l * alpha + tl.exp2((sink - m_new) * {unit})",
            'l = tl.where((given == given) & (given < float("inf")), l, float("nan"))',
            "m = m_new",
        )
    write("l = tl.where(seen_any, l, 1.0)")
    write(f"scaling = tl.where(seen_any, {'alpha' if plan.scoring.sinks else '1.0'} / l, 0.0)")
    if plan.wants_lse:
        lse = f"m * {number(plan.score_unit)} + tl.log2(l) * {number(LN2)}"
        write(f'lse = tl.where(seen_any, {lse}, float("-inf"))')


def write_merge(write: SourceWriter, plan: CachePlan) -> int:
    """Write the kernel that merges splits, a program for each row of a tile. Returns the number of programs."""
    rows, blocks, splits = plan.tiles.rows, plan.head_blocks, plan.tiles.splits
    write.integer("splits", splits)
    write.integer("T", plan.T)
    of_tile = plan.bq * plan.heads
    write(
        "pid = tl.program_id(0)",
        f"place = pid % {of_tile}",
        f"rest = pid // {of_tile}",
        *([f"part = rest % {blocks}", f"rest = rest // {blocks}"] if blocks > 1 else []),
        f"k = rest % {plan.K}",
        f"item = rest // {plan.K}",
    )
    if plan.is_packed:
        write("tile = tl.load(tile_ptr + item)")
    else:
        write.integer("nq", plan.nq)
        write("tile = item % nq", "b = item // nq")
    head = f"place % {plan.heads}" + (f" + part * {plan.heads}" if blocks > 1 else "")
    write(f"qr = tile * {plan.bq} + place // {plan.heads}", f"g = {head}",
          f"hr = k * {plan.G} + tl.minimum(g, {plan.G - 1})")  # fmt: skip
    width = max(16, 1 << (splits - 1).bit_length())
    tile = f"(item * {plan.K} + k)" + (f" * {blocks} + part" if blocks > 1 else "")
    write(
        f"each = tl.arange(0, {width})",
        f"at = (({tile}).to(tl.int64) * splits + each) * {rows} + place",
        "ls = tl.load(part_l_ptr + at, mask=each < splits, other=0.0)",
        'ms = tl.load(part_m_ptr + at, mask=ls != 0.0, other=float("-inf"))',
        "m = tl.reduce(ms, 0, largest)",
        'below = tl.where(m == float("-inf"), 0.0, m)',
        f"weights = tl.where(ls != 0.0, tl.exp2((ms - below) * {number(plan.score_unit * LOG2E)}), 0.0)",
        "l = tl.reduce(ls * weights, 0, total)",
    )
    write_denominator(write, plan, "hr")
    write("stored = (qr < T)" + (f" & (g < {plan.G})" if plan.G % plan.heads else "")
          + (" & seen_any" if plan.is_packed else ""))  # fmt: skip
    dims = max(16, 1 << (plan.Dv - 1).bit_length())
    columns = f"tl.arange(0, {dims})"
    write(f"acc = tl.full([{dims}], 0.0, tl.float32)")
    # A fixed number of splits at a time, in order, so that a row's result does not depend on the rest of the batch.
    step = 16
    with write.block(f"for turn in range(0, {width // step}):"):
        write(
            f"some = turn * {step} + tl.arange(0, {step})",
            f"some_at = (({tile}).to(tl.int64) * splits + some) * {rows} + place",
            "some_l = tl.load(part_l_ptr + some_at, mask=some < splits, other=0.0)",
            'some_m = tl.load(part_m_ptr + some_at, mask=some_l != 0.0, other=float("-inf"))',
            f"weight = tl.where(some_l != 0.0, tl.exp2((some_m - below) * {number(plan.score_unit * LOG2E)}), 0.0)",
            f"loaded = (some_l != 0.0)[:, None] & ({columns} < {plan.Dv})[None, :]",
            f"sums = tl.load(part_ptr + some_at[:, None] * {plan.Dv} + {columns}[None, :], mask=loaded, other=0.0)",
            "acc = acc + tl.reduce(sums * weight[:, None], 0, total)",
        )
    target = f"out_ptr + ({_query_rows(plan)} * {plan.H} + hr) * {plan.Dv} + {columns}"
    write(
        f"tl.store({target}, (acc * scaling).to(tl.{plan.out_dtype}), mask={columns} < tl.where(stored, {plan.Dv}, 0))"
    )
    if plan.wants_lse:
        one = "tl.arange(0, 1)"
        write(f"tl.store(lse_ptr + {_lse_rows(plan)} + {one}, lse, mask={one} < tl.where(stored, 1, 0))")
    return plan.items * plan.K * blocks * of_tile
