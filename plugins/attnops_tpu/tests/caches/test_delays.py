"""Transfers that take place at any time between their start and the wait for them: unwritten memory is NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import PagedCache, Rows
from attnops_testing.caches import check_cache
from attnops_testing.runner import Status, Subject
from attnops_tpu.caches import transposed
from attnops_tpu.caches.in_place import Outputs, begin_of
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


def errors_of_outputs_in_place() -> np.ndarray:
    """The largest error of each packed query of a mixed batch that has several items of both sizes.

    A row's last tile has fewer queries than a tile, and reads those of the next row too.
    """
    sizes, held = [1, 23, 1, 3, 1, 11, 1], np.array([30, 5, 17, 9, 40, 20, 3])
    B, N = len(sizes), sum(sizes) + 2
    cache = PagedCache.create(batch=B, pages=B * 8, page_size=8, max_pages=8, kv_heads=2, head_dim=8,
                              dtype=jnp.float32, table=np.arange(B * 8).reshape(B, 8))  # fmt: skip
    before, query = (jax.random.normal(jax.random.key(i), (n, t, h, 8)) for i, (n, t, h) in
                     enumerate([(B, 40, 2), (1, N, 8)]))  # fmt: skip
    cache, rows = cache.append(before, -before, held), Rows(1 + np.cumsum([0, *sizes]), jnp.arange(B))
    results = []
    for name, options in ("attnops-tpu:flash", {"platform": "tpu", "interpret": True}), ("flash", {"platform": "cpu"}):
        operation = OperationRegistry.create(name, OperationMetadata(on_unsupported="error", block_k=32, **options))
        with target("v6e"):
            output, _ = operation.step(query, query[..., :2, :], -query[..., :2, :], cache, mask=Causal(), rows=rows)
        results.append(np.asarray(output.attention_outputs))
    return np.abs(results[0] - results[1]).max((0, 2, 3))


def whole_tiles(self: Outputs, item: Any, tile: Any = Outputs._tile) -> Any:
    """`Outputs._tile` as if each tile had as many queries as it has room for."""
    begin, count = begin_of(tile(self, item)[0], self.plan.N, self.plan.bq), self.plan.bq
    return begin, jnp.where(tile(self, item)[1] > 0, count, 0), slice(None)


def test_outputs_in_place_do_not_depend_on_when_they_are_transferred() -> None:
    assert errors_of_outputs_in_place().max() < 1e-5


@pytest.mark.parametrize(("name", "mistake"), [
    # An item puts its outputs where those of the one before still are; nothing is waited for; and a tile writes what
    # other rows have.
    ("wait_for_last", lambda self: None), ("wait", lambda self, item: None), ("_tile", whole_tiles),
], ids=["buffer in use", "never waited for", "others' outputs"])  # fmt: skip
def test_outputs_in_place_at_the_wrong_time_are_caught(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outputs, name, mistake)
    assert not errors_of_outputs_in_place().max() < 1e-5
