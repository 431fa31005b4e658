"""Which of `make test`, `make test-all` and `make exhaustive` runs a test; CONTRIBUTING.md has the rule of each.

A test without a mark is quick; ``slow`` and ``exhaustive`` mark whole tests or single parameters. Where cases of a test
differ, ``pytest.mark.tier(quick=[...], slow=[...], exhaustive=[...])`` names them by the ids in the test's brackets;
those that it does not name are of the first tier that is left out. With ``every=n`` each n-th slow case stays slow, and
those between are exhaustive. ``--share n``, which `.ci/run` gives, does the same to what remains of every test.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

# What `make test` gives pytest as ``-m``.
QUICK = "not slow and not exhaustive"
TIERS = ("quick", "slow", "exhaustive")
# How many slow cases of each test with ``every`` were collected.
_slow = pytest.StashKey[collections.Counter[str]]()
# The ids in marks that no collected case has.
UNKNOWN = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        "tier(quick=, slow=, exhaustive=, every=): which cases of a test run when; see tests/support/tiers.py",
    )
    config.stash[_slow] = collections.Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share`."""
    parser.addoption("--share", type=int, default=1, help="run each n-th slow case of a test, the first one included")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules that are slow as a whole alone in quick runs: importing Keras takes seconds."""
    if config.option.markexpr != QUICK or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    is_slow = re.search(r"^pytestmark = \[?pytest\.mark\.slow\b", collection_path.read_text(), re.MULTILINE)
    return is_slow is not None or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a case ``slow`` or ``exhaustive`` as its test says."""
    marker = item.get_closest_marker("tier")
    if marker is not None:
        mark(item, marker)
    elif not hasattr(item, "callspec"):
        return
    every = (marker.kwargs.get("every", 1) if marker else 1) * item.config.option.share
    if every > 1 and item.get_closest_marker("slow") and not item.get_closest_marker("exhaustive"):
        test = item.nodeid.partition("[")[0]
        if item.config.stash[_slow][test] % every:
            item.add_marker("exhaustive")
        item.config.stash[_slow][test] += 1


def mark(item: pytest.Item, marker: pytest.Mark) -> None:
    """Mark a case by the tiers that its test names."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        raise pytest.UsageError(f"{item.nodeid} has one case: mark it slow or exhaustive, not tier")
    others = next((tier for tier in TIERS if tier not in marker.kwargs), None)
    tier = next((tier for tier in TIERS if callspec.id in marker.kwargs.get(tier, ())), others)
    if tier is None:
        raise pytest.UsageError(f"{item.nodeid} is in no tier: leave one of {', '.join(TIERS)} out for all others")
    for name in TIERS[1 : TIERS.index(tier) + 1]:  # what is exhaustive is slow too
        item.add_marker(name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what marks name that is not there, unless only some cases of a test were asked for."""
    config.stash[UNKNOWN] = [] if any("::" in argument for argument in config.args) else unknown(items)


def unknown(items: Iterable[pytest.Item]) -> list[str]:
    """Ids in marks that no case has, a line each."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("tier"):
            name = item.nodeid.partition("[")[0]
            cases.setdefault(name, set()).add(item.callspec.id)  # type: ignore[attr-defined]
            named.setdefault(name, set()).update(*(marker.kwargs.get(tier, ()) for tier in TIERS))
    return [f"{name}: {case}" for name in named for case in sorted(named[name] - cases[name])]
