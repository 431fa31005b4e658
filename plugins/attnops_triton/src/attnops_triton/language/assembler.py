"""The assembler (ptxas) with which jaxlib will assemble kernels, looked up as jaxlib does.

jaxlib uses the first one of at least version 11.8. It looks in the folders of PATH, in /usr/local/cuda and /opt/cuda,
in NVIDIA's wheel for the installed plugin, and in the environment of conda.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from attnops import Reason
from attnops_triton.targets import first_cuda

# In jaxlib's order of preference: the plugin, the folder of NVIDIA's wheel next to it, and the wheel.
PLUGINS: Final = (
    ("jax_cuda13_plugin", "nvidia/cu13", "nvidia-cuda-nvcc"),
    ("jax_cuda12_plugin", "nvidia/cuda_nvcc", "nvidia-cuda-nvcc-cu12"),
)
TOOLKITS: Final = (Path("/usr/local/cuda"), Path("/opt/cuda"))
_OLDEST: Final = (11, 8, 0)
_BROKEN: Final = (12, 3, 103)  # jaxlib skips it


class Assembler(NamedTuple):
    """An assembler.

    Attributes:
        path: the path of the executable.
        release: the release of CUDA, such as (12, 9).
    """

    path: Path
    release: tuple[int, int]


def find() -> Assembler | None:
    """The assembler that jaxlib will use; None if there is none."""
    return _find(os.environ.get("PATH", ""), _plugin()[0])


@functools.cache
def driver() -> tuple[int, int] | None:
    """The release of CUDA that the driver is of, such as (12, 9); None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def reasons(arch: str) -> Iterable[Reason]:
    """Reasons why this machine can't assemble kernels for its GPU, or load what was assembled.

    Code of an older release than the driver's is loaded. That of a newer major release may be refused: it is compared
    with the driver's, or, if that is unknown, with that of jaxlib's plugin.

    Args:
        arch: an NVIDIA architecture, such as ``"sm_90"``.
    """
    found, first, runs = find(), first_cuda(arch), driver()
    plugin, _, wheel = _plugin()
    install = f"pip install '{wheel}>={_text(first)}'"
    if found is None:
        yield Reason("ptxas", "not found", "jaxlib assembles the kernels with it", install)
        return
    given = f"of CUDA {_text(found.release)} in {found.path.parent}"
    if found.release < first:
        yield Reason(
            "ptxas", given, f"{arch} needs that of CUDA {_text(first)} or later",
            f"{install}, and put its folder first in PATH, which jaxlib searches before the wheels",
        )  # fmt: skip
    named = re.search(r"cuda(\d+)", plugin.name if plugin else "")
    known = (runs[0], f"the driver is of CUDA {_text(runs)}") if runs else None
    known = known or (named and (int(named[1]), f"jaxlib's plugin is {named.string}"))
    if known and found.release[0] > known[0]:
        yield Reason(
            "ptxas", given, f"{known[1]}, which may refuse code of a newer major release",
            f"put the folder of a ptxas of CUDA {known[0]} first in PATH" + (", or update the driver" if runs else ""),
        )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _find(path: str, plugin: Path | None) -> Assembler | None:
    for candidate in _candidates(path, plugin):
        version = _version(candidate)
        if version is not None and version >= _OLDEST and version != _BROKEN:
            return Assembler(candidate, version[:2])
    return None


def _candidates(path: str, plugin: Path | None) -> Iterator[Path]:
    folders = [Path("bin"), *(Path(folder) for folder in path.split(os.pathsep))]
    folders += [toolkit / "bin" for toolkit in TOOLKITS]
    if plugin is not None:
        wheel = next(wheel for name, wheel, _ in PLUGINS if name == plugin.name)
        roots = [plugin.parent / wheel, plugin.parent.parent / wheel, plugin / "cuda"]
        folders += [root / "bin" for root in (*roots, plugin / "../../../..", plugin / "../../../../..")]
    return (folder / "ptxas" for folder in folders)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        if not path.is_file():  # raises for a folder that this user may not read
            return None
        text = subprocess.run([str(path), "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


@functools.cache
def _plugin() -> tuple[Path | None, str, str]:
    """The folder of jaxlib's CUDA plugin, and the folder and name of the wheel with its assembler."""
    for name, folder, wheel in PLUGINS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent, folder, wheel
    return None, *PLUGINS[0][1:]


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
