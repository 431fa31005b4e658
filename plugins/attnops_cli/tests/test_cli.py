"""The command line: what each command prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import attnops
from attnops import OperationRegistry
from attnops_cli.commands import installed

CORE = {"attnops:auto", "attnops:sdpa", "attnops:vanilla"}
pytestmark = pytest.mark.usefixtures("core_alone")


def core_of(plugins: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {plugin["name"]: plugin for plugin in plugins if plugin["distribution"] == "attnops"}


# main


def test_every_command_is_there(run: Any) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in installed():
        assert f" {command} " in result.output
        described = run(command, "--help")
        assert (described.exit_code, "<bool>" in described.output) == (0, False)


def test_version_is_printed(run: Any) -> None:
    assert (run("--version").exit_code, run("--version").output) == (0, f"{attnops.__version__}\n")


@pytest.mark.slow
def test_python_m_attnops_and_what_import_needs() -> None:
    code = (
        "import sys, attnops; "
        "loaded = [m for m in sys.modules if m.startswith(('typer', 'rich', 'attnops_cli', 'attnops.operations'))]; "
        "assert not loaded, loaded; sys.argv = ['attnops', 'list', '--no-load']; "
        "import runpy; runpy.run_module('attnops', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == [
        "operation",
        "computes",
        "platforms",
        "distribution",
        "version",
        "state",
    ]
    assert f"vanilla ? ? attnops {attnops.__version__} discovered" in " ".join(done.stdout.split())


# list


def test_list_shows_what_is_known_without_an_import(run_json: Any) -> None:
    found = core_of(run_json("list", "--no-load"))
    assert set(found) >= CORE
    assert found["attnops:vanilla"] == {
        "operation": "vanilla",
        "platforms": None,
        "computes": None,
        "distribution": "attnops",
        "version": attnops.__version__,
        "state": "discovered",
        "name": "attnops:vanilla",
        "target": "attnops.operations.vanilla:VanillaAttention",
        "priority": None,
        "cause": "",
        "traceback": "",
    }


def test_list_shows_what_serves_which_platform(run: Any, run_json: Any, register: Any) -> None:
    register("forward_gpu", priority=3)
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["attnops:vanilla"]["state"] == "loaded"
    assert found["attnops:vanilla"]["platforms"] == ["any"]
    assert found["attnops:sdpa"]["platforms"] == ["cpu", "cuda", "rocm", "tpu", "tt"]
    assert (found["acme:zeta"]["platforms"], found["acme:zeta"]["priority"]) == (["cuda", "rocm"], 3)

    table = [line.split() for line in run("list").output.splitlines()]
    assert ["zeta", "attention", "cuda,", "rocm", "acme", "loaded"] in table


def test_list_does_not_count_what_is_the_cores(run_json: Any, register: Any) -> None:
    sdpa = OperationRegistry.get("sdpa", "cpu")
    register("forward_tpu", base=sdpa, get_impl_name=classmethod(lambda cls: "sdpa"), __module__="acme.sdpa")
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["acme:sdpa"]["platforms"] == ["tpu"]


def test_list_gives_the_cause_below(run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", "attnops:sdpa")
    result = run("list")
    assert result.exit_code == 0
    assert "attnops:sdpa is disabled: ATTNOPS_DISABLE names attnops:sdpa\n" in result.output
    assert core_of(run_json("list"))["attnops:sdpa"]["cause"] == "ATTNOPS_DISABLE names attnops:sdpa"
