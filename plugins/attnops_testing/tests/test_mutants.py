"""The suite can fail: each mutant of a right implementation is found by the feature that ought to find it."""

import functools
from typing import ClassVar

import pytest
from attention_in_steps import Reference
from attention_mutants import MUTANTS

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops_testing.behaviours import BEHAVIOURS, memory_growth
from attnops_testing.pairs import joined, rows_of_each
from attnops_testing.runner import Outcome, Status, Subject, attempt


def check(cls: type[OperationImpl], name: str) -> Outcome:
    subject = Subject(operation=cls)
    if name in BEHAVIOURS:
        return attempt(name, functools.partial(BEHAVIOURS[name], subject))
    return subject.check(name.split(" + "))


IN_ROWS = [
    (mutant, row)
    for mutant in MUTANTS
    for row in rows_of_each()
    if mutant.found_by in row
    # Documents one after the other have a batch of 1.
    and not (mutant.found_by == "mask per batch" and "total-token layout" in row)
]


def test_most_mutants_are_of_a_feature_that_a_row_has():
    assert len(MUTANTS) >= 30
    assert len(IN_ROWS) >= 0.8 * len(MUTANTS)


@pytest.mark.parametrize(("mutant", "row"), IN_ROWS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.tier(quick=["CausalOffsetIgnored-"], every=3)
def test_a_mutant_is_wrong_where_its_feature_is_one_of_several(mutant, row):
    outcome = Subject(operation=mutant).small(4 if "GQA" in row else 2).check(row)
    assert outcome.status is Status.WRONG, f"{mutant.__name__} is {outcome.status} in {joined(row)}"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[pytest.mark.slow] if any(mutant is other for other, _ in IN_ROWS) else [])
        for mutant in MUTANTS
    ],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.tier(quick=["OneRowOfSegmentsForTheFirstBatch", "GradientZero", "MaxLogitsOfSinksToo"], every=3)
def test_a_mutant_is_wrong_in_its_feature_alone(mutant):
    outcome = check(mutant, mutant.found_by)
    assert outcome.status is Status.WRONG, f"{mutant.__name__} is {outcome.status} in {mutant.found_by!r}"


def test_memory_that_is_not_declared_is_wrong():
    class Undeclared(Reference):
        limits: ClassVar = {"native": Limits(bias_kinds=None)}

    for cls, status in ((Reference, Status.NOT_RUN), (Undeclared, Status.WRONG)):
        outcome = attempt("memory", functools.partial(memory_growth, Subject(operation=cls), "Causal"))
        assert outcome.status is status, outcome
    assert "Limits(linear_memory=False)" in outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(mutant.found_by for mutant in MUTANTS))
@pytest.mark.tier(every=3)
def test_the_unmutated_is_right_in_each_feature_alone(name):
    outcome = check(Reference, name)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.parametrize("row", rows_of_each(), ids=joined)
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_the_unmutated_is_right_in_every_row(row):
    assert {outcome.status for outcome in Subject(operation=Reference).check_row(row)} == {Status.RIGHT}
