"""Read the static schedule of a Pallas TPU kernel, with no TPU.

The compiler dumps, for every kernel, its final bundles (without stalls one is issued a cycle; waits for DMA are extra)
and each bundle's uses of every unit of the core, see `UNITS`. A block is a run of bundles between branches. In a kernel
without loops and branches inside its tile, the body, which computes one tile, is the block with the most uses of the
matrix unit; check `Schedule.blocks` for whether it is.

A whole kernel is added up from its `Regions`, each as often as a problem runs it: see `Regions.total`.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from attnops_tpu.aot import environment

# Uses of each unit, summed over a block.
UNITS: Final = {
    "MATMUL": "rows streamed through a matrix unit, by vector register",
    "MATPUSH": "registers of the stationary operand pushed into a matrix unit",
    "XLU": "cross-lane unit: transposes, reductions over lanes, rotations",
    "VALU": "vector arithmetic",
    "VPOP": "results read from the matrix, transcendental and cross-lane units",
    "EUP": "transcendentals: exp2, log2, tanh, reciprocal",
    "VLOAD": "loads from vector memory",
    "FILL": "of these, registers that were spilled",
    "VSTORE": "stores to vector memory",
    "SPILL": "of these, registers spilled",
    "SALU": "scalar arithmetic",
}
# Shorter blocks compute no tile.
_SHORTEST: Final = 100
# Regions that a branch skips are counted in every step if they are shorter and have no loop, if they store nothing, or
# if they have branches of their own: the latter transfer blocks.
_SHORTEST_REGION: Final = 50
# Bundles after a branch that run whether or not it is taken.
_DELAY_SLOTS: Final = 4
_STORE: Final = list(UNITS).index("VSTORE")
_BUNDLE: Final = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s[^{]*:([ >]*)\{")
_BRANCH: Final = re.compile(r"sbr\.rel .*?target = \$region(\d+)")
_SOURCE: Final = re.compile(r"loc\(\"([^\"]+)\":(\d+)")
_MARK: Final = re.compile(r"Start(?:/End empty)? region (\d+)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of bundles between branches.

    Attributes:
        bundles: how many bundles.
        uses: the uses of each of `UNITS`.
    """

    bundles: int
    uses: Mapping[str, int]


class Span(NamedTuple):
    """Bundles that a branch may skip.

    Attributes:
        start: the branch.
        stop: the bundle that it goes to.
        depth: how many loops it is in; the outermost is the grid's.
        source: the line of the kernel that makes the branch, such as ``"module.py:12"``; empty for what the compiler
            adds, and if `measure` was not asked for sources.
    """

    start: int
    stop: int
    depth: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Region:
    """Bundles of a grid step that a branch may skip.

    Attributes:
        bundles: how many bundles, without loops.
        loops: bundles of one iteration of each loop.
        uses: the uses of each of `UNITS`, loops included once.
    """

    bundles: int
    loops: tuple[int, ...]
    uses: Mapping[str, int]

    @property
    def is_copy(self) -> bool:
        """Whether it only moves registers, such as a block of an array that XLA keeps in vector memory."""
        computes = any(self.uses[unit] for unit in ("MATMUL", "XLU", "VALU", "EUP"))
        return not computes and 2 * self.uses["VLOAD"] >= self.uses["VSTORE"] > 0


@dataclasses.dataclass(frozen=True)
class Regions:
    """The bundles of a kernel by what runs them.

    Attributes:
        once: bundles outside of the grid's loop.
        step: bundles of every grid step, with the regions that transfer blocks, and short ones.
        skipped: the other regions that a branch may skip, innermost ones only, in order.
    """

    once: int
    step: int
    skipped: tuple[Region, ...]

    def total(self, steps: float, trips: Sequence[tuple[str, float, float]]) -> dict[str, float]:
        """The bundles of a whole kernel by region: ``"once"``, ``"steps"``, and the name of each region.

        Args:
            steps: steps of the grid.
            trips: for each region in order, its name, how often it runs, and the iterations of its loops.

        Raises:
            LookupError: the kernel has another number of regions, so that the names would be wrong.
        """
        if len(trips) != len(self.skipped):
            raise LookupError(
                f"the kernel has {len(self.skipped)} regions, of {[r.bundles for r in self.skipped]} bundles, but "
                f"{len(trips)} are expected: {[name for name, *_ in trips]}"
            )
        total = {"once": float(self.once), "steps": steps * self.step}
        for (name, runs, rounds), region in zip(trips, self.skipped, strict=True):
            total[name] = total.get(name, 0.0) + runs * (region.bundles + rounds * sum(region.loops))
        return total


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static schedule of a kernel.

    Attributes:
        kernel: its name.
        bundles: bundles of the complete kernel.
        capacity: the most uses of each of `UNITS` in a bundle.
        blocks: the blocks of at least 100 bundles, in order.
        regions: all bundles, by what runs them.
        spans: what each branch forward may skip, in order.
        depths: how many loops each bundle is in; the outermost is the grid's.
    """

    kernel: str
    bundles: int
    capacity: Mapping[str, int]
    blocks: tuple[Block, ...]
    regions: Regions
    spans: tuple[Span, ...] = ()
    depths: tuple[int, ...] = ()

    @property
    def body(self) -> Block:
        """The block with the most uses of the matrix unit, and of those the longest."""
        return max(self.blocks, key=lambda block: (block.uses["MATMUL"], block.bundles))


def measure(
    command: list[str], kernel: str | None = None, only: str | None = None, has_sources: bool = False
) -> tuple[Schedule, str]:
    """Run a Python program that compiles a kernel, in a separate process, and read the kernel's schedule.

    Args:
        command: arguments of Python, such as ``["-m", "module"]``.
        kernel: a substring of the kernel's name; None for the largest.
        only: the complete name of the kernel's instruction in the compiled program, such as ``"my_kernel.1"``: nothing
            else is dumped, which is many times faster.
        has_sources: whether branches have the lines that make them, see `Span`.

    Returns:
        The schedule, and what the program printed.

    Raises:
        RuntimeError: the program failed; the message has the end of its stderr.
        LookupError: it compiled no such kernel.
    """
    folder = tempfile.mkdtemp(prefix="attnops_schedule_")
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true"
    flags += " --xla_jf_dump_llo_pass_label_regex=^final_"
    flags += " --xla_mosaic_enable_llo_source_annotations=true" if has_sources else ""
    if only is not None:
        flags += f" --xla_jf_dump_only_matching_hlo={only}"
    try:
        run = subprocess.run(
            [sys.executable, *command], env={**os.environ, **environment(), "LIBTPU_INIT_ARGS": flags},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()[-2000:]}")
        return read(folder, only if kernel is None else kernel), run.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: str, kernel: str | None = None) -> Schedule:
    """The schedule of a kernel in a folder that the compiler wrote with ``--xla_jf_dump_to``.

    Raises:
        LookupError: there is none.
    """
    files = [name for name in glob.glob(f"{glob.escape(folder)}/*-final_bundles.txt")
             if "schedule-analysis" not in name and (kernel or "") in os.path.basename(name)]  # fmt: skip
    if not files:
        raise LookupError(f"the compiler wrote no kernel named like {kernel!r}")
    largest = max(files, key=os.path.getsize)
    stem = re.sub(r"-\d+-final_bundles\.txt$", "", largest)
    (table_file,) = glob.glob(f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt")
    with open(table_file) as file:
        lines = file.read().split("\n")
    capacity = dict(zip(UNITS, map(int, lines[2].split()), strict=False))
    table = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
    with open(largest) as file:
        bundles = _bundles(file.read())
    ends = [i for i, text in enumerate(bundles) if "sbr.rel" in text or i == len(bundles) - 1]
    blocks = []
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        if end + 1 - start >= _SHORTEST:
            rows = table[start : end + 1]
            blocks.append(
                Block(end + 1 - start, {unit: sum(row[i] for row in rows) for i, unit in enumerate(UNITS)})
            )  # fmt: skip
    name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", os.path.basename(largest))
    return Schedule(
        name, len(bundles), capacity, tuple(blocks), regions_of(bundles, table), spans_of(bundles), depths_of(bundles)
    )


def _bundles(text: str) -> list[str]:
    """The text of each bundle; some have several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    return bundles


def regions_of(bundles: Sequence[str], table: Sequence[Sequence[int]]) -> Regions:
    """The regions of a kernel.

    Args:
        bundles: the text of each; a ``>`` for each loop that it is in, the outermost of which is the grid's.
        table: the uses of each of `UNITS` by each bundle.
    """
    depth = depths_of(bundles)
    spans = [(min(start + 1 + _DELAY_SLOTS, stop), stop) for start, stop, deep, _ in spans_of(bundles) if deep]
    leaves = [
        (start, end)
        for start, end in spans
        if not any((start, end) != inner and start <= inner[0] <= inner[1] <= end for inner in spans)
        and any(row[_STORE] for row in table[start:end])
        and (end - start >= _SHORTEST_REGION or max(depth[start:end]) > 1)
    ]
    skipped = tuple(_region(start, end, depth, table) for start, end in leaves)
    inside = sum(end - start for start, end in leaves)
    step = sum(1 for d in depth if d) - inside
    return Regions(len(bundles) - inside - step, step, skipped)


def spans_of(bundles: Sequence[str]) -> tuple[Span, ...]:
    """What each branch forward may skip; see `regions_of`."""
    begins = {int(region): i for i, text in enumerate(bundles) for region in _MARK.findall(text)}
    spans = []
    for i, (text, depth) in enumerate(zip(bundles, depths_of(bundles), strict=True)):
        branch = _BRANCH.search(text)
        if branch and begins.get(int(branch[1]), 0) > i:
            source = _SOURCE.search(branch[0])
            line = "" if source is None else f"{os.path.basename(source[1])}:{source[2]}"
            spans.append(Span(i, begins[int(branch[1])], depth, line))
    return tuple(spans)


def depths_of(bundles: Sequence[str]) -> tuple[int, ...]:
    """How many loops each bundle is in."""
    depths: list[int] = []
    for text in bundles:
        match = _BUNDLE.match(text)
        # The dump marks no empty bundle; such follow branches.
        is_empty = bool(depths) and "{}" in text
        depths.append(depths[-1] if is_empty else match[1].count(">") if match else 0)
    return tuple(depths)


def _region(start: int, end: int, depth: Sequence[int], table: Sequence[Sequence[int]]) -> Region:
    runs = [(deep, len(list(run))) for deep, run in itertools.groupby(d > 1 for d in depth[start:end])]
    loops = tuple(length for deep, length in runs if deep)
    uses = {unit: sum(row[i] for row in table[start:end]) for i, unit in enumerate(UNITS)}
    return Region(end - start - sum(loops), loops, uses)


def in_tiles(block: Block, tiles: float) -> dict[str, Any]:
    """The bundles and uses of a block per tile, for a block that computes several."""
    return {"bundles": block.bundles / tiles} | {unit: n / tiles for unit, n in block.uses.items()}
