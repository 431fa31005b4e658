"""The soak test: it passes with a good server, and finds what a bad one does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from lm_server import FakeEngine, running

from attnops_lm.serve.program import StepBatch, StepResult
from attnops_lm.soak_test import Soak


class Forgetful(FakeEngine):
    """Every 1,500th step draws other tokens."""

    def _call(self, batch: StepBatch) -> StepResult:
        result = super()._call(batch)
        return result._replace(tokens=result.tokens + 1) if self.counts["steps"] % 1500 == 1499 else result


def soak(engine: FakeEngine, **options: Any) -> Soak:
    async def run(url: str) -> Soak:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            found = Soak(client, "fake", 0)
            assert await found.run(60, 1.0, lambda: 7) == [7] * 8
            return found

    with running(engine, **options) as (_, url, _):
        return asyncio.run(run(url))


def test_a_good_server_has_no_faults() -> None:
    engine = FakeEngine(rows=4, pages=8, page_size=16, max_length=128)
    found = soak(engine)
    assert found.faults == []
    assert found.counts["answered"] + found.counts["cancelled"] == 60
    assert (found.counts["status 413"], found.counts["status 400"]) == (3, 3)
    assert engine.counts["cancelled"] > 0
    assert engine.counts["preempted"] > 0


@pytest.mark.slow
def test_a_wrong_answer_and_an_engine_that_fails_are_faults() -> None:
    assert any("but alone" in x for x in soak(Forgetful(rows=4, pages=8, max_length=128)).faults)
    faults = soak(FakeEngine(fails_after=1500)).faults
    assert any("the device is lost" in x for x in faults)
    assert any("Error" in x for x in faults)
