"""The backward kernels for Blackwell: one by tiles of queries for dq, one by tiles of keys for dk and dv.

A program has 128 rows and four partitions: one loads, one issues all products, and two compute half the columns of a
tile each. Scores, the gradients of weights, and sums are in tensor memory. There the weights overwrite the scores of
their half, and the gradients of scores overwrite the gradients of weights, so that each half is multiplied as soon as
it is complete. Earlier products run while weights are computed.

Products run in the order in which they are issued, as in `attnops_triton.flash.blackwell.forward`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import ClassVar, Final

from attnops_triton.flash.blackwell.forward import COLUMNS, ROWS, moved
from attnops_triton.flash.hopper.partitions import Partition, PartitionedWriter, TokenBlock
from attnops_triton.flash.loops import place_by_key, place_by_query
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import KernelSource, SourceWriter, number

# Registers per thread of computing partitions and of partitions of one warp.
_REGISTERS: Final = (240, 24)


class _BackwardWriter(PartitionedWriter):
    """The lines of a kernel.

    Attributes:
        multiplier: lines of the warp that issues all products.
        buffers: the number of buffers of scores.
        columns: columns per computing partition: half of the streamed side of a tile.
        half: writes the half of a tile that a computing partition has.
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
        """Lines that name layouts in which a thread has one row."""
        return (
            f"scores_layout: tl.constexpr = tl.BlockedLayout([1, {self.columns}], [32, 1], [4, 1], [0, 1])",
            f"sums_layout: tl.constexpr = tl.BlockedLayout([1, {COLUMNS}], [32, 1], [4, 1], [0, 1])",
            "row_layout: tl.constexpr = tl.SliceLayout(1, scores_layout)",
            "column_layout: tl.constexpr = tl.SliceLayout(0, scores_layout)",
            "sums_row_layout: tl.constexpr = tl.SliceLayout(1, sums_layout)",
        )

    def share(self) -> None:
        """Also write the allocation of tensor memory, and the barriers for its contents."""
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
        """The partitions, as the module's docstring describes them."""
        computing, small = _REGISTERS
        return [
            Partition("compute", self.computer, 4, computing, halves=2),
            Partition("multiply", self.multiplier, 1, small),
            Partition("load", self.loader, 1, small),
        ]

    def kernel(self, name: str, pointers: list[str], functions: str = "") -> KernelSource:
        """The kernel of all lines. Its partitions use opaque copies of the arguments (`moved`)."""
        # If tiles divide the lengths, the compiler knows that T and S are multiples of 16. Copies would lose that.
        names = [x for x in self.integers if x not in ("T", "S") or not self.tile.even]
        for write in (self.computer, self.multiplier, self.loader):
            used = [x for x in names if any(re.search(rf"\b{x}\b", line) for line in write.lines)]
            write.lines[:0] = [f"    {x} = {moved(x)}" for x in used]
        return super().kernel(name, pointers, functions)

    def operand(self, name: str, half: str | int) -> str:
        """The tensor memory of half of the weights, which is that of ``s``, or of the gradients of scores, that of
        ``dp``.
        """
        many = 4 // self.plan.itemsize
        layout = f"TensorMemoryLayout([{ROWS}, {self.columns}], col_stride=1)"
        shape = f"[{ROWS}, {2 * self.columns * many}]"
        whole = f"{name}_memory.index(0).reinterpret({dtype(self.plan)}, {shape}, {layout})"
        return f"{whole}.slice({half} * {self.columns * many}, {self.columns})"

    def tokens(self) -> None:
        """Write the indices of the held tokens, ``qi`` and ``qx``, or ``ki`` and ``kx``; both halves have all rows."""
        name, short, start = ("kv0", "k", "kv_first") if self.tile.transposed else ("q0", "q", "q_first")
        self.computer(f"{name} = {start}", f"{short}i = {name} + tl.arange(0, {ROWS}, layout=row_layout)")
        self.computer(f"{short}x = {short}i[:, None]")

    def streamed_tokens(self) -> None:
        """Write the indices of the streamed tokens of this half: ``ki`` and ``kx``, or ``qi`` and ``qx``."""
        name, short = ("q0", "q") if self.tile.transposed else ("kv0", "k")
        self.computer(
            f"{short}i = {name} + group * {self.columns} + tl.arange(0, {self.columns}, layout=column_layout)",
            f"{short}x = {short}i[None, :]",
        )

    def load_from(self, name: str, buffer: str = "0") -> str:
        """The load of this partition's half of ``s`` or ``dp``."""
        return f"{name}_memory.index({buffer}).slice(group * {self.columns}, {self.columns}).load(scores_layout)"

    def store_sums(self, outputs: tuple[tuple[TokenBlock, str, str], ...], dtype_of_sums: str) -> None:
        """Write the stores of sums. Each computing partition stores half the columns.

        Args:
            outputs: for each output, its block, the name of the held tile through which it is stored, and source that
                is appended to the sums, such as " * 0.5".
            dtype_of_sums: the dtype of outputs without a tensor map.
        """
        write, D = self.computer, self.plan.D
        write("mbarrier.wait(finished.index(0), 0)")
        for rows, buffer, factor in outputs:
            first, length = ("q_first", "T") if rows.axis == "q" else ("kv_first", "S")
            if not rows.output:
                stride = rows.heads * D
                write(
                    f"token = {first} + tl.arange(0, {ROWS}, layout=sums_row_layout)",
                    f"at = {rows.name}_ptr + b.to(tl.int64) * {length} * {stride} + {rows.head}.to(tl.int64) * {D}",
                    f"at = at + (token.to(tl.int64) * {stride})[:, None] "
                    f"+ (group * {D // 2} + tl.arange(0, {COLUMNS}, layout=tl.SliceLayout(0, sums_layout)))[None, :]",
                )
            for start in range(0, D // 2, COLUMNS):
                part = f"slice(group * {D // 2} + {start}, {COLUMNS}"
                # Without active tiles the sums were never written.
                write(f"sums = tl.where(done > 0, {rows.name}_memory.index(0).{part}).load(sums_layout){factor}, 0.0)")
                if rows.output:
                    write(f"{buffer}_tile.index(0).{part}, 1).store(sums.to({dtype(self.plan)}))", "tl.barrier()")
                else:
                    write(f"tl.store(at + {start}, sums.to({dtype_of_sums}), mask=(token < {length})[:, None])")
        if not outputs[0][0].output:
            return
        write("fence_async_shared()", "mbarrier.arrive(written.index(0))")
        with write.block("if group == 0:"):
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
    writer = _BackwardWriter(plan, tiles, operands, schedule, held, streamed, stored, buffers=2)
    programs = place_by_query(writer, plan, tiles.bq)
    writer(f"q_first = row * {tiles.bq}")
    writer.share()
    writer.load_held()
    writer.load_streamed()
    _multiply(writer, ("q", "d_out"), ("k", "v"), "dq", "")
    write, half = writer.computer, writer.half
    write(*writer.layouts)
    writer.tokens()
    half.load_values("", False)
    half.load_values("q", not half.even)
    half.load_statistics(not half.even)
    writer.find_tiles(write)
    write("done = 0")
    writer.loop(write, 0, lambda masked: _query_step(writer, masked))
    writer.store_sums(((dq, "q", f" * {number(float(plan.scale))}"),), f"tl.{plan.gradient_dtype}")
    return writer, programs


def _query_step(writer: _BackwardWriter, masked: bool) -> None:
    write, half = writer.computer, writer.half
    edge = masked and not half.even
    writer.streamed_tokens()
    half.load_values("kv", edge)
    write("mbarrier.wait(s_ready.index(done % 2), done // 2 & 1)", f"s = {writer.load_from('s', 'done % 2')}")
    has_ok = recompute_weights(half, masked, edge)
    write("mbarrier.wait(dp_ready.index(0), done & 1)", f"dp = {writer.load_from('dp')}")
    _finish_step(writer, has_ok, subtract=True)


def _finish_step(writer: _BackwardWriter, has_ok: bool, subtract: bool) -> None:
    write, half = writer.computer, writer.half
    score_gradients(half, has_ok, subtract=subtract)
    half.cap_and_bias_vjp()
    write(
        f"{writer.operand('dp', 'group')}.store(ds.to({dtype(writer.plan)}))",
        "mbarrier.arrive(ds_ready.index(group))",
        "done = done + 1",
    )


def write_by_key(
    plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, padded: int
) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel for dk and dv and the size of its grid, for the operands of
    `attnops_triton.flash.backward`.

    The operand ``statistics``, [B, H, 2, padded], has the logsumexp to base 2 in one term, and delta, both padded to
    whole tiles of queries.
    """
    tiles, D = plan.by_key, plan.D
    held = tuple(TokenBlock(name, "kv", plan.K, "k", D, ROWS) for name in ("k", "v"))
    streamed = tuple(TokenBlock(name, "q", plan.H, "h", D, tiles.bq) for name in ("q", "d_out"))
    by_map = plan.gradient_dtype == plan.dtype and not plan.splits_groups
    heads, head, sums = (plan.H, "h", "float32") if plan.splits_groups else (plan.K, "k", plan.gradient_dtype)
    dk, dv = (TokenBlock(name, "kv", heads, head, D, ROWS, output=by_map) for name in ("dk", "dv"))
    stored = (dk, dv) if by_map else ()
    writer = _BackwardWriter(plan, tiles, operands, schedule, held, streamed, stored, buffers=1)
    programs = place_by_key(writer, plan, tiles.bk)
    writer(f"kv_first = row * {tiles.bk}", f"heads_first = k * {plan.G}")
    writer.share()
    share_statistics(writer, padded)
    writer.load_held()
    with writer.heads(writer.loader):
        writer.load_streamed()
    _multiply(writer, ("k", "v"), ("q", "d_out"), "dk", "dv")
    write = writer.computer
    write(*writer.layouts)
    writer.tokens()
    write("done = 0", "stage = 0", "phase = 0")
    with writer.heads(write):
        if not writer.flat:
            _load_of_head(writer)
        writer.find_tiles(write)
        writer.loop(write, 0, lambda masked: _key_step(writer, masked))
    outputs = ((dk, "k", f" * {number(float(plan.scale))}"), (dv, "v", ""))
    writer.store_sums(outputs, f"tl.{sums}")
    return writer, programs


def _load_of_head(writer: _BackwardWriter) -> None:
    writer.half.load_values("", False)
    writer.half.load_values("kv", not writer.half.even)


def _key_step(writer: _BackwardWriter, masked: bool) -> None:
    write, half = writer.computer, writer.half
    if writer.flat:
        _load_of_head(writer)
    writer.streamed_tokens()
    half.load_values("q", masked and not half.even)
    part = f"slice(group * {writer.columns}, {writer.columns}, 1).load(scores_layout)"
    writer.wait("q")
    write(f"lse = statistics_tile.index(stage).slice(0, 1, 0).{part}")
    write("mbarrier.wait(s_ready.index(0), done & 1)", f"s = {writer.load_from('s')}")
    has_ok = recompute_weights(half, masked, False, lse="lse")
    write(f"{writer.operand('s', 'group')}.store(p.to({dtype(writer.plan)}))", "mbarrier.arrive(w_ready.index(group))")
    write(f"delta = statistics_tile.index(stage).slice(1, 1, 0).{part}")
    write("mbarrier.wait(dp_ready.index(0), done & 1)", f"dp = {writer.load_from('dp')} - delta")
    _finish_step(writer, has_ok, subtract=False)
    writer.advance(write)


def _multiply(
    writer: _BackwardWriter, held: tuple[str, str], streamed: tuple[str, str], by_scores: str, by_weights: str
) -> None:
    """Write the products of all tiles.

    The products of a tile's score gradients are issued after the product for the next tile's scores, whose operands are
    ready sooner.

    Args:
        writer: the kernel's lines.
        held: names of the held operands of the products ``s`` and ``dp``.
        streamed: names of their streamed operands. The gradients of scores are multiplied by the operand of ``s``, the
            weights by that of ``dp``.
        by_scores: the output to which products of the gradients of scores are added.
        by_weights: the output to which products of the weights are added; empty for none.
    """
    write, for_scores, for_weights = writer.multiplier, *streamed

    def whole(name: str, buffer: str, held_name: str, streamed_name: str, *barriers: str) -> None:
        write(
            f"mbarrier.wait({streamed_name}_ready.index(stage), phase)",
            f"tcgen05_mma({held_name}_tile.index(0), {streamed_name}_tile.index(stage).permute([1, 0]), "
            f"{name}_memory.index({buffer}), use_acc=False, "
            f"mbarriers=[{', '.join((f'{name}_ready.index({buffer})', *barriers))}])",
        )

    def halves(name: str, streamed_name: str, stage: str, sums: str, turn: str, ready: str) -> None:
        for half in range(2):
            write(
                f"mbarrier.wait({ready}_ready.index({half}), {turn} & 1)",
                f"tcgen05_mma({writer.operand(name, half)}, "
                f"{streamed_name}_tile.index({stage}).slice({half * writer.columns}, {writer.columns}, 0), "
                f"{sums}_memory.index(0), use_acc={'True' if half else f'{turn} > 0'}, "
                f"mbarriers=[{streamed_name}_free.index({stage})])",
            )

    write("stage = 0", "phase = 0", "before = 0", "done = 0", "mbarrier.wait(held.index(0), 0)")
    with writer.heads(write) if writer.tile.transposed else contextlib.nullcontext():
        writer.find_tiles(write)
        with write.block(f"for t in range(0, count{f' * {writer.plan.G}' if writer.flat else ''}):"):
            whole("s", f"done % {writer.buffers}", held[0], for_scores)
            with write.block("if done > 0:"):
                halves("dp", for_scores, "before", by_scores, "(done - 1)", "ds")
            free = () if by_weights else (f"{for_weights}_free.index(stage)",) * 2
            whole("dp", "0", held[1], for_weights, *free)
            if by_weights:
                halves("s", for_weights, "stage", by_weights, "done", "w")
            write("before = stage", "done = done + 1")
            writer.advance(write)
    with write.block("if done > 0:"):
        halves("dp", for_scores, "before", by_scores, "(done - 1)", "ds")
    write("tcgen05_commit(finished.index(0))")


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
