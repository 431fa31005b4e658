"""Intervals of slots, and the tiles that they need, held to the masks themselves."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attnops.masks import And, Causal, Chunked, Lengths, Mask, SlidingWindow
from attnops_caches.masks import AtSlots, Held, Slots
from attnops_triton.caches.intervals import interval, of_tiles

pytestmark = pytest.mark.slow

B, T, S = 4, 5, 40
SLOTS = Slots(-jnp.array([0, 3, 0, 40]), jnp.array([0, 3, 0, 40]), jnp.array([40, 17, 0, 40]), None, None, S)
POSITIONS = jnp.where(jnp.arange(T) < 4, jnp.array([36, 9, 0, -5])[:, None] + jnp.arange(T), -1)
MASKS = {
    "held": None, "causal": Causal(0), "window": SlidingWindow(7, 0, 0), "both sides": SlidingWindow(3, 2, 0),
    "before": SlidingWindow(None, 0, 0), "both": Causal(0) & SlidingWindow(5, 9, 0),
    "without limit": SlidingWindow(2**31 - 1, 0, 0),
}  # fmt: skip


def by_slot(mask: Mask | None) -> Mask:
    held: Mask = Held(POSITIONS, SLOTS)
    parts: Any = () if mask is None else (mask.left, mask.right) if isinstance(mask, And) else (mask,)
    for part in parts:
        held = AtSlots(part, POSITIONS, SLOTS) & held
    return held.bind(B, 1, T, S)


@pytest.mark.parametrize("name", MASKS)
def test_an_interval_is_what_the_mask_allows(name: str) -> None:
    mask = by_slot(MASKS[name])
    seen = interval(mask, (B, T, S))
    assert seen is not None
    slot = np.arange(S)
    got = (slot >= np.asarray(seen.first)[..., None]) & (slot < np.asarray(seen.stop)[..., None])
    expected = np.asarray(mask.dense(B, 1, T, S))
    np.testing.assert_array_equal(got, np.broadcast_to(expected, (B, 1, T, S))[:, 0])


@pytest.mark.parametrize("bq", [1, 2, 4, 8])
def test_tiles_have_what_some_and_what_all_of_their_queries_see(bq: int) -> None:
    seen = interval(by_slot(MASKS["both sides"]), (B, T, S))
    assert seen is not None
    some, every = of_tiles(seen, bq)
    first, stop = map(np.asarray, seen)
    for b, i in itertools.product(range(B), range(-(-T // bq))):
        rows = [(int(x), int(y)) for x, y in zip(first[b], stop[b], strict=True)][i * bq : (i + 1) * bq]
        slots = [set(range(*x)) for x in rows]
        union, common = set.union(*slots), set.intersection(*slots)
        assert union == set() or (min(union), max(union) + 1) == (some.first[b, i], some.stop[b, i])
        if not union:
            assert some.first[b, i] >= some.stop[b, i]
        assert common == set(range(int(every.first[b, i]), int(every.stop[b, i])))


@pytest.mark.parametrize(
    "mask",
    [Chunked(4, 0), SlidingWindow(jnp.full((B, 1), 3), 0, 0), Causal(0) | SlidingWindow(2, 2, 0), Causal(1)],
    ids=repr,
)
def test_what_is_no_interval_that_is_known_when_tracing_is_none(mask: Mask) -> None:
    at: Any = AtSlots(mask, POSITIONS, SLOTS)
    assert interval(at, (B, T, S)) is None
    assert interval(Lengths(jnp.full(B, 3)).bind(B, 1, T, S), (B, T, S)) is None
    ring = Slots(SLOTS.shift, SLOTS.start, SLOTS.stop, jnp.zeros(B, jnp.int32), None, S)
    assert interval(Held(POSITIONS, ring), (B, T, S)) is None
