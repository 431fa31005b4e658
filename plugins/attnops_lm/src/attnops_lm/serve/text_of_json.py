"""Encodes JSON in small pieces."""

from __future__ import annotations

import json
from typing import Any


def encoded(content: Any, depth: int = 5) -> bytes:
    """The JSON of dicts and lists; what is deeper than ``depth`` is encoded as one piece.

    `json.dumps` lets no other thread run until it ends, which for the log-probabilities of a long answer is seconds.

    Raises:
        ValueError: a number is infinite or NaN.
    """
    return _encoded(content, depth).encode()


def _encoded(content: Any, depth: int) -> str:
    if depth and isinstance(content, dict):
        return "{" + ",".join(f"{_dumps(key)}:{_encoded(x, depth - 1)}" for key, x in content.items()) + "}"
    if depth and isinstance(content, list):
        return "[" + ",".join(_encoded(x, depth - 1) for x in content) + "]"
    return _dumps(content)


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
