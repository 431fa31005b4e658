"""The error of what a backend of an engine does not serve."""

from __future__ import annotations

from attnops import Reason, UnsupportedError


def refusal(*reasons: Reason) -> UnsupportedError:
    """The error of what the backend does not serve; both engines choose it by ``--attention-backend``."""
    return UnsupportedError("--attention-backend attnops:" + "".join(f"\n  - {x}" for x in reasons), reasons)
