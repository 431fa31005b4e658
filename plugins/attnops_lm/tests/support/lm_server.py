"""Shared by tests of the server: the sizes of a small engine, and an engine without a model."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn

from attnops_lm.serve import Engine, application
from attnops_lm.serve.process import GRACE, HTTPServer
from attnops_lm.serve.program import StepBatch, StepResult
from attnops_lm.serve.scores import MOST_LIKELY, Logprobs
from attnops_lm.testing import Characters

PAGE, PAGES, LENGTH, CHUNK = 4, 20, 64, 12  # a request alone may take 16 pages of the 20


class FakeEngine(Engine):
    """Answers every prompt with ``!`` again and again, with log-probability -0.5; the next characters have -1, -1.5, ….
    Where a grammar decides, it draws from the allowed tokens, each with the same probability.

    Args:
        seconds: the time of a step.
        fails_after: the number of steps after which it fails.
        has_head: whether it can generate.
        **options: arguments of `Engine`, such as rows, pages and page_size.
    """

    def __init__(
        self, *, seconds: float = 0.0, fails_after: int = 1 << 30, has_head: bool = True, **options: Any
    ) -> None:
        config = SimpleNamespace(
            max_position_embeddings=1 << 20, vocab_size=96, hidden_size=4, has_linear_layers=False, has_head=has_head
        )  # fmt: skip
        model = SimpleNamespace(config=config, init_ragged_pages=lambda **_: ((), None))
        sizes = {"rows": 4, "pages": 1 << 10, "page_size": 16, "max_length": 1 << 12, "chunks": [64]}
        super().__init__(model, Characters(), **(sizes | options))  # type: ignore[arg-type]
        self.seconds, self.fails_after, self.generator = seconds, fails_after, np.random.default_rng(0)

    def _call(self, batch: StepBatch) -> StepResult:
        if self.counts["steps"] >= self.fails_after:
            raise RuntimeError("the device is lost")
        time.sleep(self.seconds)
        token = Characters().encode("!")[0]
        likely = np.arange(token, token + MOST_LIKELY) * np.ones((self.rows, 1), int)
        logprobs = Logprobs(np.full(self.rows, -0.5), likely, -0.5 * (likely - token + 1))  # type: ignore[arg-type]
        drawn = np.full(self.rows, token)
        for row in np.flatnonzero(batch.has_grammar):
            drawn[row] = self.generator.choice([i for i in range(96) if batch.allowed[row, i // 32] >> i % 32 & 1])
        return StepResult(drawn, False, logprobs, np.full((self.rows, 4), 2.0, np.float32))

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        self.counts["copied"] += len(copies)


class Scripted(FakeEngine):
    """Generates these tokens for every prompt; the log-probability of the i-th is −i."""

    def __init__(self, tokens: Sequence[int], tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer, self.script = tokenizer, tokens

    def _call(self, batch: StepBatch) -> StepResult:
        result = super()._call(batch)
        tokens = np.asarray([self.script[i] for i in batch.index])
        return result._replace(tokens=tokens, logprobs=result.logprobs._replace(sampled=-1.0 * batch.index))


@contextlib.contextmanager
def running(engine: FakeEngine, **options: Any) -> Iterator[tuple[HTTPServer, str, threading.Thread]]:
    """A server in a thread of this process; ``options`` are of `application`."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        app = application(engine, "fake", **options)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE)
        server = HTTPServer(config, engine)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{bound.getsockname()[1]}", thread
        finally:
            server.should_exit = True
            engine.stop()
            thread.join(60)
        assert not thread.is_alive()


def check_pages(engine: Engine) -> None:
    """Assert that each page is free, unused, or held by as many rows as its count says."""
    held = collections.Counter(page for request in engine.running for page in request.pages)
    pages = engine.pages
    assert [held[page] for page in range(pages.count)] == pages.references
    assert sorted([*held, *pages.free, *pages.unused]) == list(range(pages.count))
    assert set(pages.page_of.values()) == set(pages.content) >= set(pages.unused)
    for request in engine.running:
        assert engine.table[request.row, : len(request.pages)].tolist() == request.pages
        assert (engine.table[request.row, len(request.pages) :] == -1).all()
        # A page that a row still writes to is held by no other row.
        assert all(pages.references[page] == 1 for page in request.pages[request.computed // pages.size :])
