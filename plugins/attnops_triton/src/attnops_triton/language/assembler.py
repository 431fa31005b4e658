"""The assembler (ptxas) with which jaxlib will assemble kernels, looked up as jaxlib does.

jaxlib uses the first one of at least version 11.8. It looks in the folders of PATH, in /usr/local/cuda and /opt/cuda,
in NVIDIA's wheel for the installed plugin, and in the environment of conda.
"""

from __future__ import annotations

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


def reasons(arch: str) -> Iterable[Reason]:
    """Reasons why this machine can't assemble kernels for its GPU.

    Args:
        arch: an NVIDIA architecture, such as ``"sm_90"``.
    """
    found, first = find(), first_cuda(arch)
    wheel = _plugin()[2]
    install = f"pip install '{wheel}>={_text(first)}'"
    if found is None:
        yield Reason("ptxas", "not found", "jaxlib assembles the kernels with it", install)
    elif found.release < first:
        yield Reason(
            "ptxas", f"of CUDA {_text(found.release)} in {found.path.parent}",
            f"{arch} needs that of CUDA {_text(first)} or later",
            f"{install}, and put its folder first in PATH, which jaxlib searches before the wheels",
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
