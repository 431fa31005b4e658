"""Operations that know nothing of caches serve all of them; and every combination with the operations of the core."""

from __future__ import annotations

import itertools

import pytest
from attention_in_steps import Reference

from attnops.testing.cache_features import CACHE_FEATURES, are_compatible, cache_rows
from attnops.testing.caches import cache_name, check_cache, check_cache_row
from attnops.testing.runner import Status, Subject


@pytest.mark.parametrize("row", cache_rows(), ids=cache_name)
def test_an_operation_that_knows_no_caches_serves_them(row: tuple[str, ...]) -> None:
    assert not [name for name in vars(Reference) if name.startswith("cached_")]
    outcomes = check_cache_row(Subject(operation=Reference), row)
    assert [outcome.status for outcome in outcomes] == [Status.RIGHT], outcomes


def group(name: str) -> list[str | None]:
    """The features of a group, and None."""
    return [None, *(feature for feature, x in CACHE_FEATURES.items() if x.group == name)]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("content", group("content"))
@pytest.mark.parametrize("codec", group("codec"))
@pytest.mark.parametrize("storage", group("storage"))
@pytest.mark.parametrize("operation", ["attnops:flash", "attnops:vanilla"])
def test_every_combination(operation: str, storage: str | None, codec: str | None, content: str | None) -> None:
    """Storage × codec × content × mask × T × padded or packed."""
    subject = Subject(operation=operation)
    for others in itertools.product(*map(group, ("mask", "length", "rows"))):
        names = [name for name in (storage, codec, content, *others) if name is not None]
        if all(are_compatible(*pair) for pair in itertools.combinations(names, 2)):
            outcome = check_cache(subject, names)
            assert outcome.status is Status.RIGHT, outcome
