"""Kernels with three partitions of warps: two compute half of the program's rows each, and one loads tiles for both.

The loader copies tiles to a ring of buffers in shared memory by tensor maps (TMA). A buffer has two barriers:
``ready``, when it has been written, and ``free``, when both computing partitions have read it. The computing partitions
get the registers that the loader does not need.

Variables of all partitions, besides those of `attnops_triton.flash.tile`:
- ``count``: the number of active tiles of a row, of which the PARTIAL ones come first; ``partials``: the number of
  these;
- ``stage``, ``phase``: the index of the current buffer of the ring, and the parity of its barriers;
- ``group``: 0 or 1, the computing partition: which half of the program's rows it has, or, in Blackwell's backward
  kernels, which half of a tile's columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp

from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import FlashPlan, TileSizes
from attnops_triton.flash.tile import TileWriter
from attnops_triton.flash.tile_schedule import TileSchedule
from attnops_triton.language.source import KernelSource, SourceWriter

# Rows per computing partition: those of one tensor core instruction of four warps on Hopper.
ROWS: Final = 64
# Registers per thread of computing partitions and of the loader.
_REGISTERS: Final = (240, 24)
_MAP: Final = 128  # bytes of a tensor map


class TokenBlock(NamedTuple):
    """Blocks of tokens of an array [B, length, heads, dim] that a tensor map copies.

    Attributes:
        name: prefix of the variables' names; ``name_ptr`` is the array.
        axis: "q" or "kv".
        heads: number of heads.
        head: the variable of the head's index.
        dim: D or Dv.
        block: tokens per copy.
        output: whether a tensor map stores it, rather than loads it.
    """

    name: str
    axis: str
    heads: int
    head: str
    dim: int
    block: int
    output: bool = False


class Partition(NamedTuple):
    """A group of warps.

    Attributes:
        role: part of its function's name.
        write: its lines; a partition without lines is left out.
        warps: the number of its warps.
        registers: registers per thread.
        halves: 2 for two such partitions with half of the program's rows each, whose functions have the argument
            ``group``; 0 for one partition.
    """

    role: str
    write: SourceWriter
    warps: int
    registers: int
    halves: int = 0


class PartitionedWriter(SourceWriter):
    """The lines of a kernel with three partitions. Lines written to this object itself run before the warps are
    partitioned.

    Attributes:
        rows: the rows of a computing partition.
        copies: rows per program divided by ``rows``.
        loader: lines of the partition that loads.
        adder: lines of the partition that adds sums to memory; a partition without lines is left out.
        computer: lines of the computing partitions.
        tile: writes a partition's tile; transposed if keys are held.
        plan: the plan of the call.
        stages: the stages of the ring.
        held: the arrays that a computing partition keeps for all tiles, ``rows`` rows of each.
        streamed: the arrays that are loaded for each tile, in the order of use.
        stored: outputs that are copied by tensor maps.
        maps: the number of tensor maps that a program creates.
        companions: by name of a streamed array, the code of a second copy into the same stage of the ring, and its
            bytes.
        schedule: the active tiles.
    """

    rows: ClassVar[int] = ROWS
    copies: ClassVar[int] = 2

    def __init__(
        self, plan: FlashPlan, tiles: TileSizes, operands: Sequence[Operand], schedule: TileSchedule,
        held: tuple[TokenBlock, ...], streamed: tuple[TokenBlock, ...], stored: tuple[TokenBlock, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        self.loader, self.computer, self.adder = SourceWriter(), SourceWriter(), SourceWriter()
        self.loader.integers = self.computer.integers = self.adder.integers = self.integers
        transposed = held[0].axis == "kv"
        tile = TileWriter.make(self.computer, plan, tiles, operands, transposed)
        bq, bk = (tile.bq, self.rows) if transposed else (self.rows, tile.bk)
        self.tile = dataclasses.replace(tile, bq=bq, bk=bk)
        self.plan, self.stages, self.schedule = plan, tiles.stages, schedule
        self.held, self.streamed, self.stored = held, streamed, stored
        self.maps = len(held) + len(streamed) + len(stored)
        self.companions: dict[str, tuple[str, int]] = {}

    def scratch(self, programs: int) -> jax.ShapeDtypeStruct:
        """The last output, ``scratch``: memory for the tensor maps of all programs."""
        return jax.ShapeDtypeStruct((programs * self.maps * _MAP,), jnp.int8)

    @property
    def _type(self) -> str:
        return f"tl.{self.plan.dtype}"

    @property
    def layouts(self) -> tuple[str, ...]:
        """Lines that name the layouts of scores, of their rows and columns, and of products with a head dim."""
        columns = self.tile.bq if self.tile.transposed else self.tile.bk
        dim = self.held[0].dim
        return (
            f"scores_layout: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {columns}, 16])",
            f"sums_layout: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {dim}, 16])",
            "row_layout: tl.constexpr = tl.SliceLayout(1, scores_layout)",
            "column_layout: tl.constexpr = tl.SliceLayout(0, scores_layout)",
            "sums_row_layout: tl.constexpr = tl.SliceLayout(1, sums_layout)",
            "weights_layout: tl.constexpr = tl.DotOperandLayout(0, sums_layout, 2)",
        )

    def share(self) -> None:
        """Write tensor maps, buffers and barriers."""
        write = self
        for rows in (*self.held, *self.streamed, *self.stored):
            length, stride = "T" if rows.axis == "q" else "S", rows.heads * rows.dim
            batch = "b" if rows.output else f"(b * {self.tile.batched[rows.name]})"
            write(
                f"{rows.name}_layout: tl.constexpr = "
                f"tl.NVMMASharedLayout.get_default_for([{rows.block}, {rows.dim}], {self._type})",
                f"{rows.name}_map = tma.make_tensor_descriptor({rows.name}_ptr + {batch}.to(tl.int64) * {length} * "
                f"{stride}, [{length}, {stride}], [{stride}, 1], [{rows.block}, {rows.dim}], {rows.name}_layout)",
            )
        for rows, copies in (*((x, self.copies) for x in self.held), *((x, self.stages) for x in self.streamed)):
            write(
                f"{rows.name}_tile = tl.allocate_shared_memory({self._type}, [{copies}, {rows.block}, {rows.dim}], "
                f"{rows.name}_layout)"
            )
        self.barriers("held", self.copies, 1)
        for rows in self.streamed:
            self.barriers(f"{rows.name}_ready", self.stages, 1)
            self.barriers(f"{rows.name}_free", self.stages, 2)

    def barriers(self, name: str, copies: int, arrivals: int) -> None:
        """Write ``copies`` barriers, each with ``arrivals`` arrivals per phase."""
        self(f"{name} = mbarrier.allocate_mbarrier(batch={copies})")
        with self.block(f"for i in tl.static_range({copies}):"):
            self(f"mbarrier.init({name}.index(i), count={arrivals})")

    def find_tiles(self, write: SourceWriter) -> None:
        """Write ``count`` and ``partials`` of ``row``, for ``b`` and ``h``."""
        schedule = self.schedule
        if schedule.constant is not None:
            full_start, full_stop, partial_start, partial_stop = schedule.constant
            write.integer("full_start", full_start)
            write.integer("partial_start", partial_start)
            write.integer("partials", partial_stop - partial_start)
            write.integer("count", full_stop - full_start + partial_stop - partial_start)
            return
        by_batch = write.integer("map_batch", schedule.map_shape[1] * (schedule.map_shape[0] > 1))
        map_index = f"b * {by_batch}" + " + h" * (schedule.map_shape[1] > 1)
        write(f"map_row = ({map_index}) * {write.integer('rows', schedule.rows)} + row")
        if schedule.columns is not None:
            write(f"columns_at = columns_ptr + map_row.to(tl.int64) * {write.integer('width', schedule.width)}")
        for i, name in enumerate(("full_start", "full_stop", "partial_start", "partial_stop")):
            write(f"{name} = tl.load(ranges_ptr + map_row * 4 + {i})")
        write("partials = partial_stop - partial_start", "count = full_stop - full_start + partials")

    @property
    def has_partial(self) -> bool:
        """Whether some tiles may be PARTIAL."""
        return self.schedule.constant is None or not self.tile.even

    def place_tile(self, write: SourceWriter, masked: bool | None) -> None:
        """Write the first token of the tile at index ``t``, and in a flat loop the index ``h`` of its head.

        Args:
            write: the partition's lines.
            masked: whether the tile is PARTIAL; None if it may be PARTIAL or FULL.
        """
        first, block = ("q0", self.tile.bq) if self.tile.transposed else ("kv0", self.tile.bk)
        if self.flat:
            start, G = "partial_start" if masked else "full_start", self.plan.G
            write(f"h = heads_first + t % {G}", f"i = {start} + t // {G}")
        elif masked is None:
            write("i = tl.where(t < partials, partial_start + t, full_start + t - partials)")
        else:
            write(f"i = {'partial_start + t' if masked else 'full_start + t - partials'}")
        column = "i" if self.schedule.columns is None else "tl.load(columns_at + i)"
        write(f"{first} = {column} * {block}")

    @property
    def flat(self) -> bool:
        """Whether one loop iterates over both the tiles and the query heads of a kv head, which need equal tiles."""
        shared = self.schedule.map_shape[1] == 1 and not self.plan.splits_groups
        return self.tile.transposed and self.plan.G > 1 and shared

    def loop(self, write: SourceWriter, start: int, body: Callable[[bool], None]) -> None:
        """Write the loops over the tiles from index ``start`` on, PARTIAL ones first.

        ``body`` writes the code of a tile; its argument is whether the tile is PARTIAL.
        """
        if self.flat:
            ranges = (f"0, partials * {self.plan.G}", f"0, (count - partials) * {self.plan.G}")
        else:
            at_least = f"tl.maximum(partials, {start})" if start and self.has_partial else "partials"
            ranges = (f"{start}, partials", f"{at_least if self.has_partial else start}, count")
        for masked, bounds in zip((True, False), ranges, strict=True):
            if masked <= self.has_partial:
                with write.block(f"for t in range({bounds}):"):
                    self.place_tile(write, masked)
                    body(masked)

    @contextlib.contextmanager
    def heads(self, write: SourceWriter) -> Iterator[None]:
        """Write the loop over the query heads ``h`` of a kv head, unless `flat`; the block is its body."""
        if self.flat or self.plan.splits_groups:
            yield
            return
        with write.block(f"for g in range(0, {self.plan.G}):") if self.plan.G > 1 else contextlib.nullcontext():
            write(f"h = k * {self.plan.G} + g" if self.plan.G > 1 else "h = k")
            yield

    def load_held(self) -> None:
        """Write the copies of the arrays that the computing partitions hold."""
        write = self.loader
        size = sum(rows.block * rows.dim for rows in self.held) * self.plan.itemsize
        with write.block(f"for half in tl.static_range({self.copies}):"):
            write(f"mbarrier.expect(held.index(half), {size})")
            for rows in self.held:
                start = "q_first" if rows.axis == "q" else "kv_first"
                write(
                    f"tma.async_load({rows.name}_map, [{start} + half * {self.rows}, {rows.head} * {rows.dim}], "
                    f"held.index(half), {rows.name}_tile.index(half))"
                )
        write("stage = 0", "phase = 1")

    def load_streamed(self) -> None:
        """Write the loop that copies all tiles to the ring."""
        write = self.loader
        self.find_tiles(write)
        self.loop(write, 0, self.load)

    def load(self, masked: bool) -> None:
        """Write the copies of a tile to the ring."""
        write = self.loader
        for rows in self.streamed:
            first = "q0" if rows.axis == "q" else "kv0"
            companion, size = self.companions.get(rows.name, ("", 0))
            size += rows.block * rows.dim * self.plan.itemsize
            write(
                f"mbarrier.wait({rows.name}_free.index(stage), phase)",
                f"mbarrier.expect({rows.name}_ready.index(stage), {size})",
                *[companion] * bool(companion),
                f"tma.async_load({rows.name}_map, [{first}, {rows.head} * {rows.dim}], "
                f"{rows.name}_ready.index(stage), {rows.name}_tile.index(stage))",
            )
        self.advance(write)

    def advance(self, write: SourceWriter) -> None:
        """Write the step to the next buffer of the ring."""
        write("stage = stage + 1")
        with write.block(f"if stage == {self.stages}:"):
            write("stage = 0", "phase = phase ^ 1")

    def wait(self, name: str, stage: str = "stage", phase: str = "phase") -> None:
        """Write the wait for a streamed tile."""
        self.computer(f"mbarrier.wait({name}_ready.index({stage}), {phase})")

    def release(self, name: str, stage: str = "stage") -> None:
        """Write the arrival that says: this partition has read a streamed tile."""
        self.computer(f"mbarrier.arrive({name}_free.index({stage}))")

    def multiply(self, name: str, a: str, b: str, add: bool) -> None:
        """Write a product that runs asynchronously until `finish`."""
        sums = f"{name}, " if add else "zeros, use_acc=False, "
        self.computer(f"{name} = warpgroup_mma({a}, {b}, {sums}is_async=True)")

    def finish(self, name: str, running: int, *kept: str) -> None:
        """Write the wait until at most ``running`` products are unfinished.

        ``kept`` are operands that must stay in registers until then.
        """
        if kept:
            names = ", ".join((name, *kept))
            self.computer(f"{names} = warpgroup_mma_wait({running}, deps=[{names}])")
        else:
            self.computer(f"{name} = warpgroup_mma_wait({running}, deps=[{name}])")

    def tokens(self) -> None:
        """Write the indices of the held tokens: ``qi`` and ``qx``, or ``ki`` and ``kx``."""
        name, short, start = ("kv0", "k", "kv_first") if self.tile.transposed else ("q0", "q", "q_first")
        self.computer(f"{name} = {start} + group * {self.rows}")
        self.computer(f"{short}i = {name} + tl.arange(0, {self.rows}, layout=row_layout)")
        self.computer(f"{short}x = {short}i[:, None]")

    def streamed_tokens(self) -> None:
        """Write the indices of the streamed tokens of a tile: ``ki`` and ``kx``, or ``qi`` and ``qx``."""
        name, short, block = ("q0", "q", self.tile.bq) if self.tile.transposed else ("kv0", "k", self.tile.bk)
        self.computer(
            f"{short}i = {name} + tl.arange(0, {block}, layout=column_layout)", f"{short}x = {short}i[None, :]"
        )

    def zeros(self) -> None:
        """Write ``zeros``, the initial sums of products, which give them their type."""
        shape = f"[{self.tile.bk}, {self.tile.bq}]" if self.tile.transposed else f"[{self.tile.bq}, {self.tile.bk}]"
        self.computer(f"zeros = tl.full({shape}, 0.0, tl.float32, scores_layout)")

    def store(self, rows: TokenBlock, values: str, dtype: str, buffer: str, factor: str = "") -> None:
        """Write the store of sums [ROWS, dim]: by a tensor map through ``buffer`` if ``rows.output``, else by pointers.

        Args:
            rows: the output.
            values: the variable.
            dtype: the dtype of the output.
            buffer: name of a held tile that is not read any more.
            factor: a number that the sums are multiplied by, as source; empty for 1.
        """
        write = self.computer
        first, length = ("q_first", "T") if rows.axis == "q" else ("kv_first", "S")
        if factor:
            write(f"{values} = {values} * {factor}")
        if rows.output:
            write(f"{buffer}_tile.index(group).store({values}.to({self._type}))", "fence_async_shared()")
            copy = (
                f"tma.async_store({rows.name}_map, [{first} + {{half}} * {ROWS}, {rows.head} * {rows.dim}], "
                f"{buffer}_tile.index({{half}}))"
            )
            if not self.adder.lines:
                write(copy.format(half="group"))
                return
            # The computing partitions have too few registers for stores.
            self.barriers(f"{rows.name}_done", 2, 1)
            write(f"mbarrier.arrive({rows.name}_done.index(group))")
            with self.adder.block("for half in tl.static_range(2):"):
                self.adder(f"mbarrier.wait({rows.name}_done.index(half), 0)", copy.format(half="half"))
            return
        stride = rows.heads * rows.dim
        write(
            f"token = {first} + group * {ROWS} + tl.arange(0, {ROWS}, layout=sums_row_layout)",
            f"at = {rows.name}_ptr + b.to(tl.int64) * {length} * {stride} + {rows.head}.to(tl.int64) * {rows.dim}",
            f"at = at + (token.to(tl.int64) * {stride})[:, None] "
            f"+ tl.arange(0, {rows.dim}, layout=tl.SliceLayout(0, sums_layout))[None, :]",
            f"tl.store(at, {values}.to({dtype}), mask=(token < {length})[:, None])",
        )

    def partitions(self) -> list[Partition]:
        """All partitions. The first gets the registers that the others leave."""
        computing, loading = _REGISTERS
        return [
            Partition("compute", self.computer, 4, computing, halves=2),
            Partition("load", self.loader, 1, loading),
            Partition("add", self.adder, 1, loading),
        ]

    def kernel(self, name: str, pointers: list[str], functions: str = "") -> KernelSource:
        """The kernel of all lines; the last pointer is ``scratch_ptr``."""
        if any("tma.async_store" in line for line in self.computer.lines):
            self.computer("tma.store_wait(0)")
        calls: list[str] = []
        warps: list[int] = []
        registers: list[int] = []
        variables = dict.fromkeys((*pointers, *self.integers, *_assigned(self.lines)))
        for part in self.partitions():
            if not part.write.lines:
                continue
            text = "\n".join(part.write.lines)
            used = [x for x in variables if re.search(rf"\b{x}\b", text)]
            halves = [[str(half)] for half in range(part.halves)] or [[]]
            arguments = ", ".join([*["group"] * bool(part.halves), *used])
            functions += f"def {name}_{part.role}({arguments}):\n{text}\n\n\n"
            calls += [f"({name}_{part.role}, ({', '.join([*half, *used])},))" for half in halves]
            warps += [part.warps] * len(halves)
            registers += [part.registers] * len(halves)
        self(f"tl.warp_specialize([{', '.join(calls)}], {warps[1:]}, {registers[1:]})")
        kernel = super().kernel(name, pointers, functions)
        return dataclasses.replace(kernel, gluon=True, scratch=self.maps * _MAP)


def _assigned(lines: list[str]) -> list[str]:
    """The variables that lines assign, except loop variables and constants."""
    names = (re.match(r"    (\w+) = ", line) for line in lines)
    return list(dict.fromkeys(match[1] for match in names if match))
