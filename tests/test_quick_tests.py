"""Every feature has a quick test on every backend, see tools/quick_tests.py; and marks of tiers name cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiers

ROOT = Path(__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import quick_tests\nitems = quick_tests.collect()\n{code}"]
    return subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True)


@pytest.mark.slow
def test_every_feature_has_a_quick_test_on_every_backend_and_a_lost_one_is_named() -> None:
    found = run(
        "print(quick_tests.missing(items))\n"
        "kept = [x for x in items if 'GQA' not in x.name or x.cls.operation != 'vanilla']\n"
        "print(quick_tests.missing(kept))"
    )
    assert found.returncode == 0, found.stderr
    everything, without_gqa = found.stdout.splitlines()[-2:]
    assert everything == "[]"
    assert "vanilla: GQA, " in without_gqa


@pytest.mark.slow
def test_every_case_that_a_tier_names_is_there(request: pytest.FixtureRequest) -> None:
    """Of all tests that this run collected, also those that it leaves out."""
    assert request.config.stash[tiers.UNKNOWN] == []


def test_a_case_that_a_tier_names_and_is_not_there_is_found() -> None:
    mark = pytest.mark.tier(quick=["a", "c"]).mark

    def found(*arguments: str, cases: str) -> list[str]:
        items: Any = [
            SimpleNamespace(
                nodeid=f"test_it.py::test[{x}]", callspec=SimpleNamespace(id=x), get_closest_marker=lambda _: mark
            )
            for x in cases
        ]
        config: Any = SimpleNamespace(args=arguments, stash={})
        tiers.pytest_collection_modifyitems(config, items)
        return config.stash[tiers.UNKNOWN]

    assert found("tests", cases="ab") == ["test_it.py::test: c"]
    assert found("tests", cases="abc") == found("test_it.py::test[a]", cases="a") == []
