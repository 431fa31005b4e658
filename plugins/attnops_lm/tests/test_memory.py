"""`release_memory` gives freed memory back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lm_server import FakeEngine

from attnops_lm import memory
from attnops_lm.serve import engine

MB = 1 << 20


def resident() -> int:
    """The resident anonymous memory of this process, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps freed memory, and /proc tells of it")
def test_blocks_that_are_freed_below_one_that_stays_are_given_back() -> None:
    memory.release_memory()
    before = resident()
    # Below the size that glibc maps on its own; and more than other tests may have left free.
    blocks = [bytes(1000) for _ in range(200 * MB // 1000)]
    stays = blocks[-1]
    assert resident() - before > 80 * MB
    del blocks
    memory.release_memory()
    assert resident() - before < 40 * MB
    assert stays


def test_what_compiling_took_is_given_back_after_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    fake = FakeEngine(chunks=[8, 64])
    monkeypatch.setattr(engine, "release_memory", lambda: done.append("release"))
    monkeypatch.setattr(fake, "_call", lambda batch: done.append(len(batch.tokens)))
    monkeypatch.setattr(fake, "_copy_pages", lambda _: done.append("copy"))
    fake.warm()
    assert done == [4, "release", 8, "release", 64, "release", "copy", "release"]
