"""Transfers that take place at any time between their start and the wait for them: unwritten memory is NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from attnops_testing.caches import check_cache
from attnops_testing.runner import Status, Subject
from attnops_tpu.caches import transposed
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.caches.write_prompts import PromptWriter
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


class Unwaited(NamedTuple):
    """A transfer that may take place after the wait for it."""

    copy: Any

    def start(self) -> None:
        self.copy.start()

    def wait(self) -> None:
        pass


def unwaited(self: PromptWriter, i: Any, writes: Any = PromptWriter._writes) -> list[Unwaited]:
    return [Unwaited(copy) for copy in writes(self, i)]


@pytest.mark.parametrize(("of", "name", "mistake", "features"), [
    # All tiles have the same buffer; all chunks of prompts do; and keys are read before prompts are written.
    (Stream, "_after", lambda self, buffer: buffer, ("paged", "GQA")),
    (PromptWriter, "_at", lambda self, i: i * 0, ("paged", "packed rows", "19 queries", "op.step")),
    (PromptWriter, "_writes", unwaited, ("paged", "packed rows", "19 queries", "op.step")),
], ids=["tiles", "chunks", "keys before prompts"])  # fmt: skip
def test_a_transfer_at_the_wrong_time_is_caught(
    of: type, name: str, mistake: Any, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, mistake)
    with target("v6e"):
        outcome = check_cache(SUBJECT, features)
    assert outcome.status is not Status.RIGHT, outcome.detail
