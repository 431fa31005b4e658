"""The suite's problems over caches can fail: each finds the mistakes that it ought to find."""

from __future__ import annotations

import pytest
from cache_mutants import MUTANTS

from attnops.testing.caches import check_cache
from attnops.testing.runner import Status, Subject

VANILLA = Subject(operation="attnops:vanilla")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_wrong_in_its_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    outcome = check_cache(VANILLA, MUTANTS[name].found_by.split(" + "))
    assert outcome.status is Status.WRONG, f"{name} is {outcome.status} in {outcome.name}"
    assert not outcome.raised, outcome.detail  # by its values


@pytest.mark.slow
@pytest.mark.parametrize("names", sorted({mutant.found_by for mutant in MUTANTS.values()}))
def test_what_has_no_mistake_is_right(names: str) -> None:
    outcome = check_cache(VANILLA, names.split(" + "))
    assert outcome.status is Status.RIGHT, outcome.detail
