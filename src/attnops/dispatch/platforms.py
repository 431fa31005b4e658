"""The platform that a call runs on, and its forwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import jax

from attnops.sharding.mesh import default_device

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu", "tt")

# The forwards for a platform, the most specific first; every class has "native".
FORWARD_CHAIN: Final = {
    "cpu": ("cpu", "native"),
    "cuda": ("cuda", "gpu", "native"),
    "rocm": ("rocm", "gpu", "native"),
    "tpu": ("tpu", "native"),
    "tt": ("tt", "native"),
}


def canonicalize_platform(platform: str) -> str:
    """One of `PLATFORMS`. ``"gpu"`` becomes ``"rocm"`` where JAX runs on ROCm, and ``"cuda"`` anywhere else.

    Raises:
        ValueError: the platform is unknown.
    """
    name = str(platform).lower()
    if name == "gpu":
        return "rocm" if jax.default_backend() == "gpu" and platform_of(jax.devices()[0]) == "rocm" else "cuda"
    if name not in PLATFORMS:
        raise ValueError(f"platform={platform!r} is unknown; use one of {[*PLATFORMS, 'gpu']}, or None to find it")
    return name


def platform_of(device: jax.Device) -> str:
    """The platform of a `jax.Device`, telling CUDA from ROCm. An unknown platform is treated as ``"cpu"``."""
    name = str(device.platform).lower()
    if name in ("gpu", "cuda", "rocm"):
        # The devices of an abstract mesh have no client.
        version = str(getattr(getattr(device, "client", None), "platform_version", "")).lower()
        return "rocm" if name == "rocm" or "rocm" in version else "cuda"
    return name if name in PLATFORMS else "cpu"


def find_platform(platform: str | None, mesh: Mesh | AbstractMesh | None, arrays: Iterable[object]) -> str:
    """The platform that a call runs on: the first of these that determines it.

    1. ``platform``, the metadata's;
    2. the devices of ``mesh``, or of the mesh set by `jax.set_mesh`;
    3. the devices that a concrete array of ``arrays`` is committed to (tracers have none);
    4. ``jax_default_device``;
    5. `jax.default_backend`.
    """
    if platform is not None:
        return canonicalize_platform(platform)
    device = (
        _mesh_device(mesh)
        or _mesh_device(jax.sharding.get_abstract_mesh())
        or _committed_device(arrays)
        or default_device()
    )
    return platform_of(device)


def _mesh_device(mesh: Mesh | AbstractMesh | None) -> jax.Device | None:
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0] if mesh.devices.size else None
    return getattr(mesh, "abstract_device", None)


def _committed_device(arrays: Iterable[object]) -> jax.Device | None:
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.committed:
            return next(iter(array.devices()))
    return None
