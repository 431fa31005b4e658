"""The command line: what each command prints, and its exit status."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attnops
from attnops import OperationRegistry, cli
from attnops.operations.vanilla import VanillaAttention

CORE = {"attnops:auto", "attnops:sdpa", "attnops:vanilla"}


@pytest.fixture(autouse=True)
def _core_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever else is installed here is not what is tested."""
    monkeypatch.setenv("ATTNOPS_NO_AUTOLOAD", "1")
    registered = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = registered
    monkeypatch.undo()
    OperationRegistry.refresh()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_app(), list(arguments))


def run_json(*arguments: str, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def register(**body: Any) -> None:
    """Register an operation "zeta" of a distribution "acme"."""
    name = {"get_impl_name": classmethod(lambda cls: "zeta"), "__module__": "acme.zeta"}
    OperationRegistry.register(type("Zeta", (VanillaAttention,), name | body))


def forward(self: Any, query: Any, key: Any, value: Any) -> Any:
    """A forward without options."""


def core_of(plugins: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {plugin["name"]: plugin for plugin in plugins if plugin["distribution"] == "attnops"}


# main


def test_every_command_is_there() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in cli.COMMANDS:
        assert f" {command} " in result.output
        assert run(command, "--help").exit_code == 0


def test_version_is_printed() -> None:
    assert (run("--version").exit_code, run("--version").output) == (0, f"{attnops.__version__}\n")


def test_without_its_libraries_one_sentence_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_typer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    # A string as the status is printed to stderr, and the status is 1.
    assert caught.value.code == "The attnops command needs typer, which is not installed: pip install 'attnops[cli]'"


def test_python_m_attnops_and_what_import_needs() -> None:
    code = (
        "import sys, attnops; "
        "loaded = [m for m in sys.modules if m.startswith(('typer', 'rich', 'attnops.cli', 'attnops.operations'))]; "
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


def test_list_shows_what_is_known_without_an_import() -> None:
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


def test_list_shows_what_serves_which_platform() -> None:
    register(forward_gpu=forward, priority=3)
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["attnops:vanilla"]["state"] == "loaded"
    assert found["attnops:vanilla"]["platforms"] == ["any"]
    assert found["attnops:sdpa"]["platforms"] == ["cpu", "cuda", "rocm", "tpu", "tt"]
    assert (found["acme:zeta"]["platforms"], found["acme:zeta"]["priority"]) == (["cuda", "rocm"], 3)

    table = [line.split() for line in run("list").output.splitlines()]
    assert ["zeta", "attention", "cuda,", "rocm", "acme", "loaded"] in table


def test_list_does_not_count_what_is_the_cores() -> None:
    sdpa = OperationRegistry.get("sdpa", "cpu")
    name = {"get_impl_name": classmethod(lambda cls: "sdpa"), "__module__": "acme.sdpa", "forward_tpu": forward}
    OperationRegistry.register(type("Sdpa", (sdpa,), name))
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["acme:sdpa"]["platforms"] == ["tpu"]


def test_list_gives_the_cause_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", "attnops:sdpa")
    result = run("list")
    assert result.exit_code == 0
    assert "attnops:sdpa is disabled: ATTNOPS_DISABLE names attnops:sdpa\n" in result.output
    assert core_of(run_json("list"))["attnops:sdpa"]["cause"] == "ATTNOPS_DISABLE names attnops:sdpa"
