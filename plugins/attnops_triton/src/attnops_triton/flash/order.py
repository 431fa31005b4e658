"""Whether kernels may add the terms of gradients in any order, or must give the same bits in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from attnops.kernels import TraceContext

# Part of the key of JAX's cache of traced functions.
_UNORDERED: TraceContext[bool] = TraceContext("attnops-triton:unordered", False)


def is_unordered() -> bool:
    """Whether calls are traced inside `unordered`."""
    return bool(_UNORDERED.value)


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """A context in which the terms of a gradient may be added in any order, so that two runs may differ in the last
    bits.

    On Hopper the kernel for dk and dv then computes dq too, in float32, as in FlashAttention-3 (arXiv:2407.08608). A
    tile needs five products instead of seven, and one exponential per score instead of two.
    """
    with _UNORDERED(True):
        yield
