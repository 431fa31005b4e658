"""Compile kernels to machine code on a host without a GPU, with the compilers and disassemblers in Triton's package.

for launched in kernels(function, arguments, "sm_90"):
    print(launched.kernel.name, compile_for(launched, "sm_90"))
"""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jax

from attnops_triton.language.build import build, lowered
from attnops_triton.language.launch import Launched, recording
from attnops_triton.targets import TARGETS, capability, is_amd, target

if TYPE_CHECKING:
    from attnops.typing import Function, PyTree

# Instructions that multiply matrices or float32 numbers, and the load from tensor memory.
PRODUCTS: Final = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "FFMA", "FFMA2", "LDTM")


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        registers: registers per thread.
        spilled: bytes of local memory per thread; on AMD the number of spilled registers.
        shared: bytes of shared memory per program.
        instructions: the number of occurrences of each instruction, by its name up to the first dot.
        sequences: the names of the instructions of each innermost loop that has one of `PRODUCTS`, in the order of the
            code; empty on AMD.
        text: PTX; on AMD the assembly.
        code: the machine code, disassembled; on AMD the assembly.
    """

    registers: int
    spilled: int
    shared: int
    instructions: collections.Counter[str]
    sequences: tuple[tuple[str, ...], ...] = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)
    code: str = dataclasses.field(repr=False)

    @property
    def loops(self) -> tuple[collections.Counter[str], ...]:
        """The numbers of instructions of each of `sequences`."""
        return tuple(map(collections.Counter, self.sequences))

    @property
    def loop(self) -> collections.Counter[str]:
        """The instructions of the loop over FULL tiles; empty on AMD.

        It is the loop with the fewest instructions among those with exponentials, or among all if none has any.
        """
        loops = [loop for loop in self.loops if loop["MUFU"]] or self.loops
        return min(loops, key=lambda loop: sum(loop.values()), default=collections.Counter())

    def count(self, *names: str) -> int:
        """The number of instructions with one of these names."""
        return sum(self.instructions[name] for name in names)


def kernels(function: Function, arguments: Sequence[PyTree], arch: str) -> list[Launched]:
    """The distinct kernels that a function launches, in order.

    Args:
        function: a function of arrays or pytrees of arrays.
        arguments: its arguments, arrays or `jax.ShapeDtypeStruct`.
        arch: one of `attnops_triton.targets.TARGETS`.
    """
    with target(arch), recording() as launches:
        jax.eval_shape(function, *arguments)
    return list({launched.recipe: launched for launched in launches}.values())


def compile_for(launched: Launched, arch: str, ptxas: Path | None = None) -> Binary:
    """A kernel as machine code.

    Args:
        launched: the kernel.
        arch: the architecture.
        ptxas: the assembler for NVIDIA GPUs; None for the one in Triton's package, which knows every architecture.

    Raises:
        ValueError: the architecture is unknown.
        subprocess.CalledProcessError: the assembler refuses the kernel.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch={arch!r} is unknown; use one of {list(TARGETS)}")
    recipe = dataclasses.replace(launched.recipe, arch=arch)
    if is_amd(arch):
        modules, metadata = lowered(recipe)
        return amd_binary(modules["amdgcn"], metadata["shared"])
    program = build(recipe)
    return nvidia_binary(program.code, program.shared, arch, ptxas)


def nvidia_binary(ptx: bytes, shared: int, arch: str, ptxas: Path | None = None) -> Binary:
    """A kernel for NVIDIA's GPUs from its PTX, which needs ``shared`` bytes of shared memory; see `compile_for`."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_bytes(ptx)
        # The same options as jaxlib's.
        accelerated = "a" if capability(arch) >= 90 else ""
        options = (str(source), "-o", str(binary), f"-arch={arch}{accelerated}")
        if ptxas is None:
            _run("ptxas-blackwell" if capability(arch) >= 90 else "ptxas", *options)
        else:
            subprocess.run([str(ptxas), *options], check=True, capture_output=True, text=True)
        usage = _run("cuobjdump", "--dump-resource-usage", str(binary))
        code = _run("nvdisasm", "-c", str(binary))
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    local = sum(int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("STACK", "LOCAL"))
    sequences = (_names(loop) for loop in innermost_loops(code))
    return Binary(
        registers, local, shared, collections.Counter(_names(code.splitlines())),
        tuple(x for x in sequences if any(name in PRODUCTS for name in x)), ptx.decode(), code,
    )  # fmt: skip


def innermost_loops(code: str) -> list[list[str]]:
    """The lines of the innermost loops of disassembled code for NVIDIA's GPUs, in the order of the code. A loop is the
    code between a backward branch and its target.
    """
    lines = code.splitlines()
    labels: dict[str, int] = {}
    loops = []
    for i, line in enumerate(lines):
        if match := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[match[1]] = i
        if (match := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels.get(match[1], i) < i:
            loops.append((labels[match[1]], i))
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [lines[first : last + 1] for first, last in sorted(inner)]


def _names(lines: list[str]) -> tuple[str, ...]:
    # A wait for products is WARPGROUP.DEPBAR.
    names = (re.search(r"\*/\s+(?:@!?U?P\d+\s+)?(?:WARPGROUP\.(?=DEPBAR))?([A-Z][A-Z0-9_]*)", line) for line in lines)
    return tuple(match[1] for match in names if match)


def amd_binary(text: str, shared: int) -> Binary:
    """A kernel for AMD's GPUs from its assembly, which needs ``shared`` bytes of shared memory."""

    def figure(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", text)[-1])

    names = (re.match(r"\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+)", line) for line in text.splitlines())
    counted = collections.Counter(match[1] for match in names if match)
    return Binary(
        figure("vgpr_count"), figure("vgpr_spill_count"), shared, counted, (), text, text
    )  # fmt: skip


def _run(tool: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(path), *arguments], check=True, capture_output=True, text=True).stdout
