"""Kernels in the form that Triton's compiler accepts, and JAX's names of this machine's GPU."""

from __future__ import annotations

import functools
import hashlib
import linecache
from types import CodeType
from typing import TYPE_CHECKING, Any

from attnops_triton.language.source import KernelFunction

if TYPE_CHECKING:
    from attnops.typing import Function


@functools.lru_cache(maxsize=1024)
def function(kernel: KernelFunction) -> tuple[Function, dict[str, Function]]:
    """The Python function of a kernel in Triton's language, and those that it calls by name, undecorated."""
    import triton.language as tl

    # The combine functions of `tl.max` and `tl.sum`, which can't be interpreted in a process that compiles kernels too.
    standard = tl.standard
    names = {"tl": tl, "largest": standard._elementwise_max, "total": standard._sum_combine}
    found = functions(kernel.name, kernel.text, surroundings(kernel) | names)
    return found[kernel.name], found


def surroundings(kernel: KernelFunction) -> dict[str, Any]:
    """The globals of a kernel's functions, without these functions."""
    names: dict[str, Any] = {}
    for each in kernel.reachable.values():
        names |= each.fn.__globals__
    return {name: x for name, x in names.items() if name not in kernel.reachable}


@functools.lru_cache(maxsize=4096)
def jitted(name: str, text: str, gluon: bool = False) -> Any:
    """A function in Triton's language, or in Gluon, from its text: one object per text, so that JAX traces nothing
    again.
    """
    import triton
    import triton.language as tl

    if gluon:
        from triton.experimental.gluon import language as tl
    return triton.jit(functions(name, text, {"tl": tl})[name])


def functions(name: str, text: str, names: dict[str, Any]) -> dict[str, Function]:
    """The Python functions of a text. `inspect` can find their source, which Triton needs.

    Args:
        name: the name of the kernel or function that needs them.
        text: their source.
        names: what the text refers to; the functions are added.
    """
    names["__name__"] = "attnops_triton.kernels"
    known = {*names}
    exec(_code(name, text), names)
    return {x: names[x] for x in names if x not in known and x != "__builtins__"}


@functools.lru_cache(maxsize=1024)
def _code(name: str, text: str) -> CodeType:
    file = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec")


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
    # AMD's name may include features, as in "gfx942:sramecc+:xnack-".
    capability = str(getattr(devices[0], "compute_capability", "")).split(":")[0]
    if not capability or capability.startswith("gfx"):
        return capability
    return f"sm_{capability.replace('.', '')}"
