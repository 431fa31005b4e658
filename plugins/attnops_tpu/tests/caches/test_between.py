"""Starts among reads: each once, in order, whatever the number of reads turns out to be."""

from __future__ import annotations

import functools

import pytest

from attnops_tpu.caches.between import Between


@pytest.mark.parametrize(("starts", "reads", "after_each"), [
    (8, 4, [2, 4, 6, 8]), (9, 4, [3, 6, 9, 9]), (2, 4, [1, 2, 2, 2]), (0, 4, [0, 0, 0, 0]), (8, 2, [4, 8, 8, 8]),
    (8, 8, [1, 2, 3, 4]),
])  # fmt: skip
def test_starts_are_spread_over_reads(starts: int, reads: int, after_each: list[int]) -> None:
    """Four reads, of which ``reads`` were foretold."""
    started: list[int] = []
    between = Between([functools.partial(started.append, i) for i in range(starts)], reads)
    counts = []
    for _ in after_each:
        between.go_on()
        counts.append(len(started))
    assert counts == after_each
    between.finish()
    assert started == list(range(starts))
    assert between.has_any == (starts > 0)
