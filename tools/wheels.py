"""Build attnops-cpu's wheels for Linux and macOS on one machine, by zig, which has the other systems' libraries.

    make wheels

Each wheel, ``py3-none-…``, is built from the source distribution, and put in ``dist``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import ziglang

ROOT = Path(__file__).parents[1]


class Target(NamedTuple):
    """A platform: its tag in a wheel's name, zig's name of it, and CMake's names of system and processor."""

    tag: str
    zig: str
    system: str
    processor: str


TARGETS = (
    Target("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "Linux", "x86_64"),
    Target("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "Linux", "aarch64"),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "arm64"),
)


def build(target: Target, dist: Path) -> None:
    """Compile the wheel of a target, and give it the tag that its libraries allow."""
    env = os.environ | {
        "CXX": f"{Path(ziglang.__file__).with_name('zig')} c++ -target {target.zig}",
        "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME={target.system} -DCMAKE_SYSTEM_PROCESSOR={target.processor}",
    }
    with tempfile.TemporaryDirectory() as folder:
        python = [sys.executable, "-m"]
        options = ["--no-isolation", "--outdir", folder, f"-Cbuild-dir={folder}/build", "-Cinstall.strip=false"]
        subprocess.run([*python, "build", *options, ROOT / "plugins/attnops_cpu"], env=env, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        subprocess.run([*python, "wheel", "tags", "--remove", "--platform-tag", target.tag, wheel], check=True)
        (tagged,) = Path(folder).glob("*.whl")
        shutil.move(tagged, dist / tagged.name)


if __name__ == "__main__":
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for target in TARGETS:
        build(target, dist)
