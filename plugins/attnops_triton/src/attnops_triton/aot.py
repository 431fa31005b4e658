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
from typing import TYPE_CHECKING, Any, Final

import jax

from attnops_triton.language.launch import Launched, recording
from attnops_triton.targets import SHARED_MEMORY, target

if TYPE_CHECKING:
    from attnops.typing import Function, PyTree

_TYPES: Final = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "int32": "*i32", "uint32": "*u32",
}  # fmt: skip

# Instructions that multiply matrices or, for float32, numbers.
PRODUCTS: Final = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "FFMA", "FFMA2")


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of local memory a thread; on AMD registers spilled.
        shared: bytes of shared memory a program.
        instructions: occurrences in the code, by the name up to the first dot.
        loop: the same for the first inner loop with products, which is over FULL tiles; empty on AMD.
        asm: Triton's stages, text and binary.
    """

    registers: int
    spilled: int
    shared: int
    instructions: collections.Counter[str]
    loop: collections.Counter[str]
    asm: Any = dataclasses.field(repr=False)

    def count(self, *names: str) -> int:
        """The number of instructions with one of these names."""
        return sum(self.instructions[name] for name in names)


def kernels(function: Function, arguments: Sequence[PyTree], arch: str) -> list[Launched]:
    """The distinct kernels that a function launches, in order.

    Args:
        function: of arrays, or of pytrees of them.
        arguments: its arguments, arrays or `jax.ShapeDtypeStruct`.
        arch: one of `attnops_triton.targets.SHARED_MEMORY`.
    """
    with target(arch), recording() as launches:
        jax.eval_shape(function, *arguments)
    return list({launched.kernel.text: launched for launched in launches}.values())


def compile_for(launched: Launched, arch: str) -> Binary:
    """A kernel as machine code.

    Raises:
        ValueError: the architecture is unknown.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attnops_triton.language.compat import jit

    if arch not in SHARED_MEMORY:
        raise ValueError(f"arch={arch!r} is unknown; use one of {list(SHARED_MEMORY)}")
    amd = arch.startswith("gfx")
    names = launched.kernel.parameters
    source = ASTSource(
        jit(launched.kernel),
        signature={name: _TYPES[dtype] for name, dtype in zip(names, launched.dtypes, strict=True)},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(names))},
    )
    gpu = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    options = {"num_warps": launched.tiles.warps, "num_stages": launched.tiles.stages, "enable_fp_fusion": True}
    with triton.knobs.cache.scope():
        # jax-triton sets the folder to "", for which Triton's compiler fails.
        triton.knobs.cache.dir = triton.knobs.cache.dir or triton.knobs.cache.get_triton_dir("cache")
        compiled = triton.compile(source, target=gpu, options=options)
    return _amd(compiled) if amd else _nvidia(compiled)


def _nvidia(compiled: Any) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    local = sum(int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("STACK", "LOCAL"))
    lines = code.splitlines()
    return Binary(registers, local, compiled.metadata.shared, _count(lines), _inner_loop(lines), compiled.asm)


def _inner_loop(lines: list[str]) -> collections.Counter[str]:
    """The instructions of the first innermost loop with products; loops are found by backward branches."""
    labels: dict[str, int] = {}
    loops = []
    for i, line in enumerate(lines):
        if match := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[match[1]] = i
        if (match := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels.get(match[1], i) < i:
            loops.append((labels[match[1]], i))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    counted = [_count(lines[first : last + 1]) for first, last in sorted(inner)]
    return next((c for c in counted if any(c[name] for name in PRODUCTS)), collections.Counter())


def _count(lines: list[str]) -> collections.Counter[str]:
    names = (re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", line) for line in lines)
    return collections.Counter(match[1] for match in names if match)


def _amd(compiled: Any) -> Binary:
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", text)[-1])

    names = (re.match(r"\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+)", line) for line in text.splitlines())
    counted = collections.Counter(match[1] for match in names if match)
    return Binary(
        figure("vgpr_count"), figure("vgpr_spill_count"), compiled.metadata.shared, counted, collections.Counter(),
        compiled.asm,
    )  # fmt: skip


def _run(tool: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(path), *arguments], check=True, capture_output=True, text=True).stdout
