"""API keys: who may call the endpoints of ``/v1``."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from attnops_lm.serve.errors import APIError


def check_keys(keys: Sequence[str]) -> None:
    """Check API keys.

    Raises:
        ValueError: a key is empty, or has characters other than visible ASCII, which a header can't carry unchanged.
    """
    for i, key in enumerate(keys):
        if not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(f"API key {i} has {len(key)} characters, but must have at least one, all visible ASCII")


class KeyGuard:
    """Middleware that answers calls without a valid key with status 401, before their bodies are read.

    The key is expected as ``Authorization: Bearer KEY``. Digests are compared, all of them and in constant time, so
    that the time of an answer says nothing about the keys.

    Args:
        app: the application that is guarded.
        keys: the valid keys.

    Raises:
        ValueError: see `check_keys`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        check_keys(keys)
        self.app, self.digests = app, [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        are_equal = [hmac.compare_digest(digest, valid) for valid in self.digests]
        if kind.lower() == "bearer" and any(are_equal):
            await self.app({**scope, "api_key": digest}, receive, send)
            return
        message = "the header Authorization must be 'Bearer KEY' with a valid API key"
        error = APIError(401, message, code="invalid_api_key")
        response = JSONResponse(error.content, error.status, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
