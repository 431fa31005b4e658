"""An engine without a model, for tests of what is around it: nothing is compiled."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..testing import Characters
from .engine import Engine
from .program import Batch


class FakeEngine(Engine):
    """Answers every prompt with ``!`` again and again.

    Args:
        seconds: that a step takes.
        fails_after: steps after which the device is lost.
        **options: see `Engine`.
    """

    def __init__(self, *, seconds: float = 0.0, fails_after: int = 1 << 30, **options: Any) -> None:
        config = SimpleNamespace(max_position_embeddings=1 << 20, vocab_size=96)
        model = SimpleNamespace(config=config, init_ragged_pages=lambda **_: ((), None))
        sizes = {"rows": 4, "pages": 1 << 10, "page_size": 16, "max_length": 1 << 12, "chunks": [64]}
        super().__init__(model, Characters(), **(sizes | options))  # type: ignore[arg-type]
        self.seconds, self.fails_after = seconds, fails_after

    def _call(self, batch: Batch) -> np.ndarray:
        if self.counts["steps"] >= self.fails_after:
            raise RuntimeError("the device is lost")
        time.sleep(self.seconds)
        return np.full(self.rows, Characters().encode("!")[0])

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        self.counts["copied"] += len(copies)
