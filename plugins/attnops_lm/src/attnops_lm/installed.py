"""Which of the installed operations a demonstration runs."""

from __future__ import annotations

import attnops


def attention_operations() -> list[str]:
    """The names of the installed operations that compute softmax attention or can't be loaded."""
    return [name for name in attnops.OperationRegistry.list_implementations() if _is_attention(name)]


def _is_attention(name: str) -> bool:
    try:
        return attnops.OperationRegistry.get(name).computes == "attention"
    except Exception:  # the demonstration shows the error
        return True
