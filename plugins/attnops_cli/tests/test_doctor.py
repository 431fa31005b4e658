"""`attnops doctor`: what it finds, and its exit status."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import attnops
from attnops.dispatch.plugins import Plugin, State
from attnops_cli import doctor
from attnops_cli.known_bad import known_problems

pytestmark = pytest.mark.usefixtures("core_alone")


def test_doctor_on_a_sound_installation(run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEVICE_FILES", {})
    found = run_json("doctor")
    assert found["problems"] == [dataclasses.asdict(problem) for problem in known_problems(found["versions"])]
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["attnops"] == attnops.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["backend"], found["devices"]) == ("cpu", [str(device) for device in jax.devices()])
    states = {plugin["state"] for plugin in found["installed"] if plugin["distribution"] == "attnops"}
    assert states == {"loaded"}
    monkeypatch.setattr(doctor, "known_problems", lambda versions: [])
    assert run("doctor").exit_code == 0
    assert run("doctor").output.endswith("Nothing is wrong.\n")


def test_doctor_names_ambiguity_once(run: Any, run_json: Any, register: Any) -> None:
    for module in ("acme.zeta", "other.zeta"):
        register("forward_gpu", __module__=module, get_impl_name=classmethod(lambda cls: "vanilla"))
    found = run_json("doctor", status=1)
    assert [problem["what"] for problem in found["problems"]] == [
        "'vanilla' on cuda is served by acme:vanilla and other:vanilla with the same priority=0; use one of these "
        "names, or disable one with ATTNOPS_DISABLE (also on rocm)"
    ]
    result = run("doctor")
    assert result.exit_code == 1
    assert "\nWrong\n- 'vanilla' on cuda is served by acme:vanilla and other:vanilla" in result.output
    assert "'vanilla' on cuda is served by acme:vanilla and other:vanilla" in run("list").output


def test_a_distribution_that_cannot_be_read(
    run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "acme_nameless-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[attnops.operations]\nzeta = acme:Zeta\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("list")
    assert result.exit_code == 0
    assert "acme_nameless-1.0.dist-info can't be read, so its operations are missing" in result.output
    (problem,) = run_json("doctor", status=1)["problems"]
    assert (result.output.splitlines()[-1], problem["install"]) == (
        problem["what"],
        "pip uninstall it and install it again",
    )


def test_doctor_reports_that_jax_cannot_start(run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", cannot_start)
    found = run_json("doctor", status=1)
    assert [problem["what"] for problem in found["problems"]] == [
        "JAX can't start: Unable to initialize backend 'cuda'"
    ]
    assert (found["backend"], found["devices"]) == ("", [])


@pytest.mark.parametrize(
    ("devices", "installed", "commands"),
    [
        (["cpu"], {"attnops"}, []),
        (["cuda"], {"attnops"}, ["pip install attnops-triton"]),
        (["rocm", "rocm"], {"attnops", "attnops-triton"}, ["pip install attnops-ring"]),
        (["tpu"] * 4, {"attnops"}, ["pip install attnops-tpu", "pip install attnops-ring"]),
        (["tpu"], {"attnops", "attnops-tpu"}, []),
    ],
)
def test_doctor_suggests_what_serves_this_machine(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], installed: set[str], commands: list[str]
) -> None:
    monkeypatch.setattr(doctor, "DEVICE_FILES", {})
    found = doctor._suggestions([*dict.fromkeys(devices)], len(devices), installed)
    assert [suggestion.install for suggestion in found] == commands


def test_doctor_sees_an_accelerator_that_jax_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    files = {
        str(tmp_path / "nvidiactl"): ("cuda", "an NVIDIA GPU"),
        "/absent": ("tpu", "a TPU"),
    }
    monkeypatch.setattr(doctor, "DEVICE_FILES", files)
    (found,) = doctor._suggestions(["cpu"], 1, {"attnops"})
    assert (found.what, found.install) == (
        "this machine has an NVIDIA GPU, which JAX does not use",
        "pip install 'jax[cuda13]'",
    )
    assert [s.install for s in doctor._suggestions(["cuda"], 1, {"attnops-triton"})] == []


def test_doctor_says_why_the_kernels_for_this_machines_gpu_cannot_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("attnops_triton")
    from attnops_triton import TritonFlashAttention
    from attnops_triton.language import assembler, compat

    plugins = tuple(
        Plugin(distribution, "1", "flash", "", State.LOADED, operation_class=TritonFlashAttention)
        for distribution in ("attnops-triton", "other")
    )
    monkeypatch.setattr(compat, "device_arch", lambda: "sm_100")
    old = assembler.Assembler(Path("/usr/local/cuda/bin/ptxas"), (12, 6))
    monkeypatch.setattr(assembler, "find", lambda: old)
    assert doctor._machine_problems(["cpu"], plugins) == []
    (problem,) = doctor._machine_problems(["cuda"], plugins)
    assert problem.what == (
        "attnops-triton:flash can't run on cuda: ptxas=of CUDA 12.6 in /usr/local/cuda/bin: sm_100 needs that of CUDA "
        "12.8 or later"
    )
    assert problem.install.startswith("pip install 'nvidia-cuda-nvcc")
    monkeypatch.setattr(assembler, "find", lambda: old._replace(release=(12, 9)))
    assert doctor._machine_problems(["cuda"], plugins) == []


@pytest.mark.parametrize(
    ("platform", "commands"),
    [("cpu", []), ("cuda", ["pip install 'jax[cuda13]'", "pip install attnops-triton"]),
     ("rocm", ["pip install 'jax[rocm7-local]'", "pip install attnops-triton"]), ("TPU", ["pip install attnops-tpu"])],
)  # fmt: skip
def test_doctor_of_a_platform_that_is_not_here(
    run_json: Any, monkeypatch: pytest.MonkeyPatch, platform: str, commands: list[str]
) -> None:
    monkeypatch.setattr(doctor, "DEVICE_FILES", {})
    monkeypatch.setattr(doctor, "_versions", lambda: SOUND | {"libtpu": "0.1"})
    installed = doctor.find(True)
    mine = tuple(plugin for plugin in installed.plugins if plugin.distribution == "attnops")
    monkeypatch.setattr(doctor, "find", lambda *_: dataclasses.replace(installed, plugins=mine))
    found = run_json("doctor", "--platform", platform)
    assert [suggestion["install"] for suggestion in found["suggestions"]] == commands
    name = "flash" if platform == "cpu" else "sdpa"
    (line,) = found["kernels"]
    assert line.startswith(f"on {platform.lower()} auto runs attnops:{name} (forward_")


def test_doctor_of_an_unknown_platform(run: Any) -> None:
    result = run("doctor", "--platform", "npu")
    assert result.exit_code == 2
    assert "platform='npu' is unknown; use one of" in result.output


SOUND = {"python": "3.12.4", "jax": "0.11.2", "jaxlib": "0.11.2", "triton": "3.9.0"}


@pytest.mark.parametrize(
    ("versions", "problem", "install"),
    [
        ({}, None, None),
        ({"jaxlib": "0.10.2"}, "jax 0.11.2 and jaxlib 0.10.2 do not work together: the minor versions must be equal",
         "pip install 'jaxlib==0.11.2'"),
        ({"jax-cuda13-plugin": "0.10.0"}, "jaxlib 0.11.2 and jax-cuda13-plugin 0.10.0 do not work together",
         "pip install 'jax-cuda13-plugin==0.11.2'"),
    ],
)  # fmt: skip
def test_versions_that_do_not_work_together(versions: dict[str, str], problem: str | None, install: str | None) -> None:
    found = known_problems(SOUND | versions)
    if problem is None:
        assert found == []
    else:
        (only,) = found
        assert only.what.startswith(problem)
        assert only.install == install
