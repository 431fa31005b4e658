"""The attention kernel: online softmax over the tiles of keys of an item, or of one of its splits."""

from __future__ import annotations

from attnops_triton.caches.plan import CachePlan, HeadDimChunk
from attnops_triton.caches.result import write_partial, write_result
from attnops_triton.caches.scores import ScoreWriter
from attnops_triton.caches.storage import LoadWriter
from attnops_triton.caches.write import write_tokens
from attnops_triton.flash.plan import LOG2E
from attnops_triton.language.source import SourceWriter, number


def write_kernel(write: SourceWriter, plan: CachePlan, written: dict[str, int]) -> int:
    """Write the kernel. Returns the number of programs.

    Args:
        write: the kernel's lines.
        plan: the plan of the call.
        written: features per token of each array of the cache that the kernel writes, by name; 0 for scales.
    """
    scores = ScoreWriter(write, plan)
    storage = LoadWriter(write, plan)
    for name, value in (("T", plan.T), ("S", plan.S), ("keys", plan.key_axis)):
        write.integer(name, value)
    programs = _place(write, plan)
    _queries(write, plan)
    scores.load_values("bias", by_key=False)
    if not _loads_mask_late(plan):
        scores.load_values("mask", by_key=False)
    if plan.writes:
        write_tokens(write, plan, written)
    _state(write, plan)
    _loops(write, plan, scores, storage)
    if plan.tiles.splits > 1:
        write_partial(write, plan)
    else:
        write_result(write, plan)
    return programs


def _place(write: SourceWriter, plan: CachePlan) -> int:
    """Write the indices of a program: ``item``, ``row``, ``b``, the kv head ``k``, the tile of queries, the tile of
    heads, and the split.

    Programs that read the same keys are neighbours.
    """
    write.integer("nq", plan.nq)
    write("pid = tl.program_id(0)")
    if plan.is_packed:
        write(
            "item = pid % items", "rest = pid // items", "tile = tl.load(tile_ptr + item)",
            "row = tl.load(row_ptr + item)", "b = row * 0",
        )  # fmt: skip
        write.integer("items", plan.items)
    else:
        write("tile = pid % nq", "rest = pid // nq")
    if plan.head_blocks > 1:
        write(f"part = rest % {plan.head_blocks}", f"rest = rest // {plan.head_blocks}")
    if plan.tiles.splits > 1:
        splits = write.integer("splits", plan.tiles.splits)
        write(f"split = rest % {splits}", f"rest = rest // {splits}")
    write(f"k = rest % {plan.K}")
    if not plan.is_packed:
        write(f"row = rest // {plan.K}", "b = row", "item = row * nq + tile")
    write(
        "first = tl.load(ranges_ptr + item * 5)", "stop = tl.load(ranges_ptr + item * 5 + 1)",
        "full_start = tl.load(ranges_ptr + item * 5 + 2)", "full_stop = tl.load(ranges_ptr + item * 5 + 3)",
    )  # fmt: skip
    if plan.tiles.splits > 1 and plan.in_order:
        write(
            "each = tl.load(ranges_ptr + item * 5 + 4)", "stop = tl.minimum(stop, (split + 1) * each)",
            "first = tl.maximum(first, split * each)",
        )  # fmt: skip
    elif plan.tiles.splits > 1:
        write(
            "each = (stop - first + splits - 1) // splits", "first = first + split * each",
            "stop = tl.minimum(stop, first + each)",
        )  # fmt: skip
    write(
        "stop = tl.maximum(first, stop)",
        "full_start = tl.minimum(tl.maximum(full_start, first), stop)",
        "full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)",
    )
    return plan.items * plan.K * plan.head_blocks * plan.tiles.splits


def write_rows(write: SourceWriter, plan: CachePlan) -> None:
    """Write ``qi``, ``hi`` [rows], the query and the head of each row; ``real``, whether they exist; and ``qr``,
    ``hr``, which are ``qi``, ``hi`` in range.
    """
    rows, heads = plan.tiles.rows, plan.heads
    part = f"part * {heads} + " if plan.head_blocks > 1 else ""
    write(
        f"of_tile = tl.arange(0, {rows})",
        f"qi = tile * {plan.bq} + of_tile // {heads}",
        f"hi = {part}of_tile % {heads}",
        "real = qi < T",
    )
    if plan.bq * heads < rows:
        write(f"real = real & (of_tile < {plan.bq * heads})")
    if plan.G % heads:
        write(f"real = real & (hi < {plan.G})")
    # Rows that don't exist have the last query and head: with other indices a function might divide by 0.
    write("qr = tl.minimum(qi, T - 1)", f"hr = k * {plan.G} + tl.minimum(hi, {plan.G - 1})")


def _queries(write: SourceWriter, plan: CachePlan) -> None:
    """Load the queries ``q_0``, ``q_1``, …, [rows, width]."""
    write_rows(write, plan)
    lead = "" if plan.is_packed else "b.to(tl.int64) * T + "
    write(f"q_at = q_ptr + (({lead}qr).to(tl.int64) * {plan.H} + hr) * {plan.D}")
    chunks = plan.key_chunks
    for i, (start, width, stop) in enumerate(chunks):
        columns = f"({start} + tl.arange(0, {width}))[None, :]"
        conditions = ["real[:, None]"] + [f"({columns} < {stop})"] * (start + width > stop)
        write(f"q_{i} = tl.load(q_at[:, None] + {columns}, mask={' & '.join(conditions)}, other=0.0)")
    if plan.scales_queries:
        largest = [f"tl.reduce(tl.abs(q_{i}.to(tl.float32)), 1, largest)" for i in range(len(chunks))]
        write(f"size = {largest[0]}", *(f"size = tl.maximum(size, {x})" for x in largest[1:]))
        write(
            "exponent = tl.floor(tl.log2(tl.where((size > 1e-30) & (size < 1e30), size, 1.0)))",
            "factor = tl.exp2(exponent)",
            "inverse = tl.exp2(-exponent)[:, None]",
            *(f"q_{i} = q_{i}.to(tl.float32) * inverse" for i in range(len(chunks))),
        )
    for i in range(len(chunks)):
        write(f"q_{i} = q_{i}.to(tl.{plan.dtype})")
    if plan.scales_first:
        _factor(write, plan)


def _factor(write: SourceWriter, plan: CachePlan) -> None:
    """Write ``factor``, a number or [rows], that products are multiplied by."""
    scale = number(float(plan.scale))
    write(f"factor = factor * {scale}" if plan.scales_queries else f"factor = {scale}")
    if plan.scales in ("head", "tensor"):
        write(f"factor = factor * tl.load(key_scale_ptr{' + k' if plan.scales == 'head' else ''})")


def _state(write: SourceWriter, plan: CachePlan) -> None:
    rows = plan.tiles.rows
    write(f'm = tl.full([{rows}], float("-inf"), tl.float32)', f"l = tl.full([{rows}], 0.0, tl.float32)")
    for i, chunk in enumerate(plan.value_chunks):
        write(f"acc_{i} = tl.full([{rows}, {chunk.width}], 0.0, tl.float32)")
    if _has_unit(plan):
        write("unit = pid.to(tl.float32) * 0.0")
    if plan.scales in ("head", "tensor"):
        at = f"{'key' if plan.is_latent else 'value'}_scale_ptr{' + k' if plan.scales == 'head' else ''}"
        write(f"value_factor = tl.load({at})")


def _has_unit(plan: CachePlan) -> bool:
    """Whether weights, which are multiplied by the values' scales, are divided by the largest of these scales first:
    otherwise float16 could not hold them.
    """
    return plan.scales == "token_head" and plan.dtype == "float16"


def _loops(write: SourceWriter, plan: CachePlan, scores: ScoreWriter, storage: LoadWriter) -> None:
    """Write the loops over tiles without a mask, and over those before and after them."""
    bk = plan.tiles.bk
    with write.block("for i in range(full_start, full_stop):"):
        write(f"kv0 = i * {bk}")
        _tile(write, plan, scores, storage, False)
    if _loads_mask_late(plan):
        scores.load_values("mask", by_key=False)
    write("before = full_start - first")
    with write.block("for j in range(0, before + stop - full_stop):"):
        write(f"kv0 = tl.where(j < before, first + j, full_stop + j - before) * {bk}")
        _tile(write, plan, scores, storage, True)


def _loads_mask_late(plan: CachePlan) -> bool:
    """Whether the mask's values are loaded after the loop over unmasked tiles.

    Otherwise ptxas 12.9 spills two registers on sm_80 and sm_89 at D 128. Without scales per token and head it is the
    late load that spills (sm_89, T 512).
    """
    return plan.scales in ("head", "tensor")


def _tile(write: SourceWriter, plan: CachePlan, scores: ScoreWriter, storage: LoadWriter, masked: bool) -> None:
    """Write the computation of one tile."""
    storage.locate(has_pages=not masked)
    write("kx = slot" if plan.is_even or not masked else "kx = tl.minimum(slot, S - 1)")
    if plan.is_packed:
        write("kx = kx + row * S")
    scores.load_values("bias", by_key=True)
    guarded = False
    if masked:
        scores.load_values("mask", by_key=True)
        conditions = [storage.present] if storage.present else []
        conditions += [] if plan.is_even else ["(slot < S)[None, :]"]
        conditions.append("real[:, None]")
        guarded = scores.allowed(*conditions)
    storage.keys(guarded)
    _products(write, plan, plan.key_chunks)
    if plan.scales_first:
        factor = "factor[:, None]" if plan.scales_queries else "factor"
        write(f"s = s * {factor}")
    if plan.scales == "token_head":
        write(f"s = s * {storage.scale('key', guarded)}[None, :]")
    scores.apply_cap_and_bias()
    if guarded:
        write('s = tl.where(ok, s, float("-inf"))')
    _softmax(write, plan, masked)
    storage.values(guarded)
    _accumulate(write, plan, storage, guarded)
    write("m = m_new")


def _products(write: SourceWriter, plan: CachePlan, chunks: list[HeadDimChunk]) -> None:
    """Write ``s``, the products of queries and keys."""
    for i in range(len(chunks)):
        write(f"s = tl.dot(q_{i}, tl.trans(k_{i}){', s' if i else ''}{precision(plan)})")


def precision(plan: CachePlan) -> str:
    """The argument of products for their precision."""
    return f', input_precision="{"tf32" if plan.tf32 else "ieee"}"' if plan.dtype == "float32" else ""


def _softmax(write: SourceWriter, plan: CachePlan, masked: bool) -> None:
    """Write the weights ``p``, ``m_new``, ``alpha`` and the sum ``l``."""
    unit = number(plan.score_unit * LOG2E)
    write("m_new = tl.maximum(m, tl.reduce(s, 1, largest))")
    if masked or plan.scoring.has_bias:
        # If all scores so far are masked, m_new is −inf, and −inf − −inf would be NaN.
        write('below = tl.where(m_new == float("-inf"), 0.0, m_new)')
    else:
        write("below = m_new")
    if plan.scoring.has_bias or plan.dtype == "float32":
        # Subtract before multiplying, which is exact: with large biases a difference of products would not be.
        write(f"p = tl.exp2((s - below[:, None]) * {unit})")
    else:
        write(f"p = tl.exp2(s * {unit} - (below * {unit})[:, None])")
    write(f"alpha = tl.exp2((m - below) * {unit})", "l = l * alpha + tl.reduce(p, 1, total)")


def _accumulate(write: SourceWriter, plan: CachePlan, storage: LoadWriter, guarded: bool) -> None:
    """Write the products of weights and values, added to the output so far."""
    if plan.scales == "token_head":
        scale = "key_scale" if plan.is_latent else storage.scale("value", guarded)
        if _has_unit(plan):
            write(
                f"unit_new = tl.maximum(unit, tl.reduce({scale}, 0, largest))",
                "inverse_unit = tl.where(unit_new > 0.0, 1.0 / unit_new, 0.0)",
                "alpha = alpha * (unit * inverse_unit)",
                f"{scale} = {scale} * inverse_unit",
                "unit = unit_new",
            )
        write(f"p = p * {scale}[None, :]")
    write(f"p = p.to(tl.{plan.dtype})")
    for i in range(len(plan.value_chunks)):
        write(f"acc_{i} = acc_{i} * alpha[:, None]")
        write(f"acc_{i} = tl.dot(p, v_{i}, acc_{i}{precision(plan)})")
