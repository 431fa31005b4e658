"""The forward kernel for Blackwell, as in FlashAttention-4 and in Triton's examples of Gluon.

A program has two tiles of 128 queries and five partitions: one loads, one issues all products, two compute the weights
of one tile each, and one rescales the sums of both tiles when the maximum changes. Scores, weights and sums are in
tensor memory, where the weights of a tile overwrite its scores. The products of one tile run while the weights of the
other are computed.

Products run in the order in which they are issued. So when scores are ready, the product of weights and values that was
issued before has finished too: its sums may be rescaled, and the weights that it read may be overwritten.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final

from attnops_triton.flash.hopper.partitions import Partition, PartitionedWriter, TokenBlock
from attnops_triton.flash.loops import place_by_query
from attnops_triton.flash.operands import Operand, base
from attnops_triton.flash.plan import LOG2E, FlashPlan
from attnops_triton.flash.steps import write_denominator
from attnops_triton.flash.tile import dtype
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import SourceWriter, number

# Queries per tile: the rows of tensor memory.
ROWS: Final = 128
# Columns of sums that a thread loads at once.
COLUMNS: Final = 32
# Registers per thread of computing partitions and of partitions of one warp.
_REGISTERS: Final = (200, 24)


class _ForwardWriter(PartitionedWriter):
    """The lines of the kernel.

    Attributes:
        multiplier: lines of the warp that issues all products.
        corrector: lines of the partition that rescales sums.
    """

    rows: ClassVar[int] = ROWS

    def __init__(
        self, plan: FlashPlan, operands: list[Operand], schedule: TileSchedule, *rows: tuple[TokenBlock, ...]
    ) -> None:
        super().__init__(plan, plan.forward, operands, schedule, *rows)
        self.multiplier, self.corrector = SourceWriter(), SourceWriter()
        self.multiplier.integers = self.corrector.integers = self.integers

    @property
    def layouts(self) -> tuple[str, ...]:
        """Lines that name layouts in which a thread has one row of scores, or of sums."""
        return (
            f"scores_layout: tl.constexpr = tl.BlockedLayout([1, {self.tile.bk}], [32, 1], [4, 1], [0, 1])",
            f"sums_layout: tl.constexpr = tl.BlockedLayout([1, {COLUMNS}], [32, 1], [4, 1], [0, 1])",
            "row_layout: tl.constexpr = tl.SliceLayout(1, scores_layout)",
            "column_layout: tl.constexpr = tl.SliceLayout(0, scores_layout)",
            "sums_row_layout: tl.constexpr = tl.SliceLayout(1, sums_layout)",
        )

    def share(self) -> None:
        """Also write the allocation of tensor memory, and the buffers and barriers between computing partitions and
        corrector.

        ``w_ready`` has two arrivals: the weights have been written, and the sums have been rescaled for them.
        """
        super().share()
        for name, columns in (("s", self.tile.bk), ("acc", self.plan.D)):
            self(
                f"{name}_layout: tl.constexpr = TensorMemoryLayout([{ROWS}, {columns}], col_stride=1)",
                f"{name}_memory = allocate_tensor_memory(tl.float32, [2, {ROWS}, {columns}], {name}_layout)",
            )
        self("statistics_layout: tl.constexpr = tl.SwizzledSharedLayout(1, 1, 1, [0])")
        for name in ("alpha", "m", "l"):
            self(f"{name}_tile = tl.allocate_shared_memory(tl.float32, [2, {ROWS}], statistics_layout)")
        self.barriers("alpha_ready", 2, 1)
        self.barriers("ml_ready", 2, 1)
        self.barriers("s_ready", 2, 1)
        self.barriers("w_ready", 2, 2)
        self.barriers("done", 2, 1)

    def partitions(self) -> list[Partition]:
        """The partitions, as the module's docstring describes them; the first is the corrector."""
        computing, small = _REGISTERS
        return [
            Partition("correct", self.corrector, 4, 0),
            Partition("compute", self.computer, 4, computing, halves=2),
            Partition("multiply", self.multiplier, 1, small),
            Partition("load", self.loader, 1, small),
        ]

    def weights(self, half: str) -> str:
        """The tensor memory of the weights of tile ``half``, which is that of its scores."""
        bk, many = self.tile.bk, 4 // self.plan.itemsize
        layout = f"TensorMemoryLayout([{ROWS}, {bk}], col_stride=1)"
        shape = f"[{ROWS}, {bk * many}]"
        return f"s_memory.index({half}).reinterpret({dtype(self.plan)}, {shape}, {layout}).slice(0, {bk})"


def write_forward(plan: FlashPlan, operands: list[Operand], schedule: TileSchedule) -> tuple[PartitionedWriter, int]:
    """The lines of the kernel and the size of its grid, for the operands of `attnops_triton.flash.forward.forward`."""
    tiles, D = plan.forward, plan.D
    q = TokenBlock("q", "q", plan.H, "h", D, ROWS)
    k, v = (TokenBlock(name, "kv", plan.K, "k", D, tiles.bk) for name in ("k", "v"))
    out = TokenBlock("out", "q", plan.H, "h", D, ROWS, output=True)
    writer = _ForwardWriter(plan, operands, schedule, (q,), (k, v), (out,))
    programs = place_by_query(writer, plan, tiles.bq)
    writer(f"q_first = row * {tiles.bq}")
    writer.find_tiles(writer)
    if schedule.constant is not None:
        for name in ("full_start", "partial_start", "partials", "count"):
            writer(f"{name} = {moved(name)}")
    writer.share()
    writer.load_held()
    writer.loop(writer.loader, 0, writer.load)
    _multiply(writer)
    _compute(writer)
    _correct(writer)
    return writer, programs


def moved(name: str) -> str:
    """Source of an opaque copy of a number. The compiler can't move what depends on it out of a loop or a partition,
    where it would be spilled.
    """
    return f'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [{name}], tl.int32, False, 1)'


def _multiply(writer: _ForwardWriter) -> None:
    """Write the products of all tiles of keys. The scores of a tile follow the previous tile's weights times values."""
    write = writer.multiplier

    def scores(half: int) -> None:
        write(
            f"tcgen05_mma(q_tile.index({half}), k_tile.index(stage).permute([1, 0]), s_memory.index({half}), "
            f"use_acc=False, mbarriers=[s_ready.index({half}), k_free.index(stage)])"
        )

    def values(half: int, stage: str, adds: str, barriers: str) -> None:
        write(
            f"mbarrier.wait(w_ready.index({half}), phase_of_weights)",
            f"tcgen05_mma({writer.weights(str(half))}, v_tile.index({stage}), acc_memory.index({half}), "
            f"use_acc={adds}, mbarriers=[{barriers}])",
        )

    write("stage = 0", "phase = 0", "phase_of_weights = 0", "mbarrier.wait(held.index(0), 0)")
    write("mbarrier.wait(held.index(1), 0)")
    with write.block("if count > 0:"):
        write("mbarrier.wait(k_ready.index(stage), phase)")
        scores(0)
        scores(1)
        with write.block("for t in range(1, count):"):
            write("before = stage", "phase_before = phase")
            writer.advance(write)
            write("mbarrier.wait(k_ready.index(stage), phase)", "mbarrier.wait(v_ready.index(before), phase_before)")
            for half in range(2):
                values(half, "before", "t > 1", "v_free.index(before)")
                scores(half)
            write("phase_of_weights = phase_of_weights ^ 1")
        write("mbarrier.wait(v_ready.index(stage), phase)")
        for half in range(2):
            values(half, "stage", "count > 1", f"done.index({half})")
    with write.block("else:"):
        write("mbarrier.arrive(done.index(0))", "mbarrier.arrive(done.index(1))")


def _compute(writer: _ForwardWriter) -> None:
    """Write the weights of all tiles of keys, and ``m`` and ``l``."""
    write, tile = writer.computer, writer.tile
    write(*writer.layouts)
    writer.tokens()
    tile.load_values("", False)
    tile.load_values("q", not tile.even)
    write(
        f'm = tl.full([{ROWS}], float("-inf"), tl.float32, row_layout)',
        f"l = tl.full([{ROWS}], 0.0, tl.float32, row_layout)",
        f"weights = {writer.weights('group')}",
        "phase = 0",
    )
    writer.loop(write, 0, lambda masked: _step(writer, masked))
    write("m_tile.index(group).store(m)", "l_tile.index(group).store(l)", "mbarrier.arrive(ml_ready.index(group))")


def _step(writer: _ForwardWriter, masked: bool) -> None:
    """Write the weights of a tile and the updates of ``m`` and ``l``. ``alpha`` comes first, since the corrector waits
    for it.
    """
    write, tile, plan = writer.computer, writer.tile, writer.plan
    writer.streamed_tokens()
    write("mbarrier.wait(s_ready.index(group), phase)", "s = s_memory.index(group).load(scores_layout)")
    tile.load_values("kv", masked and not tile.even)
    tile.apply_cap_and_bias()
    if masked:
        write(f"qx = {moved('qx')}")
    if masked and tile.allowed(not tile.even):
        write('s = tl.where(ok, s, float("-inf"))')
    write("m_new = tl.maximum(m, tl.reduce(s, 1, largest))")
    # If all scores so far are masked, m_new is −inf, and −inf − −inf would be NaN.
    write('base = tl.where(m_new == float("-inf"), 0.0, m_new)' if masked else "base = m_new")
    write(
        f"alpha = tl.exp2((m - base) * {number(plan.score_unit * LOG2E)})",
        "alpha_tile.index(group).store(alpha)",
        "mbarrier.arrive(alpha_ready.index(group))",
    )
    tile.weights("base")
    write(
        "l = l * alpha + tl.reduce(p, 1, total)",
        f"weights.store(p.to({dtype(plan)}))",
        "mbarrier.arrive(w_ready.index(group))",
        "m = m_new",
        "phase = phase ^ 1",
    )


def _correct(writer: _ForwardWriter) -> None:
    """Write the rescaling of both tiles' sums, for each tile of keys but the first, and the stores of the outputs."""
    write, plan = writer.corrector, writer.plan
    tile = dataclasses.replace(writer.tile, write=write)
    write(*writer.layouts)
    write("phase = 0")
    with write.block("for t in range(0, count):"):
        with write.block("for half in tl.static_range(2):"):
            write("mbarrier.wait(alpha_ready.index(half), phase)")
            with write.block("if t > 0:"):
                write("alpha = alpha_tile.index(half).load(sums_row_layout)")
                for start in range(0, plan.D, COLUMNS):
                    write(
                        f"acc = acc_memory.index(half).slice({start}, {COLUMNS})",
                        "acc.store(acc.load(sums_layout) * alpha[:, None])",
                    )
            write("mbarrier.arrive(w_ready.index(half))")
        write("phase = phase ^ 1")
    with write.block("for half in tl.static_range(2):"):
        write(
            "mbarrier.wait(ml_ready.index(half), 0)",
            "m = m_tile.index(half).load(sums_row_layout)",
            "l = l_tile.index(half).load(sums_row_layout)",
        )
        write_denominator(tile)
        write(f"qi = q_first + half * {ROWS} + tl.arange(0, {ROWS}, layout=sums_row_layout)")
        masked = "" if tile.even else ", mask=qi < T"
        write(f'tl.store({base(write, "m_out", "", plan.H, "T")} + qi, tl.where(seen, m, float("-inf")){masked})')
        write(f"tl.store({base(write, 'log2_sum_out', '', plan.H, 'T')} + qi, tl.log2(l){masked})")
        write("mbarrier.wait(done.index(half), 0)")
        for start in range(0, plan.D, COLUMNS):
            write(
                f"acc = acc_memory.index(half).slice({start}, {COLUMNS})",
                # Without active tiles the sums were never written.
                "sums = tl.where(count > 0, acc.load(sums_layout) * factor[:, None], 0.0)",
                f"q_tile.index(half).slice({start}, {COLUMNS}, 1).store(sums.to({dtype(plan)}))",
                # Otherwise the assembler loads all columns first, and spills.
                "tl.barrier()",
            )
        write(
            "fence_async_shared()",
            f"tma.async_store(out_map, [q_first + half * {ROWS}, h * {plan.D}], q_tile.index(half))",
        )
    write("tma.store_wait(0)")
