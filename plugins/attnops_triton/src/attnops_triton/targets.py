"""GPUs that kernels can be compiled for: their properties, and a context that selects one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from attnops.kernels import TraceContext

# Bytes of shared memory that one program may use. Each tile size of the table was compiled for each of these targets.
SHARED_MEMORY: Final = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip

# Targets that have the tile sizes and the shared memory of another target.
LIKE: Final = {"sm_103": "sm_100"}
# All targets that can be named.
TARGETS: Final = (*SHARED_MEMORY, *LIKE)

# Targets with tile sizes of their own.
_TABLES: Final = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")

# Multiprocessors (AMD: compute units) of the largest GPU of a target.
_MULTIPROCESSORS: Final = {
    "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188, "gfx942": 304, "gfx950": 256,
}  # fmt: skip

# By compute capability, the first CUDA release whose assembler knows the target, and the PTX version of that release.
# Newer assemblers read older PTX, so every assembler that knows the target can assemble a program in this version.
_FIRST_RELEASES: Final = {
    80: ((12, 0), 80), 100: ((12, 8), 87), 103: ((12, 9), 88), 120: ((12, 8), 87), 121: ((12, 9), 88),
}  # fmt: skip

# The first CUDA release and PTX version for programs that copy by tensor maps (sm_90 and later): Triton names what they
# write to `.shared::cta`, which needs PTX 8.6. No program may make a map with an older PTX: up to 8.5 Triton gives its
# strides in units of 16 bytes, and assemblers from CUDA 12.5 on expect bytes, whatever the version of the PTX.
_TENSOR_MAP_RELEASE: Final = ((12, 8), 87)

# AMD's data centre GPUs, with matrix cores and 64 lanes per wave. RDNA has 32 lanes and other matrix instructions.
CDNA: Final = ("gfx90a", "gfx942", "gfx950")

# Targets with tensor memory for the results of products.
TENSOR_MEMORY: Final = ("sm_100", "sm_103")

# Part of the key of JAX's cache of traced functions.
_TARGET: TraceContext[str] = TraceContext("attnops-triton:target", "")


def current() -> str:
    """The architecture that `target` selects; empty if none is, and kernels are compiled for this machine's GPU."""
    return str(_TARGET.value)


@contextlib.contextmanager
def target(arch: str) -> Iterator[None]:
    """A context in which kernels are compiled for an architecture, to export from a host without a GPU.

    Args:
        arch: one of `TARGETS`, such as ``"sm_90"``.

    Raises:
        ValueError: the architecture is unknown.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch={arch!r} is unknown; use one of {list(TARGETS)}")
    with _TARGET(arch):
        yield


def shared_memory(arch: str) -> int:
    """Bytes of shared memory that one program may use; an unknown architecture has as many as the nearest one."""
    return SHARED_MEMORY.get(LIKE.get(arch, arch)) or SHARED_MEMORY[known(arch)]


def known(arch: str) -> str:
    """The architecture with tables of tile sizes whose tiles ``arch`` has."""
    if arch in _TABLES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if arch in ("sm_86", "sm_89"):
        return "sm_86"
    number = int("".join(c for c in arch if c.isdigit()) or 90)
    return "sm_120" if number >= 120 else "sm_100" if number >= 100 else "sm_90" if number >= 90 else "sm_80"


def is_amd(arch: str) -> bool:
    """Whether an architecture is AMD's."""
    return arch.startswith("gfx")


def capability(arch: str) -> int:
    """The compute capability of an NVIDIA architecture, such as 90 for ``"sm_90"``."""
    return int(arch.removeprefix("sm_"))


def wave_size(arch: str) -> int:
    """Threads of a warp, or of AMD's wave: 64 on GCN and CDNA, 32 on RDNA."""
    return 64 if arch.startswith("gfx9") else 32


def multiprocessors(arch: str) -> int:
    """Multiprocessors of the largest GPU of a target; 132 if it is unknown, 1 if ``arch`` is empty."""
    return _MULTIPROCESSORS.get(LIKE.get(arch, arch), 132) if arch else 1


def first_cuda(arch: str) -> tuple[int, int]:
    """The first CUDA release that can assemble for an NVIDIA architecture."""
    return _first_release(arch)[0]


def ptx_version(arch: str, maps: bool = False) -> int:
    """The PTX version of programs for an NVIDIA architecture, such as 80 for 8.0; 0 on AMD.

    Args:
        arch: the architecture.
        maps: whether a program copies by tensor maps.
    """
    return 0 if is_amd(arch) else max(_first_release(arch)[1], _TENSOR_MAP_RELEASE[1] * maps)


def first_cuda_of_maps() -> tuple[int, int]:
    """The first CUDA release that can assemble programs that copy by tensor maps."""
    return _TENSOR_MAP_RELEASE[0]


def _first_release(arch: str) -> tuple[tuple[int, int], int]:
    return _FIRST_RELEASES[max(known for known in _FIRST_RELEASES if known <= max(80, capability(arch)))]
