"""Intervals of slots, and the tiles that they need, held to the masks themselves."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attnops.masks import And, Causal, Chunked, Lengths, Mask, SlidingWindow
from attnops_caches.masks import AtSlots, Held, Slots
from attnops_triton.caches.intervals import interval
from attnops_triton.caches.kernels import scores

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


@pytest.fixture(autouse=True)
def numpy_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' functions compute with numbers, which stand for pointers to them."""
    given: dict[str, Any] = {"load": int, "minimum": np.minimum, "maximum": np.maximum, "where": np.where}
    monkeypatch.setattr(scores, "tl", SimpleNamespace(**given))


@pytest.mark.parametrize("name", MASKS)
def test_an_interval_is_what_the_mask_allows(name: str) -> None:
    mask = by_slot(MASKS[name])
    seen = interval(mask, (B, T, S))
    assert seen is not None
    columns = [np.asarray(x)[:, None, None] for x in seen]
    got = scores.within.fn(None, None, np.arange(T)[:, None], np.arange(S), columns, ())
    np.testing.assert_array_equal(got, allowed(mask))


def allowed(mask: Mask) -> Any:
    return np.broadcast_to(np.asarray(mask.dense(B, 1, T, S)), (B, 1, T, S))[:, 0]


@pytest.mark.parametrize("bq", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["causal", "both sides"])
def test_tiles_have_what_some_and_what_all_of_their_queries_see(name: str, bq: int) -> None:
    mask = by_slot(MASKS[name])
    seen = interval(mask, (B, T, S))
    assert seen is not None
    options: Any = SimpleNamespace(bq=bq, writes=False, tiles=SimpleNamespace(bk=1))
    for b, i in itertools.product(range(B), range(-(-T // bq))):
        x = SimpleNamespace(mask=[int(column[b]) for column in seen])
        first, stop, full_start, full_stop = scores.tiles_within.fn(x, SimpleNamespace(T=T, S=S), 0, i, options)
        rows = allowed(mask)[b, i * bq : (i + 1) * bq]
        union, common = set(np.flatnonzero(rows.any(0)).tolist()), set(np.flatnonzero(rows.all(0)).tolist())
        assert union <= set(range(first, stop))
        if rows.any(1).all() or not union:
            assert union == set(range(first, stop))
        assert common == set(range(full_start, full_stop))


@pytest.mark.parametrize("T", [2, 100])
def test_a_query_of_one_row_may_begin_anywhere(T: int) -> None:
    query = jnp.arange(T)
    exists = (query >= T // 2) & (query < T - 1)
    slots = Slots(jnp.array([-3]), jnp.array([3]), jnp.array([S]), None, None, S)
    held: Any = Held(jnp.where(exists, 5 + query - T // 2, -1)[None], slots)
    seen = interval(held, (1, T, S))
    assert seen is not None
    assert [int(x[0]) for x in (seen.first, seen.stop)] == [3, S]
    got = (query >= seen.begin) & (query < seen.end)
    np.testing.assert_array_equal(got, exists)


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
