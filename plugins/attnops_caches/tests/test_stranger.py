"""Operations that know nothing of caches serve all of them."""

from __future__ import annotations

import pytest
from attention_in_steps import Reference

from attnops_testing.cache_features import cache_rows
from attnops_testing.caches import cache_name, check_cache_row
from attnops_testing.runner import Status, Subject


@pytest.mark.parametrize("row", cache_rows(), ids=cache_name)
@pytest.mark.tier(
    every=3,
    quick=[cache_name(cache_rows()[i]) for i in (0, 2)],
)
def test_an_operation_that_knows_no_caches_serves_them(row: tuple[str, ...]) -> None:
    assert not Reference.readers
    outcomes = check_cache_row(Subject(operation=Reference), row)
    assert [outcome.status for outcome in outcomes] == [Status.RIGHT], outcomes
