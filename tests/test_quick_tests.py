"""Every feature has a quick test on every backend; see tools/quick_tests.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_every_case_that_a_tier_names_is_there() -> None:
    code = (
        "import pytest, tiers\n"
        "class Collected:\n"
        "    def pytest_collection_finish(self, session): print('unknown', tiers.unknown(session.items))\n"
        "pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', '-n', '0'], [Collected()])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "unknown []" in found.stdout, found.stdout[-2000:] + found.stderr[-2000:]
