"""The assembler is found as jaxlib finds it, and one that can't serve the GPU is a reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from triton_assemblers import ASSEMBLERS
from triton_copy import copy_recipe

from attnops import OperationMetadata, OperationRegistry
from attnops.dispatch.request import AttentionRequest
from attnops_triton.language import assembler, compat
from attnops_triton.language.assembler import Assembler
from attnops_triton.language.build import build
from attnops_triton.targets import capability


@pytest.fixture
def ptxas(tmp_path: Path) -> Callable[[str, str], Path]:
    """A function that makes a ptxas of a version in a folder, and returns the folder."""

    def make(folder: str, version: str) -> Path:
        path = tmp_path / folder / "ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release x, V{version}'\n")
        path.chmod(0o755)
        return path.parent

    return make


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The folder of jaxlib's plugin."""
    return tmp_path / "site-packages" / "jax_cuda12_plugin"


def found(path: str, plugin: Path | None) -> tuple[str, tuple[int, int]] | None:
    one = assembler._find(path, plugin)
    return None if one is None else (one.path.parent.parent.name, one.release)


def test_path_comes_before_the_wheel_and_unusable_ones_are_skipped(
    ptxas: Callable[[str, str], Path], plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "TOOLKITS", (tmp_path / "cuda",))
    wheel = ptxas("site-packages/nvidia/cuda_nvcc/bin", "12.9.86")
    assert found("/nowhere", plugin) == ("cuda_nvcc", (12, 9))
    assert found("/nowhere", None) is None
    too_old, broken = ptxas("old/bin", "11.7.64"), ptxas("broken/bin", "12.3.103")
    assert found(f"{too_old}:{broken}", plugin) == (wheel.parent.name, (12, 9))
    toolkit = ptxas("toolkit/bin", "12.6.20")
    # To look into a folder that may not be read raises; for root, to whom all are open, a name too long does.
    assert found(f"/{'x' * 300}:{too_old}:{toolkit}", plugin) == ("toolkit", (12, 6))
    ptxas("cuda/bin", "13.0.48")
    assert found(str(too_old), plugin) == ("cuda", (13, 0))


@pytest.mark.parametrize("ptxas", ASSEMBLERS, ids=["CUDA 12.9", "CUDA 13"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_programs_are_in_a_version_of_ptx_that_both_assemblers_read(arch: str, ptxas: Path, tmp_path: Path) -> None:
    recipe = copy_recipe(arch)
    (tmp_path / "copy.ptx").write_bytes(build(recipe).code)
    accelerated = "a" if capability(arch) >= 90 else ""
    command = [ptxas, tmp_path / "copy.ptx", "-o", tmp_path / "copy.cubin", f"-arch={arch}{accelerated}"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("arch", "release", "message"),
    [
        ("sm_90", (12, 0), ""),
        ("sm_80", (11, 8), "sm_80 needs that of CUDA 12.0 or later"),
        ("sm_89", None, "ptxas=not found: jaxlib assembles the kernels with it; pip install 'nvidia-cuda-nvcc"),
        ("sm_100", (12, 7), "sm_100 needs that of CUDA 12.8 or later; pip install 'nvidia-cuda-nvcc"),
        ("sm_103", (12, 8), "sm_103 needs that of CUDA 12.9"),
        ("sm_120", (12, 8), ""),
        ("sm_121", (12, 8), "sm_121 needs that of CUDA 12.9"),
        ("sm_110", (13, 0), ""),
        ("gfx1100", None, "GPU=gfx1100: must be one of gfx90a, gfx942, gfx950"),
        ("gfx950", None, ""),
        ("sm_75", None, "GPU=sm_75: must be at least sm_80"),
    ],
)
def test_a_gpu_and_an_assembler_that_do_not_fit_are_a_reason(
    arch: str, release: tuple[int, int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = reasons_on(monkeypatch, arch, release, driver=None, plugin="jax_cuda13_plugin")
    assert len(reasons) == bool(message)
    assert message in "".join(reasons)


@pytest.mark.parametrize(
    ("release", "driver", "plugin", "message"),
    [
        ((13, 1), (12, 8), "jax_cuda12_plugin", "the driver is of CUDA 12.8, which may refuse code of a newer major"),
        ((13, 1), (12, 8), "jax_cuda13_plugin", "put the folder of a ptxas of CUDA 12 first in PATH, or update the"),
        ((13, 1), None, "jax_cuda12_plugin", "jaxlib's plugin is jax_cuda12_plugin"),
        # The driver loads code of its own major release and of older ones.
        ((13, 1), (13, 0), "jax_cuda12_plugin", ""),
        ((12, 9), (13, 0), "jax_cuda13_plugin", ""),
        ((12, 9), (12, 2), "jax_cuda12_plugin", ""),
        ((12, 9), None, "jax_cuda13_plugin", ""),
        ((13, 1), None, None, ""),
    ],
)
def test_an_assembler_of_a_newer_major_release_than_the_driver_is_a_reason(
    release: tuple[int, int], driver: tuple[int, int] | None, plugin: str | None, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reasons = reasons_on(monkeypatch, "sm_90", release, driver, plugin)
    assert len(reasons) == bool(message)
    assert message in "".join(reasons)


def test_the_release_of_the_driver_is_read_from_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, version: int, error: int) -> None:
            self.version, self.error = version, error

        def cuDriverGetVersion(self, target: Any) -> int:
            target._obj.value = self.version
            return self.error

    for version, error, expected in ((12040, 0, (12, 4)), (13000, 0, (13, 0)), (0, 100, None)):
        library = Library(version, error)
        monkeypatch.setattr(assembler.ctypes, "CDLL", lambda _, library=library: library)
        assert assembler.driver.__wrapped__() == expected


def reasons_on(
    monkeypatch: pytest.MonkeyPatch, arch: str, release: tuple[int, int] | None, driver: tuple[int, int] | None,
    plugin: str | None,
) -> list[str]:  # fmt: skip
    """The reasons against a call on a machine with this GPU, assembler, driver and plugin of jaxlib."""
    monkeypatch.setattr(compat, "device_arch", lambda: arch)
    monkeypatch.setattr(assembler, "find", lambda: release and Assembler(Path("/usr/local/cuda/bin/ptxas"), release))
    monkeypatch.setattr(assembler, "driver", lambda: driver)
    monkeypatch.setattr(assembler, "_plugin", lambda: (plugin and Path(plugin), *assembler.PLUGINS[0][1:]))
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    operation = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform=platform))
    request = AttentionRequest(
        platform=platform, batch=1, query_length=64, key_length=64, heads=2, kv_heads=2, head_dim=64,
        value_head_dim=64, dtypes=("bfloat16",) * 3,
    )  # fmt: skip
    return [str(reason) for reason in operation.reasons(request)]
