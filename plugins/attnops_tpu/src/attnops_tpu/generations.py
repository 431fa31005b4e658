"""What kernels are compiled for: the chip, and whether with bounds checks."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import jax

from attnops.kernels import TraceContext


class Generation(NamedTuple):
    """The properties of a generation that tile sizes depend on.

    Attributes:
        name: the generation's name, such as ``"v6e"``; of an unknown chip, the nearest generation's.
        number: which generation it is, as in JAX's ``TpuInfo.generation``.
        vmem: bytes of vector memory per core.
        strided_rotation: whether the hardware can rotate each row of a register by a different number of lanes.
        cores: cores of a device, which share the parallel axes of a kernel's grid.
        takes_e4m3: whether the matrix unit multiplies bfloat16 with float8_e4m3fn.
        sublanes: rows of a vector register, of 128 elements of 32 bits each.
    """

    name: str
    number: int
    vmem: int
    strided_rotation: bool = True
    cores: int = 1
    takes_e4m3: bool = True
    sublanes: int = 8


_MiB: Final = 1 << 20
GENERATIONS: Final = {
    g.name: g
    for g in (
        Generation("v4", 4, 16 * _MiB, strided_rotation=False, cores=2, takes_e4m3=False),
        Generation("v5e", 5, 128 * _MiB),
        Generation("v5p", 5, 64 * _MiB, cores=2),
        Generation("v6e", 6, 128 * _MiB),
        Generation("tpu7x", 7, 64 * _MiB),
    )
}
# Its tile sizes fit every generation.
UNKNOWN: Final = GENERATIONS["v4"]
# The most bundles of a kernel's code. One of 55,000 was 3.4 times slower on a v6e than one of 35,000, flywheel's
# authors report: instruction memory is small.
MAX_CODE: Final = 34_000

# By JAX's device kinds.
_KINDS: Final = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}

# Part of the key of JAX's cache of compiled functions.
_TARGET: TraceContext[str | None] = TraceContext("attnops-tpu:target", None)


@contextlib.contextmanager
def target(generation: str) -> Iterator[None]:
    """A context in which kernels are traced for a generation, to compile ahead of time or export without a TPU.

    Raises:
        ValueError: the generation is unknown.
    """
    if generation not in GENERATIONS:
        raise ValueError(f"generation={generation!r} is unknown; use one of {list(GENERATIONS)}")
    with _TARGET(generation):
        yield


def generation() -> Generation:
    """The generation of `target`, else of this process's TPU, else `UNKNOWN`.

    A TPU of no known generation has the tile sizes of the nearest one, with the memory, cores and registers that JAX's
    `get_tpu_info` says, and a warning.
    """
    if _TARGET.value is not None:
        return GENERATIONS[_TARGET.value]
    if jax.default_backend() != "tpu":
        return UNKNOWN
    kind = jax.devices()[0].device_kind
    return GENERATIONS[_KINDS[kind]] if kind in _KINDS else _nearest(kind)


@functools.cache
def _nearest(kind: str) -> Generation:
    from jax.experimental.pallas import tpu as pltpu

    try:
        info: Any = pltpu.get_tpu_info()
    except ValueError:  # this JAX doesn't know it either
        nearest, known = UNKNOWN, "JAX doesn't describe it"
    else:
        vmem = info.vmem_capacity_bytes
        nearest = min(GENERATIONS.values(), key=lambda g: (abs(g.number - info.generation), abs(g.vmem - vmem)))
        nearest = nearest._replace(vmem=vmem, cores=info.num_cores, sublanes=info.num_sublanes)
        known = f"{vmem >> 20} MiB of vector memory, {info.num_cores} cores, {info.num_sublanes} sublanes"
    warnings.warn(
        f"attnops-tpu has no tile sizes for {kind!r} ({known}), and plans as for {nearest.name}: results are right, "
        "but kernels may be slow; update attnops-tpu",
        stacklevel=2,
    )
    return nearest


def bounds_checks() -> bool:
    """Whether kernels check at run time that their accesses are in bounds, for debugging.

    Raises:
        ValueError: the environment variable ``ATTNOPS_TPU_BOUNDS_CHECKS`` is neither 0 nor 1.
    """
    value = os.environ.get("ATTNOPS_TPU_BOUNDS_CHECKS", "0")
    if value not in ("0", "1"):
        raise ValueError(f"ATTNOPS_TPU_BOUNDS_CHECKS={value!r} must be 0 or 1; unset it to check nothing")
    return value == "1"
