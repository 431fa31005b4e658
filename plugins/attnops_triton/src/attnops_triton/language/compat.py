"""Kernels as Triton's compiler takes them, and the GPU as JAX names it."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import TYPE_CHECKING, Any

from attnops_triton.language.source import Kernel

if TYPE_CHECKING:
    from attnops.typing import Function


@functools.lru_cache(maxsize=1024)
def function(kernel: Kernel) -> Function:
    """The Python function of a kernel's text, with source that `inspect` finds, which Triton needs."""
    import triton.language as tl

    file = f"<{kernel.name} {hashlib.sha256(kernel.text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(kernel.text), None, kernel.text.splitlines(keepends=True), file)
    # The combine functions of `tl.max` and `tl.sum`, which can't be interpreted in a process that compiles kernels too.
    standard = tl.standard
    names = {
        "tl": tl,
        "largest": standard._elementwise_max,
        "total": standard._sum_combine,
        "__name__": "attnops_triton.kernels",
    }
    exec(compile(kernel.text, file, "exec"), names)
    return names[kernel.name]


@functools.lru_cache(maxsize=1024)
def jit(kernel: Kernel) -> Any:
    """A kernel for Triton's compiler."""
    import triton

    return triton.JITFunction(function(kernel))


def device_name() -> str:
    """The name of this machine's GPU; empty without one."""
    import jax

    try:
        return str(jax.devices("gpu")[0].device_kind)
    except RuntimeError:
        return ""


def device_arch() -> str:
    """The architecture of this machine's GPU, such as ``"sm_90"`` or ``"gfx942"``; empty without one."""
    import jax

    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        return ""
    # AMD's may name features too, as in "gfx942:sramecc+:xnack-".
    capability = str(getattr(devices[0], "compute_capability", "")).split(":")[0]
    if not capability or capability.startswith("gfx"):
        return capability
    return f"sm_{capability.replace('.', '')}"
