"""All code that depends on the versions of jax-triton and Triton."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import TYPE_CHECKING, Any

from attnops_triton import versions
from attnops_triton.language.source import Kernel

if TYPE_CHECKING:
    import jax

    from attnops.typing import Function, PyTree


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


def triton_call(
    kernel: Function, shapes: tuple[jax.ShapeDtypeStruct, ...], programs: int, name: str,
    warps: int, stages: int, capability: int | None,
    *arrays: jax.Array,
) -> PyTree:  # fmt: skip
    """`jax_triton.triton_call`, with results of these shapes."""
    import jax_triton

    # Off by default from Triton 3.10 on; without it every multiply-add is two instructions.
    fusion = {"enable_fp_fusion": True}
    if versions.release(versions.version_of("jax-triton") or "0") < (0, 4):
        given: dict[str, Any] = {"out_shape": shapes, **fusion}
    else:
        # In this version an unknown keyword becomes a parameter of the kernel.
        given = {"out_type": shapes, "backend_options": fusion}
    return jax_triton.triton_call(
        *arrays, kernel=kernel, grid=(programs,), name=name, num_warps=warps, num_stages=stages,
        compute_capability=capability, **given,
    )  # fmt: skip


def device_arch() -> str:
    """The architecture of this machine's GPU, such as ``"sm_90"`` or ``"gfx942"``; empty without one."""
    import jax

    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        return ""
    capability = str(getattr(devices[0], "compute_capability", ""))
    if not capability or capability.startswith("gfx"):
        return capability
    return f"sm_{capability.replace('.', '')}"
