"""Compiled programs on disk, which processes share: one file per program, named by a hash of everything that its code
depends on.

The folder is ``$ATTNOPS_TRITON_CACHE``, by default ``attnops-triton`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; empty for
no cache. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

# The version of the file format; part of the files' names.
FORMAT: Final = 6
VARIABLE: Final = "ATTNOPS_TRITON_CACHE"


def folder() -> Path | None:
    """The folder; None for no cache."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnops-triton"
    except RuntimeError:  # no home
        return None


def read(key: str) -> tuple[bytes, dict[str, Any]] | None:
    """The code and the fields that `write` stored; None if there are none, or they are damaged."""
    path = _path(key)
    if path is None:
        return None
    try:
        digest, _, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(rest):
        return None
    head, _, code = rest.partition(b"\n")
    return code, json.loads(head)


def write(key: str, code: bytes, fields: dict[str, Any]) -> None:
    """Store a program, unless the folder can't be written to. Readers see all of it or nothing."""
    path = _path(key)
    if path is None:
        return
    rest = json.dumps(fields).encode() + b"\n" + code
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(rest) + b"\n" + rest)
        os.replace(name, path)
    except OSError:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _digest(rest: bytes) -> bytes:
    return hashlib.sha256(rest).hexdigest().encode()


def _path(key: str) -> Path | None:
    root = folder()
    return None if root is None else root / key[:2] / key
