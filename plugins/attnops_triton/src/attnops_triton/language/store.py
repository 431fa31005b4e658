"""Programs on disk, shared by processes: a file each, named by everything that its code depends on.

The folder is ``$ATTNOPS_TRITON_CACHE``, by default ``attnops-triton`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; empty for
no cache. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

# Of files; part of their names.
FORMAT: Final = 1
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
        head, _, code = path.read_bytes().partition(b"\n")
        fields = json.loads(head)
        size = fields.pop("size")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return (code, fields) if size == len(code) else None


def write(key: str, code: bytes, fields: dict[str, Any]) -> None:
    """Store a program, unless the folder can't be written to. Readers see all of it or nothing."""
    path = _path(key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(fields | {"size": len(code)}).encode() + b"\n" + code)
        os.replace(name, path)


def _path(key: str) -> Path | None:
    root = folder()
    return None if root is None else root / key[:2] / key
