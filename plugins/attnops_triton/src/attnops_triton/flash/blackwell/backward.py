"""The backward kernels for Blackwell: one by tiles of queries for dq, one by tiles of keys for dk and dv.

A program has 128 rows, and four partitions: one loads, one warp issues all products, and two compute half the columns
    of a tile each. Scores, the gradients of weights, and sums are in tensor memory. There the weights overwrite the
    scores of their half, and the gradients of scores overwrite the gradients of weights, so that each half is
    multiplied as soon as it is complete. While weights are computed, earlier products run.

Products run in the order in which they are issued, as in `attnops_triton.flash.blackwell.forward`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import ClassVar, Final

from attnops_triton.flash.blackwell.forward import COLUMNS, ROWS, moved
from attnops_triton.flash.hopper.backward import share_statistics
from attnops_triton.flash.hopper.partitions import Partition, PartitionedWriter, TokenBlock
from attnops_triton.flash.loops import place_by_key, place_by_query
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import KernelSource, SourceWriter, number

# Registers per thread: of partitions that compute, and of partitions of one warp.
_REGISTERS: Final = (240, 24)


class _BackwardWriter(PartitionedWriter):
    """The lines of a kernel.

    Attributes:
        multiplier: lines of the warp that issues products.
        buffers: the number of buffers of scores.
        columns: columns per partition that computes: half of the streamed side of a tile.
        half: writes the tile of one such partition.
    """

    rows: ClassVar[int] = ROWS
    copies: ClassVar[int] = 1

    def __init__(
        self, plan: FlashPlan, tiles: TileSizes, operands: list[Operand], schedule: TileSchedule,
        *rows: tuple[TokenBlock, ...], buffers: int,
    ) -> None:  # fmt: skip
        super().__init__(plan, tiles, operands, schedule, *rows)
        self.multiplier, self.buffers = SourceWriter(), buffers
        self.multiplier.integers = self.integers
        self.columns = (self.tile.bq if self.tile.transposed else self.tile.bk) // 2
        bq, bk = (self.columns, self.tile.bk) if self.tile.transposed else (self.tile.bq, self.columns)
        self.half = dataclasses.replace(self.tile, bq=bq, bk=bk)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts in which a thread has one row."""
        return (
            f"of_scores: tl.constexpr = tl.BlockedLayout([1, {self.columns}], [32, 1], [4, 1], [0, 1])",
            f"of_sums: tl.constexpr = tl.BlockedLayout([1, {COLUMNS}], [32, 1], [4, 1], [0, 1])",
            "by_row: tl.constexpr = tl.SliceLayout(1, of_scores)",
            "by_column: tl.constexpr = tl.SliceLayout(0, of_scores)",
            "by_sum: tl.constexpr = tl.SliceLayout(1, of_sums)",
        )

    def share(self) -> None:
        """Also write tensor memory, and the barriers for what is in it."""
        super().share()
        sums = ("dk", "dv") if self.tile.transposed else ("dq",)
        shapes = {"s": (self.buffers, 2 * self.columns), "dp": (1, 2 * self.columns)}
        for name, (copies, columns) in (shapes | dict.fromkeys(sums, (1, self.plan.D))).items():
            self(
                f"{name}_columns: tl.constexpr = TensorMemoryLayout([{ROWS}, {columns}], col_stride=1)",
                f"{name}_memory = allocate_tensor_memory(tl.float32, [{copies}, {ROWS}, {columns}], {name}_columns)",
            )
        self.barriers("s_ready", self.buffers, 1)
        self.barriers("dp_ready", 1, 1)
        if self.tile.transposed:
            self.barriers("w_ready", 2, 1)
        self.barriers("ds_ready", 2, 1)
        self.barriers("finished", 1, 1)
        self.barriers("written", 1, 2)

    def partitions(self) -> list[Partition]:
        """The partitions that the module describes."""
        computing, small = _REGISTERS
        return [
            Partition("compute", self.computer, 4, computing, halves=2),
            Partition("multiply", self.multiplier, 1, small),
            Partition("load", self.loader, 1, small),
        ]

    def kernel(self, name: str, pointers: list[str], functions: str = "") -> KernelSource:
        """The kernel of all lines, in which partitions use opaque copies of the arguments (`moved`)."""
        # If tiles divide the lengths, the compiler knows T and S to be multiples of 16; copies would lose that.
        names = [x for x in self.integers if x not in ("T", "S") or not self.tile.even]
        for write in (self.computer, self.multiplier, self.loader):
            used = [x for x in names if any(re.search(rf"\b{x}\b", line) for line in write.lines)]
            write.lines[:0] = [f"    {x} = {moved(x)}" for x in used]
        return super().kernel(name, pointers, functions)

    def operand(self, name: str, half: str | int) -> str:
        """The tensor memory of half of the weights, or of the gradients of scores: that of ``s``, or of ``dp``."""
        many = 4 // self.plan.itemsize
        layout = f"TensorMemoryLayout([{ROWS}, {self.columns}], col_stride=1)"
        shape = f"[{ROWS}, {2 * self.columns * many}]"
        whole = f"{name}_memory.index(0).reinterpret({dtype(self.plan)}, {shape}, {layout})"
        return f"{whole}.slice({half} * {self.columns * many}, {self.columns})"

    def tokens(self) -> None:
        """Write ``qi``, ``qx`` and values per held row, or ``ki`` and ``kx``; both halves have all rows."""
        name, short, start = ("kv0", "k", "kv_first") if self.tile.transposed else ("q0", "q", "q_first")
        self.computer(f"{name} = {start}", f"{short}i = {name} + tl.arange(0, {ROWS}, layout=by_row)")
        self.computer(f"{short}x = {short}i[:, None]")

    def streamed_tokens(self) -> None:
        """Write ``ki`` and ``kx``, or ``qi`` and ``qx``, of this half of the tile."""
        name, short = ("q0", "q") if self.tile.transposed else ("kv0", "k")
        self.computer(
            f"{short}i = {name} + own * {self.columns} + tl.arange(0, {self.columns}, layout=by_column)",
            f"{short}x = {short}i[None, :]",
        )

    def load_from(self, name: str, buffer: str = "0") -> str:
        """The load of this partition's half of ``s`` or ``dp``."""
        return f"{name}_memory.index({buffer}).slice(own * {self.columns}, {self.columns}).load(of_scores)"

    def store_sums(self, outputs: tuple[tuple[TokenBlock, str, str], ...], dtype_of_sums: str) -> None:
        """Write the stores of sums, half the columns by each partition that computes.

        Args:
            outputs: each an output, the name of the held tile through which it is stored, and a factor.
            dtype_of_sums: the dtype of outputs without a tensor map.
        """
        write, D = self.computer, self.plan.D
        write("mbarrier.wait(finished.index(0), 0)")
        for rows, buffer, factor in outputs:
            first, length = ("q_first", "T") if rows.axis == "q" else ("kv_first", "S")
            if not rows.output:
                stride = rows.heads * D
                write(
                    f"row_of = {first} + tl.arange(0, {ROWS}, layout=by_sum)",
                    f"at = {rows.name}_ptr + b.to(tl.int64) * {length} * {stride} + {rows.head}.to(tl.int64) * {D}",
                    f"at = at + (row_of.to(tl.int64) * {stride})[:, None] "
                    f"+ (own * {D // 2} + tl.arange(0, {COLUMNS}, layout=tl.SliceLayout(0, of_sums)))[None, :]",
                )
            for start in range(0, D // 2, COLUMNS):
                part = f"slice(own * {D // 2} + {start}, {COLUMNS}"
                # Without active tiles the sums were never written.
                write(f"sums = tl.where(done > 0, {rows.name}_memory.index(0).{part}).load(of_sums){factor}, 0.0)")
                if rows.output:
                    write(f"{buffer}_tile.index(0).{part}, 1).store(sums.to({dtype(self.plan)}))", "tl.barrier()")
                else:
                    write(f"tl.store(at + {start}, sums.to({dtype_of_sums}), mask=(row_of < {length})[:, None])")
        if not outputs[0][0].output:
            return
        write("fence_async_shared()", "mbarrier.arrive(written.index(0))")
        with write.block("if own == 0:"):
            write("mbarrier.wait(written.index(0), 0)")
            for rows, buffer, _ in outputs:
                first = "q_first" if rows.axis == "q" else "kv_first"
                write(f"tma.async_store({rows.name}_map, [{first}, {rows.head} * {D}], {buffer}_tile.index(0))")


def write_by_query(plan: FlashPlan, operands: list[Operand], schedule: TileSchedule) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dq and the size of its grid, for the operands of `attnops_triton.flash.backward`."""
    tiles, D = plan.by_query, plan.D
    held = tuple(TokenBlock(name, "q", plan.H, "h", D, ROWS) for name in ("q", "d_out"))
    streamed = tuple(TokenBlock(name, "kv", plan.K, "k", D, tiles.bk) for name in ("k", "v"))
    dq = TokenBlock("dq", "q", plan.H, "h", D, ROWS, output=plan.gradient_dtype == plan.dtype)
    stored = (dq,) if dq.output else ()
    # Scores are computed one tile ahead.
    parts = _BackwardWriter(plan, tiles, operands, schedule, held, streamed, stored, buffers=2)
    programs = place_by_query(parts, plan, tiles.bq)
    parts(f"q_first = row * {tiles.bq}")
    parts.share()
    parts.load_held()
    parts.load_streamed()
    _multiply(parts, ("q", "d_out"), ("k", "v"), "dq", "")
    write, half = parts.computer, parts.half
    write(*parts.layouts)
    parts.tokens()
    half.load_values("", False)
    half.load_values("q", not half.even)
    half.load_statistics(not half.even)
    parts.find_tiles(write)
    write("done = 0")
    parts.loop(write, 0, lambda masked: _query_step(parts, masked))
    parts.store_sums(((dq, "q", f" * {number(float(plan.scale))}"),), f"tl.{plan.gradient_dtype}")
    return parts, programs


def _query_step(parts: _BackwardWriter, masked: bool) -> None:
    write, half = parts.computer, parts.half
    edge = masked and not half.even
    parts.streamed_tokens()
    half.load_values("kv", edge)
    write("mbarrier.wait(s_ready.index(done % 2), done // 2 & 1)", f"s = {parts.load_from('s', 'done % 2')}")
    has_ok = recompute_weights(half, masked, edge)
    write("mbarrier.wait(dp_ready.index(0), done & 1)", f"dp = {parts.load_from('dp')}")
    _finish_step(parts, has_ok, subtract=True)


def _finish_step(parts: _BackwardWriter, has_ok: bool, subtract: bool) -> None:
    write, half = parts.computer, parts.half
    score_gradients(half, has_ok, subtract=subtract)
    half.cap_and_bias_vjp()
    write(
        f"{parts.operand('dp', 'own')}.store(ds.to({dtype(parts.plan)}))",
        "mbarrier.arrive(ds_ready.index(own))",
        "done = done + 1",
    )


def write_by_key(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, padded: int
) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dk and dv and the size of its grid, for the operands of
    `attnops_triton.flash.backward`.

    The operand ``statistics``, [B, H, 2, padded], has the logsumexp to base 2 as one term, and delta, padded to whole
    tiles of queries.
    """
    tiles, D = plan.by_key, plan.D
    held = tuple(TokenBlock(name, "kv", plan.K, "k", D, ROWS) for name in ("k", "v"))
    streamed = tuple(TokenBlock(name, "q", plan.H, "h", D, tiles.bq) for name in ("q", "d_out"))
    by_map = plan.gradient_dtype == plan.dtype and not plan.splits_groups
    heads, head, sums = (plan.H, "h", "float32") if plan.splits_groups else (plan.K, "k", plan.gradient_dtype)
    dk, dv = (TokenBlock(name, "kv", heads, head, D, ROWS, output=by_map) for name in ("dk", "dv"))
    stored = (dk, dv) if by_map else ()
    parts = _BackwardWriter(plan, tiles, operands, schedule, held, streamed, stored, buffers=1)
    programs = place_by_key(parts, plan, tiles.bk)
    parts(f"kv_first = row * {tiles.bk}", f"heads_first = k * {plan.G}")
    parts.share()
    share_statistics(parts, padded)
    parts.load_held()
    with parts.heads(parts.loader):
        parts.load_streamed()
    _multiply(parts, ("k", "v"), ("q", "d_out"), "dk", "dv")
    write = parts.computer
    write(*parts.layouts)
    parts.tokens()
    write("done = 0", "stage = 0", "phase = 0")
    with parts.heads(write):
        if not parts.flat:
            _load_of_head(parts)
        parts.find_tiles(write)
        parts.loop(write, 0, lambda masked: _key_step(parts, masked))
    outputs = ((dk, "k", f" * {number(float(plan.scale))}"), (dv, "v", ""))
    parts.store_sums(outputs, f"tl.{sums}")
    return parts, programs


def _load_of_head(parts: _BackwardWriter) -> None:
    parts.half.load_values("", False)
    parts.half.load_values("kv", not parts.half.even)


def _key_step(parts: _BackwardWriter, masked: bool) -> None:
    write, half = parts.computer, parts.half
    if parts.flat:
        _load_of_head(parts)
    parts.streamed_tokens()
    half.load_values("q", masked and not half.even)
    part = f"slice(own * {parts.columns}, {parts.columns}, 1).load(of_scores)"
    parts.wait("q")
    write(f"lse = statistics_tile.index(stage).slice(0, 1, 0).{part}")
    write("mbarrier.wait(s_ready.index(0), done & 1)", f"s = {parts.load_from('s')}")
    has_ok = recompute_weights(half, masked, False, lse="lse")
    write(f"{parts.operand('s', 'own')}.store(p.to({dtype(parts.plan)}))", "mbarrier.arrive(w_ready.index(own))")
    write(f"delta = statistics_tile.index(stage).slice(1, 1, 0).{part}")
    write("mbarrier.wait(dp_ready.index(0), done & 1)", f"dp = {parts.load_from('dp')} - delta")
    _finish_step(parts, has_ok, subtract=False)
    parts.advance(write)


def _multiply(
    parts: _BackwardWriter, held: tuple[str, str], streamed: tuple[str, str], by_scores: str, by_weights: str
) -> None:
    """Write the products of all tiles.

    The gradients of a tile's scores are multiplied after the scores of the next tile are computed, since those are
    ready sooner.

    Args:
        parts: the kernel's lines.
        held: names of the held operands of ``s`` and of ``dp``.
        streamed: names of the streamed operands of ``s`` and of ``dp``; the gradients of scores are multiplied by the
            former.
        by_scores: the output to which products with the gradients of scores are added.
        by_weights: the output to which products with the weights are added; empty for none.
    """
    write, of_scores, of_weights = parts.multiplier, *streamed

    def whole(name: str, buffer: str, own: str, other: str, *barriers: str) -> None:
        write(
            f"mbarrier.wait({other}_ready.index(stage), phase)",
            f"tcgen05_mma({own}_tile.index(0), {other}_tile.index(stage).permute([1, 0]), {name}_memory.index({buffer})"
            f", use_acc=False, mbarriers=[{', '.join((f'{name}_ready.index({buffer})', *barriers))}])",
        )

    def halves(name: str, other: str, stage: str, sums: str, turn: str, ready: str) -> None:
        for half in range(2):
            write(
                f"mbarrier.wait({ready}_ready.index({half}), {turn} & 1)",
                f"tcgen05_mma({parts.operand(name, half)}, "
                f"{other}_tile.index({stage}).slice({half * parts.columns}, {parts.columns}, 0), "
                f"{sums}_memory.index(0), use_acc={'True' if half else f'{turn} > 0'}, "
                f"mbarriers=[{other}_free.index({stage})])",
            )

    write("stage = 0", "phase = 0", "before = 0", "done = 0", "mbarrier.wait(held.index(0), 0)")
    with parts.heads(write) if parts.tile.transposed else contextlib.nullcontext():
        parts.find_tiles(write)
        with write.block(f"for t in range(0, count{f' * {parts.plan.G}' if parts.flat else ''}):"):
            whole("s", f"done % {parts.buffers}", held[0], of_scores)
            with write.block("if done > 0:"):
                halves("dp", of_scores, "before", by_scores, "(done - 1)", "ds")
            free = () if by_weights else (f"{of_weights}_free.index(stage)",) * 2
            whole("dp", "0", held[1], of_weights, *free)
            if by_weights:
                halves("s", of_weights, "stage", by_weights, "done", "w")
            write("before = stage", "done = done + 1")
            parts.advance(write)
    with write.block("if done > 0:"):
        halves("dp", of_scores, "before", by_scores, "(done - 1)", "ds")
    write("tcgen05_commit(finished.index(0))")
