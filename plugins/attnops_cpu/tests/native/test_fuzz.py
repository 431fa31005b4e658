"""The kernels of each instruction set, built with sanitizers, in random calls.

Those for ARM are tested on every processor: ``neon/arm_neon.h`` stands in for the intrinsics that it does not have.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from attnops_cpu.library import library

ROOT: Final = Path(__file__).parents[2]
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
FLAGS: Final = {
    "baseline": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "neon": (),
    "neon_bf16": ("-march=armv8.2-a+bf16",),
}
_NEON: Final = (f"-I{ROOT / 'tests/native/neon'}", "-D__ARM_NEON")
STAND_IN: Final = {"neon": _NEON, "neon_bf16": (*_NEON, "-D__ARM_FEATURE_BF16_VECTOR_ARITHMETIC")}
# The address sanitizer reserves terabytes, more than the tests' own limit of memory.
UNLIMITED: Final = ("prlimit", "--data=unlimited") if shutil.which("prlimit") else ()
pytestmark = pytest.mark.slow
# In CI the fastest of this processor, the last, which runs everywhere, and ARM's; each needs half a minute to compile.
IN_CI: Final = (library().available[0], library().available[-1], "neon_bf16")
SETS: Final = [
    isa if isa in IN_CI else pytest.param(isa, marks=pytest.mark.exhaustive)
    for isa in dict.fromkeys((*library().available, *STAND_IN))
]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UNLIMITED, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kernel", ["flash", "decode"])
def test_random_calls_are_right_and_read_nothing_outside(kernel: str, isa: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "building attnops-cpu needs a C++ compiler"
    program = tmp_path / "fuzz"
    sources = [ROOT / f"tests/native/{kernel}_fuzz.cc", ROOT / "native/memory.cc"]
    options = ["-std=c++17", "-O1", "-g", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
               "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-DATTNOPS_ISA={isa}"]  # fmt: skip
    here = isa in library().available
    flags = FLAGS[isa] if here else STAND_IN[isa]
    subprocess.run([compiler, *options, *flags, f"-I{ROOT / 'native'}", *sources, "-o", program], check=True)
    calls = 400 if kernel == "flash" else 2000
    right = run(program, str(calls if here else calls // 2), "7")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run(program, "20", "7", "hide the newest key")
    assert wrong.returncode == 1, "a plain computation without the newest key is not told from the kernel"
