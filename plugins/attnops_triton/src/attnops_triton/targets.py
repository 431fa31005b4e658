"""The GPU that kernels are compiled for, if it is not this machine's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import jax

# The architectures of the table of tile sizes, and the bytes of shared memory that one program may use.
SHARED_MEMORY: Final = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10,
}  # fmt: skip

# Part of the key of JAX's cache of traced functions.
_TARGET = jax.make_user_context(default_value="")


def current() -> str:
    """The architecture of `target`; empty outside of it, for this machine's GPU."""
    return str(_TARGET.value)


@contextlib.contextmanager
def target(arch: str) -> Iterator[None]:
    """A context in which kernels are compiled for an architecture, to export from a host without a GPU.

    Args:
        arch: such as ``"sm_90"``.

    Raises:
        ValueError: the architecture is unknown.
    """
    if arch not in SHARED_MEMORY:
        raise ValueError(f"arch={arch!r} is unknown; use one of {list(SHARED_MEMORY)}")
    with _TARGET(arch):
        yield
