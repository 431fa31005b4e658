"""Which lengths share one compiled program."""

from __future__ import annotations

import pytest
from triton_plans import TILES, make_plan

from attnops.kernels import Scoring
from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.sizes import divisible, is_even


@pytest.mark.parametrize(
    ("T", "S", "even"), [(64, 128, True), (96, 128, False), (128, 96, False), (100, 100, False), (32, 64, False)]
)
def test_tiles_divide_lengths_if_their_larger_side_does(T: int, S: int, even: bool) -> None:
    plan = make_plan(T=T, S=S)
    assert is_even(plan, TILES) is is_even(plan, TileSizes(TILES.bk, TILES.bq, 4, 2)) is even
    assert divisible(plan, TILES) == (frozenset("TS") if even else frozenset())


@pytest.mark.parametrize("scoring", [Scoring(array=True), Scoring(dense=1)])
def test_aligned_rows_of_an_array_are_a_program_of_their_own(scoring: Scoring) -> None:
    assert divisible(make_plan(T=112, S=112, scoring=scoring), TILES) == frozenset("TS")
    assert divisible(make_plan(T=112, S=100, scoring=scoring), TILES) == frozenset()
    assert divisible(make_plan(T=100, S=112, scoring=scoring), TILES) == frozenset()
