"""The compiled library, next to this file: loaded and registered with JAX at the first use.

It is not loaded when the package is imported: if JAX can't use it, that must be a reason, not a failed import.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import jax

from attnops import Reason

# The names of the handlers' symbols, which are also the names of their targets.
TARGETS: Final = (
    "attnops_cpu_twice", "attnops_cpu_forward", "attnops_cpu_backward", "attnops_cpu_decode", "attnops_cpu_linear",
)  # fmt: skip

_NAME: Final = "libattnops_cpu.dylib" if sys.platform == "darwin" else "libattnops_cpu.so"


class Library(NamedTuple):
    """The state of the library.

    Attributes:
        isa: the instruction set whose kernels serve calls; empty if none do.
        available: all that this processor has, the fastest first.
        problem: why no kernel can be called; None if they can.
    """

    isa: str
    available: tuple[str, ...]
    problem: Reason | None


@functools.cache
def library() -> Library:
    """The library, loaded and registered once per process."""
    path = Path(__file__).with_name(_NAME)
    if not path.exists():
        rule = "must be there; it is built when attnops-cpu is installed where there is a C++ compiler"
        todo = "install g++ or clang and cmake, and install attnops-cpu again"
        return Library("", (), Reason("attnops-cpu's library", "missing", rule, todo))
    try:
        loaded = ctypes.CDLL(str(path))
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
        loaded.attnops_cpu_isa.restype = loaded.attnops_cpu_available.restype = ctypes.c_char_p
        available = tuple(_names(loaded))
        isa = loaded.attnops_cpu_isa().decode()
    except Exception as error:
        rule, todo = "must load", "install attnops-cpu again on this machine"
        return Library("", (), Reason("attnops-cpu's library", str(error), rule, todo))
    problem = None
    if not isa:
        forced, rule = os.environ.get("ATTNOPS_CPU_ISA", ""), f"must be one of {', '.join(available)}"
        problem = Reason("ATTNOPS_CPU_ISA", forced, rule, "leave it out for the fastest")
    return Library(isa, available, problem)


def _names(loaded: ctypes.CDLL) -> Iterator[str]:
    index = 0
    while name := loaded.attnops_cpu_available(index):
        yield name.decode()
        index += 1
