"""Checks the installed versions of Triton and JAX. This module imports neither."""

from __future__ import annotations

import functools
import importlib.metadata
import re
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
        interpret: whether kernels are interpreted, which needs no launcher.
    """
    triton, jax = version_of("triton"), version_of("jax")
    if triton is None:
        yield Reason("triton", "not installed", "the kernels need it", INSTALL)
    elif not (3, 6) <= release(triton) < (3, 10):
        yield Reason("triton", triton, "must be at least 3.6 and below 3.10", "pip install 'triton>=3.6,<3.10'")
    if not interpret and jax is not None and not (0, 10, 1) <= release(jax) < (0, 13):
        yield Reason("jax", jax, "must be at least 0.10.1 and below 0.13, whose launcher of Triton kernels is used",
                     "pip install 'jax>=0.10.1,<0.13'")  # fmt: skip


def release(version: str) -> tuple[int, ...]:
    """A version as a tuple of integers, such as (0, 4, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", version)[0]))
