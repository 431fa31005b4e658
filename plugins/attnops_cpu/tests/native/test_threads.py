"""The kernels on several threads at once, built with the thread sanitizer, and in processes that fork meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
# The thread sanitizer reserves terabytes, more than the tests' own limit of memory.
UNLIMITED: Final = ("prlimit", "--data=unlimited") if shutil.which("prlimit") else ()
pytestmark = pytest.mark.slow


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "building attnops-cpu needs a C++ compiler"
    sources = [ROOT / "tests/native/threads.cc", ROOT / "native/isa_baseline.cc", ROOT / "native/memory.cc"]
    program = folder / "threads"
    flags = [
        "-std=c++17",
        "-O1",
        "-g1",
        "-w",
        "-pthread",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
    ]
    subprocess.run([compiler, *flags, *options, f"-I{ROOT / 'native'}", *sources, "-o", program], check=True)
    return program


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UNLIMITED, *command], capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sanitized"), "-fsanitize=thread")


def test_calls_on_several_threads_do_not_race(sanitized: Path) -> None:
    found = run(sanitized, "pool", "4")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_race_is_found(sanitized: Path) -> None:
    found = run(sanitized, "race", "1")
    assert "data race" in found.stderr, found.stdout + found.stderr
    assert found.returncode != 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("threads"))


def test_no_more_threads_take_part_than_there_are_cores(program: Path) -> None:
    found = run(program, "pool", "3")
    assert found.returncode == 0, found.stdout + found.stderr
    if shutil.which("taskset"):
        core = min(os.sched_getaffinity(0))
        found = run("taskset", "-c", str(core), program, "pool", "1")
        assert "threads on 1 of 1 cores" in found.stdout, found.stdout + found.stderr


def test_a_child_that_is_forked_while_threads_call_can_call(program: Path) -> None:
    found = run(program, "fork", "300")
    assert found.returncode == 0, found.stdout + found.stderr
