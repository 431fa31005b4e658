"""The state of transfers by name, and that a step's cases exclude each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attnops_tpu.caches.stream_state import StepCase, StreamState, step_cases
from attnops_tpu.caches.tile_sizes import Starts


def test_each_number_has_a_place_of_its_own() -> None:
    ref = np.zeros(StreamState.size, np.int32)
    state = StreamState(ref)
    names = [name for name in vars(StreamState) if hasattr(vars(StreamState)[name], "place")]
    for name in names:
        setattr(state, name, np.asarray(True) if name in ("next_is_whole", "next_enters") else 5)
    assert len(names) == StreamState.size
    assert sorted(ref) == [1, 1, 5, 5, 5, 5, 5, 5]
    state.next_is_whole = np.asarray(False)
    assert not state.next_is_whole
    assert state.next_enters
    state.piece = 7
    assert (state.piece, state.buffer, state.next_buffer) == (7, 5, 5)


@pytest.mark.parametrize("starts", Starts)
def test_one_case_holds_and_a_tile_that_is_masked_is_computed_so(starts: Starts) -> None:
    for is_full, next_is_whole in itertools.product(np.array([False, True]), repeat=2):
        (case,) = (case for case, holds in step_cases(starts, is_full, next_is_whole).items() if holds)
        if not is_full:
            assert case is StepCase.MASKED
        elif next_is_whole and starts is not Starts.BRANCHED:
            assert case is StepCase.WHOLE
        else:
            assert case is (StepCase.LAST if starts in (Starts.AFTER, Starts.BRANCHED) else StepCase.MASKED)
