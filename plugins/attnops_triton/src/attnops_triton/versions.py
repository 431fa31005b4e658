"""Whether Triton and jax-triton are installed, in versions that work together. Imports neither."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from typing import Final

from attnops import Reason

INSTALL: Final = "pip install --upgrade attnops-triton"


@functools.cache
def version_of(distribution: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(interpret: bool) -> Iterable[Reason]:
    """Reasons why kernels can't run with the installed versions.

    Args:
        interpret: whether kernels are interpreted, which needs no jax-triton.
    """
    triton, jax_triton, jax = (version_of(name) for name in ("triton", "jax-triton", "jax"))
    if triton is None:
        yield Reason("triton", "not installed", "the kernels need it", INSTALL)
    elif not (3, 6) <= release(triton) < (3, 10):
        yield Reason("triton", triton, "must be at least 3.6 and below 3.10", "pip install 'triton>=3.6,<3.10'")
    if interpret:
        return
    if jax_triton is None:
        yield Reason("jax-triton", "not installed", "launching the kernels needs it", INSTALL)
        return
    installed = f"{jax_triton} with jax {jax}" + (f" and triton {triton}" if triton else "")
    old = release(jax_triton) < (0, 4)
    if jax is not None and release(jax) >= (0, 12) and not old:
        yield Reason("jax-triton", installed, "every traced call fails", "pip install 'jax>=0.11.1,<0.12'")
    elif jax is not None and release(jax) < (0, 11, 1) and not old:
        yield Reason(
            "jax-triton", installed, "jax-triton 0.4 needs jax 0.11.1 or later", "pip install 'jax>=0.11.1,<0.12'"
        )
    if not old and triton is not None and release(triton) < (3, 7):
        yield Reason("jax-triton", installed, "jax-triton 0.4 needs triton 3.7 or later",
                     "pip install 'triton>=3.7', or jax-triton==0.3.1")  # fmt: skip
    if old and jax is not None and not (0, 10) <= release(jax) < (0, 12):
        yield Reason("jax-triton", installed, "works with jax 0.10 and 0.11", "pip install 'jax>=0.10,<0.12'")
    if release(jax_triton) >= (0, 5):
        yield Reason("jax-triton", installed, "must be below 0.5", INSTALL)
    if release(jax_triton) < (0, 3, 1):
        hint = "pip install jax-triton==0.3.1" if sys.version_info < (3, 12) else INSTALL
        yield Reason("jax-triton", installed, "must be at least 0.3.1", hint)


def release(version: str) -> tuple[int, ...]:
    """A version as a tuple of integers, such as (0, 4, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", version)[0]))
