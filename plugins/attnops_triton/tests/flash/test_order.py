"""The order of sums is a property of the place where a call is traced."""

from __future__ import annotations

from attnops_triton.flash.order import is_unordered, unordered


def test_sums_are_unordered_inside_the_context_alone() -> None:
    assert not is_unordered()
    with unordered():
        with unordered():
            assert is_unordered()
        assert is_unordered()
    assert not is_unordered()
