"""Sources of distributions on the command line: one that can't be used is told of with its distribution's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that installs a distribution with a source ``Vault``, and gives its module's text."""

    def install(name: str, text: str) -> None:
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (tmp_path / name / f"{name}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attnops.sources]\nVault = {name}:source\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise OSError('libacme.so.2')",
            "source Vault of acme-one can't be used: acme_one:source raised OSError: ",
        ),
        ("raise SystemExit(3)", "source Vault of acme-one can't be used: acme_one:source raised SystemExit: 3"),
        ("", "source Vault of acme-one can't be used: acme_one:source raised AttributeError: "),
        ("def source(*_): raise KeyError('slots')", "acme_one:source raised KeyError: 'slots'"),
        ("def source(*_): raise ValueError('slots=3 is odd')", "attnops: slots=3 is odd"),
        ("def source(query, *_): return query", "acme_one:source of acme-one must return (query, source, options)"),
    ],
)
def test_a_source_that_cannot_be_used_is_told_of(install: Install, run: Any, text: str, said: str) -> None:
    install("acme_one", text)
    result = run("explain", "vanilla", "--source", "vault")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_name_of_two_distributions_names_both(install: Install, run: Any) -> None:
    install("acme_one", "source = None")
    install("acme_two", "source = None")
    result = run("explain", "vanilla", "--source", "Vault")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "acme-one and acme-two have a source='Vault': uninstall all but one of them" in result.stderr
