"""What kernels are compiled for, where that is not the GPU at hand."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Final

# Architectures that have tiles of their own, and bytes of shared memory that one program may use.
SHARED_MEMORY: Final = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10,
}  # fmt: skip

_TARGET: contextvars.ContextVar[str] = contextvars.ContextVar("attnops_triton_target", default="")


def current() -> str:
    """The architecture that `target` states; empty for that of the GPU at hand."""
    return _TARGET.get()


@contextlib.contextmanager
def target(arch: str) -> Iterator[None]:
    """Compile for an architecture: to export from a host without a GPU.

    Args:
        arch: such as ``"sm_90"``.

    Raises:
        ValueError: it is unknown.
    """
    if arch not in SHARED_MEMORY:
        raise ValueError(f"arch={arch!r} is unknown; use one of {list(SHARED_MEMORY)}")
    token = _TARGET.set(arch)
    try:
        yield
    finally:
        _TARGET.reset(token)
