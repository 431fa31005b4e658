"""Transfers that take place at any time between their start and the wait for them: unwritten memory is NaN."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from attnops_testing.caches import check_cache
from attnops_testing.runner import Status, Subject
from attnops_tpu.caches import transposed
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.generations import target

SUBJECT = Subject(operation="attnops-tpu:flash", platform="tpu", interpret=True)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer takes place when it is started or when it is waited for, at random."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    start, random = interpreter.dma_start, np.random.default_rng(0)

    def at_once_or_late(*given: Any, **options: Any) -> Any:
        interpreter._get_shared_memory().dma_execution_mode = random.choice(["eager", "on_wait"])
        return start(*given, **options)

    jax.clear_caches()  # its keys lack these functions
    monkeypatch.setattr(interpreter, "dma_start", at_once_or_late)
    monkeypatch.setattr(transposed, "SUB_ROWS", 16)
    monkeypatch.setattr(transposed, "SUB_KEYS", 16)


@pytest.mark.parametrize("features", [
    ("paged", "GQA"),
    ("paged", "left padding", "GQA", "int8 by token_head", "op.step"),
    ("paged", "19 queries", "GQA", "op.step"),
    ("paged", "packed rows", "GQA", "19 queries", "op.step"),
], ids="+".join)  # fmt: skip
def test_values_do_not_depend_on_when_transfers_take_place(features: tuple[str, ...]) -> None:
    with target("v6e"):
        outcome = check_cache(SUBJECT, features)
    assert outcome.status is Status.RIGHT, outcome.detail


def test_a_transfer_to_a_buffer_in_use_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "_after", lambda self, buffer: buffer)  # all tiles have the same buffer
    with target("v6e"):
        outcome = check_cache(SUBJECT, ("paged", "GQA"))
    assert outcome.status is Status.WRONG, outcome.detail
