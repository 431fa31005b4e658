"""Read the static schedule of a Pallas TPU kernel, with no TPU.

The compiler dumps, for every kernel, its final bundles (without stalls one is issued a cycle; waits for DMA are extra)
and each bundle's uses of every unit of the core, see `UNITS`. A block is a run of bundles between branches. In a kernel
without loops and branches inside its tile, the body, which computes one tile, is the block with the most uses of the
matrix unit; check `Schedule.blocks` for whether it is.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final

from attnops_tpu.aot import environment

# Uses of each unit, summed over a block.
UNITS: Final = {
    "MATMUL": "rows streamed through a matrix unit, by vector register",
    "MATPUSH": "registers of the stationary operand pushed into a matrix unit",
    "XLU": "cross-lane unit: transposes, reductions over lanes, rotations",
    "VALU": "vector arithmetic",
    "VPOP": "results taken from the matrix, transcendental and cross-lane units",
    "EUP": "transcendentals: exp2, log2, tanh, reciprocal",
    "VLOAD": "loads from vector memory",
    "FILL": "of these, registers that were spilled",
    "VSTORE": "stores to vector memory",
    "SPILL": "of these, registers spilled",
    "SALU": "scalar arithmetic",
}
# Shorter blocks compute no tile.
_SHORTEST: Final = 100


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of bundles between branches.

    Attributes:
        bundles: how many.
        uses: of each of `UNITS`.
    """

    bundles: int
    uses: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static schedule of a kernel.

    Attributes:
        kernel: its name.
        bundles: of the complete kernel.
        capacity: the most uses of each of `UNITS` in a bundle.
        blocks: those of at least 100 bundles, in order.
    """

    kernel: str
    bundles: int
    capacity: Mapping[str, int]
    blocks: tuple[Block, ...]

    @property
    def body(self) -> Block:
        """The block with the most uses of the matrix unit, and of those the longest."""
        return max(self.blocks, key=lambda block: (block.uses["MATMUL"], block.bundles))


def measure(command: list[str], kernel: str | None = None) -> tuple[Schedule, str]:
    """Run a Python program that compiles a kernel, in a separate process, and read the kernel's schedule.

    Args:
        command: arguments of Python, such as ``["-m", "module"]``.
        kernel: a part of the kernel's name; None for the largest.

    Returns:
        The schedule, and what the program printed.

    Raises:
        RuntimeError: the program failed; the message has the end of its stderr.
        LookupError: it compiled no such kernel.
    """
    folder = tempfile.mkdtemp(prefix="attnops_schedule_")
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true"
    try:
        run = subprocess.run(
            [sys.executable, *command], env={**os.environ, **environment(), "LIBTPU_INIT_ARGS": flags},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()[-2000:]}")
        return read(folder, kernel), run.stdout
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
        bundles = [line for line in file if re.match(r"\s*(0x[0-9a-f]+|0)\s.*:.*\{", line)]
    ends = [i for i, line in enumerate(bundles) if "sbr.rel" in line or i == len(bundles) - 1]
    blocks = []
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        if end + 1 - start >= _SHORTEST:
            rows = table[start : end + 1]
            blocks.append(
                Block(end + 1 - start, {unit: sum(row[i] for row in rows) for i, unit in enumerate(UNITS)})
            )  # fmt: skip
    name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", os.path.basename(largest))
    return Schedule(name, len(bundles), capacity, tuple(blocks))


def in_tiles(block: Block, tiles: float) -> dict[str, Any]:
    """The bundles and uses of a block per tile, for a block that computes several."""
    return {"bundles": block.bundles / tiles} | {unit: n / tiles for unit, n in block.uses.items()}
