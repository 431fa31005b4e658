"""The memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def release_memory() -> None:
    """Give memory that nothing uses back to the system.

    XLA's compiler frees hundreds of MB per program, and so does the reading of weights. glibc keeps that memory for
    later allocations, but a server makes none of that size.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)
