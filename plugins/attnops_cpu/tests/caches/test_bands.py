"""Masks split into what the kernel computes by positions, and what it reads as booleans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Chunked, Full, Mask, SlidingWindow
from attnops_caches import DenseCache, WindowCache
from attnops_cpu.caches.bands import FAR, Bands, bands


def split(mask: Mask | None, **window: Any) -> Bands:
    """The mask of a call, as the reader gets it, split."""
    given: dict[str, Any] = {"batch": 2, "kv_heads": 2, "head_dim": 8, "dtype": jnp.float32}
    found = []

    def trace() -> None:
        cache = WindowCache.create(**given, **window) if window else DenseCache.create(length=9, **given)
        operation: Any = OperationRegistry.create("attnops-cpu:flash", OperationMetadata())
        call = operation.prepare(jnp.zeros((2, 3, 4, 8)), cache, **({} if mask is None else {"mask": mask}))
        found.append(bands(call.options["mask"]))

    jax.eval_shape(trace)
    return found[0]


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [(None, FAR, FAR), (Full(), FAR, FAR), (Causal(), FAR, 0), (SlidingWindow(5, 2), 5, 2),
     (SlidingWindow(None, 1), FAR, 1), (Causal() & SlidingWindow(5, None) & SlidingWindow(3, 7), 3, 0)],
    ids=repr,
)  # fmt: skip
def test_bands_are_intervals(mask: Mask | None, left: int, right: int) -> None:
    found = split(mask)
    assert (int(found.left), int(found.right), found.rest) == (left, right, None)
    assert found.held is not None


def test_a_ring_has_its_window_and_its_newest_slot() -> None:
    found = split(Causal(), window=4, max_append=3)
    assert (int(found.left), int(found.right), found.rest) == (3, 0, None)
    assert found.held is not None
    assert found.held.slots.newest is not None


def test_windows_that_vary_keep_their_axes() -> None:
    left = np.array([[1, 2, 3, 4]], np.int32)
    found = split(Causal() & SlidingWindow(left, 0))
    np.testing.assert_array_equal(found.left, left)
    assert int(found.right) == 0


@pytest.mark.parametrize("mask", [Chunked(3), ~Causal(), Causal() | SlidingWindow(2, 2)], ids=repr)
def test_other_masks_are_left_over(mask: Mask) -> None:
    found = split(SlidingWindow(6, 0) & mask)
    assert (int(found.left), int(found.right)) == (6, 0)
    assert found.rest is not None
    assert "Segments" not in found.rest.kinds()  # what the row holds is the kernel's
    assert found.held is not None
