"""The machine that is measured, and its memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax

# Packages on whose versions figures depend.
_VERSIONS: Final = (
    "attnops", "attnops-cpu", "attnops-triton", "jax", "jaxlib", "libtpu", "flax", "numpy", "triton", "torch",
    "tokamax", "ejkernel", "ringattention", "flywheel-tpu", "tpu-inference", "flashinfer-python",
)  # fmt: skip
# The share of the memory that a contender may use; the system and the inputs need some too.
_SHARE: Final = 0.5
_UNKNOWN: Final = 8 << 30


def describe_machine() -> dict[str, object]:
    """Processor, cores, devices and versions."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": physical_memory(),
        "devices": [device.device_kind for device in jax.devices()],
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """The versions of Python and of the installed packages on which figures depend. Does not initialise JAX."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def one_line(machine: Mapping[str, Any]) -> str:
    """The result of `describe_machine` as one line, for people to read."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['processor']}, {machine['cores']} cores; {versions}"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    """Bytes of the host's memory; 8 GiB if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return _UNKNOWN


def default_memory_limit() -> int:
    """Half the memory of JAX's default device, in bytes."""
    stats = jax.devices()[0].memory_stats()
    return int(_SHARE * (stats or {}).get("bytes_limit", physical_memory()))


def peak_rss() -> int:
    """The most memory that this process ever held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss is at least what the parent held when it started this process
        (peak_kib,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak_kib) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _processor() -> str:
    """Its name, with family and model where Linux tells: several generations may have one name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        first = info.read_text().partition("\n\n")[0]
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        if "model name" in told:
            number = f" (family {told['cpu family']}, model {told['model']})" if "cpu family" in told else ""
            return told["model name"] + number
    return platform.processor() or platform.machine()
