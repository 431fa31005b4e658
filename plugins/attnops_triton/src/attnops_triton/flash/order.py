"""Whether kernels may sum gradients in any order, or must give the same bits in every run."""

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
    """A context in which the sums of a gradient may be added in any order, so that two runs may differ in last bits.

    On Hopper the kernel for dk and dv then adds dq too, in float32: five products per tile instead of seven, and one
        exponential instead of two, as in FlashAttention-3 (arXiv:2407.08608).
    """
    with _UNORDERED(True):
        yield
