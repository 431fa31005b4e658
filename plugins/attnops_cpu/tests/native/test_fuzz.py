"""The kernels of each instruction set in random calls, built with sanitizers.

The kernels for ARM are tested on every processor: ``neon/arm_neon.h`` stands in for the intrinsics that it does not
have. In CI they and AMX's are built without sanitizers, which need four times as long to compile and run.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from attnops_cpu.library import library

Programs: TypeAlias = Callable[[str, tuple[str, ...], bool], Path]

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
# The tile instructions of AMX in C++, for any processor; and themselves, computed by a handler of the signal that they
# raise where the processor has none, with the vectors of `avx512_bf16`.
AMX: Final = {
    "emulated": ("-DATTNOPS_AMX", "-DATTNOPS_AMX_EMULATED"),
    "traps": (
        "-DATTNOPS_AMX",
        *FLAGS["avx512_bf16"],
        "-mamx-tile",
        "-mamx-bf16",
        str(ROOT / "tests/native/tile_traps.cc"),
    ),
}
KERNELS: Final = {"flash": "200", "decode": "1000", "linear": "400"}  # with the number of calls
# The address sanitizer reserves terabytes, more than the tests' own limit of memory.
UNLIMITED: Final = ("prlimit", "--data=unlimited") if shutil.which("prlimit") else ()
pytestmark = pytest.mark.slow
# In CI the fastest of this processor with sanitizers, which need half a minute to compile, and ARM's without.
HERE: Final = [isa for isa in library().available if isa in FLAGS]
ALL: Final = dict.fromkeys((*HERE, *STAND_IN))
SANITIZED: Final = [HERE[0], *(pytest.param(isa, marks=pytest.mark.exhaustive) for isa in ALL if isa != HERE[0])]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UNLIMITED, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", SANITIZED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_calls_are_right_and_read_nothing_outside(kernel: str, isa: str, programs: Programs) -> None:
    flags = FLAGS[isa] if isa in HERE else STAND_IN[isa]
    check(programs(isa, flags, True), kernel, KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_calls_of_arm_are_right(kernel: str, programs: Programs) -> None:
    check(programs("neon_bf16", STAND_IN["neon_bf16"], False), kernel, KERNELS[kernel])


@pytest.mark.parametrize("kernel", ["flash", "decode"])
@pytest.mark.parametrize("sanitized", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "tiles",
    [
        "emulated",
        *([pytest.param("traps", marks=pytest.mark.exhaustive)] if "avx512_bf16" in library().available else []),
    ],
)
def test_random_calls_of_amx_are_right(kernel: str, tiles: str, sanitized: bool, programs: Programs) -> None:
    check(programs("amx", AMX[tiles], sanitized), kernel, "300" if kernel == "flash" else "150")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS)
def test_half_a_million_calls_read_nothing_outside(kernel: str, programs: Programs) -> None:
    found = run(programs(HERE[0], FLAGS[HERE[0]], True), kernel, "500000", "12345", "10")
    assert found.returncode == 0, found.stdout + found.stderr


def check(program: Path, kernel: str, calls: str) -> None:
    right = run(program, kernel, calls, "7")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run(program, kernel, "20", "7", "1", "hide the newest key")
    assert wrong.returncode == 1, "a plain computation without the newest key is not told from the kernel"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The program of an instruction set, which has both kernels: with sanitizers it compiles for half a minute."""

    @functools.cache
    def build(isa: str, flags: tuple[str, ...], sanitized: bool) -> Path:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        assert compiler is not None, "building attnops-cpu needs a C++ compiler"
        program = tmp_path_factory.mktemp("fuzz") / "fuzz"
        sources = [ROOT / "tests/native/fuzz.cc", ROOT / "native/memory.cc"]
        options = ["-std=c++17", "-O1", "-g1", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
                   f"-DATTNOPS_ISA={isa}"]  # fmt: skip
        if sanitized:
            options += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        subprocess.run([compiler, *options, *flags, f"-I{ROOT / 'native'}", *sources, "-o", program], check=True)
        return program

    return build
