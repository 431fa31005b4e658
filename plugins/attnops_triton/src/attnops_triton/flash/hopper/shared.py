"""What the kernels with partitions of warps share: their options, tensor maps, rings, loops over tiles, and the loader.

Two partitions compute half of a program's rows each, and one loads tiles for both. The loader copies tiles to rings of
buffers in shared memory by tensor maps (TMA). A buffer has two barriers: ``ready``, when it has been written, and
``free``, when it has been read. The computing partitions get the registers that the loader does not need.

Parameters of many functions, besides those of `attnops_triton.flash.kernels`:
- ``stage``, ``phase``: the index of the current buffer of the rings, and the parity of its barriers;
- ``group``: 0 or 1, the computing partition: which half of the program's rows it has, or, in Blackwell's backward
  kernels, which half of a tile's columns;
- ``masked``: whether a tile is PARTIAL.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnops_triton.flash.kernels.parameters import KernelOptions
from attnops_triton.flash.kernels.scores import values_of
from attnops_triton.flash.kernels.tokens import Program, Tokens, column, find_row, full_tiles, partial_tiles


@dataclasses.dataclass(frozen=True)
class PartitionedOptions(KernelOptions):
    """The options of a kernel with partitions of warps. Its tile is that of one computing partition.

    Attributes:
        rows: the rows of a computing partition.
        copies: rows per program divided by ``rows``.
        fuses_dq: whether the kernel by keys computes dq too.
    """

    fuses_dq: bool = False
    rows: ClassVar[int]
    copies: ClassVar[int]

    @property
    def columns(self) -> int:
        """The streamed side of a computing partition's tile."""
        return self.streamed

    @property
    def streamed(self) -> int:
        """Tokens that are loaded per tile."""
        return self.tiles.bq if self.transposed else self.tiles.bk

    @property
    def bq(self) -> int:
        return self.columns if self.transposed else self.rows

    @property
    def bk(self) -> int:
        return self.rows if self.transposed else self.columns

    @property
    def itemsize(self) -> int:
        return self.plan.itemsize

    @property
    def row_layout(self) -> Any:
        return gl.SliceLayout(1, self.scores_layout)

    @property
    def column_layout(self) -> Any:
        return gl.SliceLayout(0, self.scores_layout)

    @property
    def sums_row_layout(self) -> Any:
        return gl.SliceLayout(1, self.sums_layout)

    @property
    def scores_layout(self) -> Any:
        """The layout of a partition's tile of scores."""
        raise NotImplementedError

    @property
    def sums_layout(self) -> Any:
        """The layout of sums with a head dim."""
        raise NotImplementedError

    @property
    def output_heads(self) -> int:
        """The heads of the outputs of the kernel by keys."""
        return self.plan.H if self.splits_groups else self.plan.K

    @property
    def output_dtype(self) -> Any:
        """The dtype of gradients that are stored."""
        return gl.float32 if self.transposed and self.splits_groups else self.gradient_dtype

    @property
    def held_bits(self) -> tuple[int, ...]:
        """The bits in ``n.batched`` of the arrays whose rows a program keeps."""
        return self._bits(("k", "v") if self.transposed else ("q", "d_out"))

    @property
    def streamed_bits(self) -> tuple[int, ...]:
        """The bits in ``n.batched`` of the arrays that are streamed."""
        return self._bits(("q", "d_out") if self.transposed else ("k", "v"))

    def _bits(self, names: tuple[str, ...]) -> tuple[int, ...]:
        layouts = (getattr(self.layouts, name) for name in names)
        return tuple(layout.bit for layout in layouts if layout is not None)

    def block(self, name: str) -> tuple[int, ...] | None:
        rows = ("k", "v", "dk", "dv") if self.transposed else ("q", "d_out", "out", "dq")
        if name == "statistics":
            return 2, self.streamed
        if name in rows and (name not in ("dq", "dk", "dv") or self.stores_by_map):
            return 1, self.rows, self.plan.D
        return (1, self.streamed, self.plan.D) if name in ("q", "k", "v", "d_out") else None

    @property
    def loops_over_heads(self) -> bool:
        """Whether a loop over the query heads of a kv head has one over tiles inside."""
        return self.transposed and self.plan.G > 1 and not (self.flat or self.splits_groups)

    @property
    def stores_by_map(self) -> bool:
        """Whether tensor maps store gradients."""
        return self.plan.gradient_dtype == self.plan.dtype and not (self.transposed and self.splits_groups)


class Held(NamedTuple):
    """An array of which a program keeps its rows."""

    map: Any  # the tensor map
    tile: Any  # [copies, rows, D]


class Ring(NamedTuple):
    """An array that is streamed through a ring of buffers."""

    map: Any  # the tensor map
    tile: Any  # [stages, tokens, D]
    ready: Any  # barriers of each buffer
    free: Any


class Shared(NamedTuple):
    """What the partitions share."""

    first: Any  # the first token that the program holds
    held: Any  # the `Held` arrays: q; q and d_out; or k and v
    ready: Any  # a barrier for each computing partition's rows
    rings: Any  # two `Ring`s, in the order of use: k and v; or q and d_out
    # For the kernel by keys, [stages, 2, queries], the logsumexp to base 2 in one term and delta. It is copied together
    # with q, and counted by its barriers.
    statistics: Any
    own: Any  # what one kernel needs


class Tiles(NamedTuple):
    """The active tiles of a row: PARTIAL ones come first."""

    row: Any  # the row
    full_start: Any  # the first FULL tile
    partial_start: Any  # the first PARTIAL tile
    partials: Any  # the number of PARTIAL tiles
    count: Any  # the number of all


@gluon.jit
def make_barriers(copies: gl.constexpr, arrivals: gl.constexpr):
    """Barriers, each with ``arrivals`` arrivals per phase."""
    barriers = mbarrier.allocate_mbarrier(batch=copies)
    for i in gl.static_range(copies):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def batch_of(n, program, bit: gl.constexpr):
    """The index of the program's batch in an array [B or 1, …] whose bit of ``n.batched`` this is."""
    return program.b * (n.batched >> bit & 1)


@gluon.jit
def allocate_tiles(copies: gl.constexpr, tokens: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """Buffers [copies, tokens, width] for a tensor map and tensor cores."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tokens, width], dtype)
    return gl.allocate_shared_memory(dtype, [copies, tokens, width], layout)


@gluon.jit
def hold(array, options: gl.constexpr):
    """A `Held` array."""
    tile = allocate_tiles(options.copies, options.rows, options.plan.D, options.dtype)
    return Held(array, tile)


@gluon.jit
def stream(array, options: gl.constexpr):
    """A `Ring`, whose buffers both computing partitions free."""
    stages: gl.constexpr = options.tiles.stages
    tile = allocate_tiles(stages, options.streamed, options.plan.D, options.dtype)
    return Ring(array, tile, make_barriers(stages, 1), make_barriers(stages, 2))


@gluon.jit
def share(x, program, own, options: gl.constexpr):
    """What the partitions share: `Shared`."""
    statistics = 0
    if options.transposed:
        held = (hold(x.k, options), hold(x.v, options))
        rings = (stream(x.q, options), stream(x.d_out, options))
        statistics = gl.allocate_shared_memory(
            gl.float32, [options.tiles.stages, 2, options.streamed], gl.NVMMASharedLayout(0, 32, 2)
        )
    else:
        q = hold(x.q, options)
        held = (q,)
        if x.d_out is not None:
            held = (q, hold(x.d_out, options))
        rings = (stream(x.k, options), stream(x.v, options))
    first = program.row * (options.copies * options.rows)
    return Shared(first, held, make_barriers(options.copies, 1), rings, statistics, own)


@gluon.jit
def find_tiles(x, n, program, options: gl.constexpr):
    """The `Tiles` of a program."""
    row = find_row(x, n, program, options)
    full_start, full_stop = full_tiles(x, n, row)
    partial_start = 0
    partials = 0
    if x.ranges is not None or not options.is_even:
        partial_start, partial_stop = partial_tiles(x, n, row)
        partials = partial_stop - partial_start
    return Tiles(row, full_start, partial_start, partials, full_stop - full_start + partials)


@gluon.jit
def first_token(x, tiles, i, options: gl.constexpr):
    """The first token of the tile at index ``i`` of the schedule."""
    return column(x, tiles.row, i) * options.streamed


@gluon.jit
def place_tile(x, program, tiles, t, options: gl.constexpr, masked: gl.constexpr):
    """The first token of the tile at index ``t`` of a loop, and the `Program` of its head."""
    h = program.h
    i = tiles.partial_start if masked else tiles.full_start
    if options.flat:
        h = program.k * options.plan.G + t % options.plan.G
        i = i + t // options.plan.G
    elif masked:
        i = i + t
    else:
        i = i + t - tiles.partials
    return first_token(x, tiles, i, options), Program(program.b, h, program.k, program.row)


@gluon.jit
def each_tile(
    step: gl.constexpr, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr,
    start: gl.constexpr = 0,
):  # fmt: skip
    """The state after the steps of all tiles from index ``start`` on, PARTIAL ones first."""
    heads: gl.constexpr = options.plan.G if options.flat else 1
    first = start
    # Otherwise no tile is PARTIAL.
    if x.ranges is not None or not options.is_even:
        for t in range(start, tiles.partials * heads):
            state = step(t, state, group, x, n, program, tiles, shared, given, options, True)
        first = tiles.partials
        if start > 0:
            first = gl.maximum(first, start)
    if options.flat:
        for t in range(0, (tiles.count - tiles.partials) * heads):
            state = step(t, state, group, x, n, program, tiles, shared, given, options, False)
    else:
        for t in range(first, tiles.count):
            state = step(t, state, group, x, n, program, tiles, shared, given, options, False)
    return state


@gluon.jit
def head_of_group(program, g, options: gl.constexpr):
    """The `Program` of a query head of its kv head."""
    return Program(program.b, program.k * options.plan.G + g, program.k, program.row)


@gluon.jit
def each_head(
    step: gl.constexpr, prepare: gl.constexpr, state, group: gl.constexpr, x, n, program, shared, given,
    options: gl.constexpr,
):  # fmt: skip
    """The state after the steps of all tiles of all query heads of a program; ``prepare`` gives the values of a head.

    Without ``options.flat`` a loop over heads has one over tiles inside.
    """
    G: gl.constexpr = options.plan.G
    if options.loops_over_heads:
        for g in range(0, G):
            here = head_of_group(program, g, options)
            values = prepare(x, n, here, given, options)
            tiles = find_tiles(x, n, here, options)
            state = each_tile(step, state, group, x, n, here, tiles, shared, values, options)
    else:
        values = given
        if not options.flat:
            values = prepare(x, n, program, given, options)
        tiles = find_tiles(x, n, program, options)
        state = each_tile(step, state, group, x, n, program, tiles, shared, values, options)
    return state


@gluon.jit
def tokens(first, stop, held: gl.constexpr, options: gl.constexpr):
    """The held `Tokens` of a partition, or the streamed ones of its tile."""
    if held:
        index = first + gl.arange(0, options.rows, layout=options.row_layout)
        found = Tokens(first, index, index[:, None], stop)
    else:
        index = first + gl.arange(0, options.columns, layout=options.column_layout)
        found = Tokens(first, index, index[None, :], stop)
    return found


@gluon.jit
def advance(stage, phase, options: gl.constexpr):
    """The next buffer of the rings, and the parity of its barriers."""
    stage = stage + 1
    if stage == options.tiles.stages:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def column_of(program, of_query: gl.constexpr, options: gl.constexpr):
    """The first column of the program's head in a tensor map."""
    return (program.h if of_query else program.k) * options.plan.D


@gluon.jit
def load(x, n, program, shared, options: gl.constexpr):
    """The loader: copies the rows that the program holds, then all tiles to the rings."""
    load_held(n, program, shared, options)
    state = (0, 1)
    each_head(load_tile, nothing, state, 0, x, n, program, shared, 0, options)


@gluon.jit
def load_held(n, program, shared, options: gl.constexpr):
    """Copy the rows that the program holds."""
    copies: gl.constexpr = options.copies
    held = shared.held
    at = column_of(program, not options.transposed, options)
    for half in gl.static_range(copies):
        ready = shared.ready.index(half)
        mbarrier.expect(ready, len(held) * options.rows * options.plan.D * options.itemsize)
        for i in gl.static_range(len(held)):
            b = batch_of(n, program, options.held_bits[i])
            corner = [b, shared.first + half * options.rows, at]
            tma.async_load(held[i].map, corner, ready, held[i].tile.index(half))


@gluon.jit
def nothing(x, n, program, given, options: gl.constexpr):
    """The values of a head for partitions that need none."""
    return given


@gluon.jit
def values_of_head(x, n, program, kv, options: gl.constexpr):
    """The held keys, and the `Values` per head and per key."""
    return kv, values_of(x, n, program, kv, "kv", not options.is_even, options)


@gluon.jit
def load_tile(
    t, state, group: gl.constexpr, x, n, program, tiles, shared, given, options: gl.constexpr, masked: gl.constexpr
):  # fmt: skip
    """Copy a tile to the rings."""
    stage, phase = state
    first, program = place_tile(x, program, tiles, t, options, masked)
    at = column_of(program, options.transposed, options)
    size: gl.constexpr = options.streamed * options.plan.D * options.itemsize
    for i in gl.static_range(2):
        ring = shared.rings[i]
        mbarrier.wait(ring.free.index(stage), phase)
        if i == 0 and options.transposed:
            mbarrier.expect(ring.ready.index(stage), size + 2 * 4 * options.streamed)
            row = (program.b * options.plan.H + program.h) * 2
            tma.async_load(x.statistics, [row, first], ring.ready.index(stage), shared.statistics.index(stage))
        else:
            mbarrier.expect(ring.ready.index(stage), size)
        b = batch_of(n, program, options.streamed_bits[i])
        tma.async_load(ring.map, [b, first, at], ring.ready.index(stage), ring.tile.index(stage))
    return advance(stage, phase, options)


@gluon.jit
def store_rows(array, i: gl.constexpr, half: gl.constexpr, head, program, shared, options: gl.constexpr):
    """Store a head of an output through its tensor map, from the buffer of the held array ``i``."""
    corner = [program.b, shared.first + half * options.rows, head * options.plan.D]
    tma.async_store(array, corner, shared.held[i].tile.index(half))


@gluon.jit
def place_output(n, program, options: gl.constexpr):
    """The length and the head of the outputs of a backward kernel, and the elements of all heads of a token."""
    length = n.S if options.transposed else n.T
    head = program.k if options.transposed and not options.splits_groups else program.h
    stride: gl.constexpr = (options.output_heads if options.transposed else options.plan.H) * options.plan.D
    return length, head, stride
