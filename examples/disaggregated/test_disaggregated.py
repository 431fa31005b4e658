"""Two processes give the tokens of one, also if each is killed in the middle."""

from __future__ import annotations

import pytest
from fast_compile import XLA_FLAGS

from .__main__ import MAX_TOKENS, PROMPTS, alone, killed


@pytest.mark.slow  # four processes that import and compile: no smaller run kills both in the middle
def test_every_request_is_answered_as_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    found, again = killed()
    assert found == alone()
    assert [len(x) for x in found] == [MAX_TOKENS] * len(PROMPTS)
    assert again >= 2
