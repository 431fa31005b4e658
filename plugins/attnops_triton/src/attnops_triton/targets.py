"""What kernels are compiled for, where that is not the GPU at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import jax

# Architectures that have tiles of their own, and bytes of shared memory that one program may use.
SHARED_MEMORY: Final = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10,
}  # fmt: skip

# Part of what JAX caches traced functions by.
_TARGET = jax.make_user_context(default_value="")


def current() -> str:
    """The architecture that `target` states; empty for that of the GPU at hand."""
    return str(_TARGET.value)


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
    with _TARGET(arch):
        yield
