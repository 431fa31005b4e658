"""Drafts are what followed the same tokens earlier in the row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attnops_lm.generation.speculative import accepted, look_up


def reference(row: list[int], count: int, largest: int) -> list[int]:
    """By trying every place, longest runs of last tokens first."""
    for n in range(largest, 0, -1):
        places = [j for j in range(n, len(row)) if row[j - n : j] == row[len(row) - n :] and min(row[j - n : j]) >= 0]
        if places:
            full = [j for j in places if j + count <= len(row)]
            start = max(full) if full else min(places)
            return row[start : start + count]
    return []


@pytest.mark.slow
def test_drafts_are_those_of_a_search_of_every_place() -> None:
    rng, S, count = np.random.default_rng(0), 24, 3
    lengths = rng.integers(1, S + 1, 200)
    tokens = rng.integers(0, 4, (200, S))
    tokens[:50, :5] = -1
    lengths[:50] = np.maximum(lengths[:50], 6)
    tokens[np.arange(S) >= lengths[:, None]] = 99  # what is not there is not looked at
    drafts, found = look_up(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), count, 2)
    for row, n, draft, size in zip(tokens, lengths, np.asarray(drafts), np.asarray(found), strict=True):
        assert draft[:size].tolist() == reference(row[:n].tolist(), count, 2)
    assert 0 < (np.asarray(found) == 0).sum() < 100


@pytest.mark.slow
def test_drafts_count_up_to_the_first_that_is_wrong() -> None:
    drafts, picked = jnp.asarray([[1, 2, 3], [1, 9, 3], [1, 2, 3]]), jnp.asarray([[1, 2, 3, 4]] * 3)
    assert accepted(drafts, jnp.asarray([3, 3, 1]), picked).tolist() == [3, 1, 1]
