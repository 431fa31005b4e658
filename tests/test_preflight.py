"""What `make` says before it installs anything; see tools/preflight.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("preflight", Path(__file__).parents[1] / "tools" / "preflight.py")


@pytest.fixture
def preflight() -> Any:
    assert SPEC is not None
    assert SPEC.loader is not None
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module


def test_nothing_is_lacking_here(preflight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ROOM", 0)
    assert preflight.lacking(str(tmp_path / ".venv")) == []


def test_an_old_python_is_named(preflight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sys, "version_info", (3, 9, 18))
    (line,) = preflight.lacking(".venv")
    assert line.startswith("attnops needs Python 3.11 or newer, but ")
    assert line.endswith(" is 3.9; choose one with make PYTHON=...")


def test_a_full_disk_and_a_missing_venv_are_a_line_each(
    preflight: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    venv, disk = preflight.lacking(str(tmp_path / ".venv"))
    assert "has no venv with pip; install it" in venv
    assert f"up to 4.3 GB are installed in {tmp_path}, but 1.0 GB are free" in disk
