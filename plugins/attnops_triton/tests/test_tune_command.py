"""`attnops tune`: its options reach the tuning, and errors in them are reported in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attnops_cli
from attnops_triton import tune_command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["tune", *arguments])


def test_the_options_reach_the_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(tune_command, "run", lambda *options: given.extend(options[:-1]) or options[-1]("tuned"))
    path = tmp_path / "t.json"
    result = run("-D", "96", "--length", "512", "--output", str(path))
    assert (result.exit_code, result.output) == (0, "tuned\n")
    assert given == [["bfloat16"], [96], [512], ["full", "causal"], path, [], ""]


def test_an_unknown_mask_or_gpu_is_an_error() -> None:
    for options, said in {
        ("--mask", "window"): "mask='window' must be one of ['full', 'causal']",
        ("--dry", "sm_1"): "dry='sm_1' is unknown; use one of",
    }.items():
        result = run(*options)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output
