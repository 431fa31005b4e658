"""JAX's persistent compilation cache, so that a process that starts again does not compile its programs again."""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "ATTNOPS_COMPILATION_CACHE"  # a folder, or "off"


def default_folder() -> Path:
    """``~/.cache/attnops/programs``, or ``attnops/programs`` in ``$XDG_CACHE_HOME`` if that is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnops" / "programs"


def keep_programs(folder: str | None = None) -> Path | None:
    """Use JAX's persistent compilation cache in this process.

    Args:
        folder: the folder of programs, which are in a subfolder for this kind of processor; "off" to keep none; None:
            the environment variable ``ATTNOPS_COMPILATION_CACHE``, else `default_folder`.

    Returns:
        The folder. None if no program is kept: the folder is "off", it can't be written to (with a warning), or there
        are several CPU devices, whose programs jaxlib 0.10 can't reload. If JAX already uses a folder
        (``JAX_COMPILATION_CACHE_DIR``), that folder is used.
    """
    current: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if current is not None:
        return Path(current)
    folder = os.environ.get(VARIABLE) or None if folder is None else folder
    if folder == "off" or (jax.default_backend() == "cpu" and jax.device_count() > 1):
        return None
    path = (default_folder() if folder is None else Path(folder).expanduser()) / _processor()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"no compiled program is kept in {path}: {error}; name another folder, or 'off'", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # otherwise a process that has compiled something ignores the change
    return path


def _processor() -> str:
    """A name for this kind of processor: if machines share a home folder, programs compiled for another kind may not
    run here.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    names = ("vendor_id", "model name", "flags", "Features", "CPU part")
    kind = sorted({line for line in lines if line.startswith(names)} or set(lines[:1]))
    return f"{platform.machine()}-{hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}"
