"""The memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def release_memory() -> None:
    """Give memory that nothing uses back to the system.

    XLA's compiler and the reading of weights free hundreds of MB that glibc keeps for later allocations; a server
    makes none of that size.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)
