"""`import attnops`: every public name is there, and none is loaded before it is used."""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import attnops


def test_every_public_name_is_the_one_that_type_checkers_see() -> None:
    tree = ast.parse(Path(attnops.__file__).read_text())
    typed = {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
             for alias in node.names if node.module.startswith("attnops.")}  # fmt: skip
    assert sorted(typed) == sorted(attnops.__all__)
    for name, module in typed.items():
        assert getattr(attnops, name) is getattr(importlib.import_module(module or ""), name)
    assert set(attnops.__all__) <= set(dir(attnops))
    assert attnops.masks.Causal is importlib.import_module("attnops.masks").Causal


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'attnops' has no attribute 'nothing'"):
        attnops.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from attnops import nothing  # noqa: F401


def test_without_attnops_cli_python_m_attnops_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnops_cli", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("attnops", run_name="__main__")
    # A string as the status is printed to stderr, and the status is 1.
    said = "The attnops command is in attnops-cli, which is not installed: pip install attnops-cli"
    assert caught.value.code == said


@pytest.mark.slow
def test_importing_attnops_loads_nothing_of_it_and_using_it_no_kernel_language() -> None:
    code = (
        "import sys, attnops; loaded = sorted(m for m in sys.modules if m.startswith('attnops')); "
        "assert loaded == ['attnops', 'attnops._version'], loaded; "
        "from attnops import *; assert OperationRegistry.list_implementations(); "
        "found = [m for m in sys.modules if 'pallas' in m or 'triton' in m.split('.')]; assert not found, found"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
