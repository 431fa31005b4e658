"""Meshes, the names of their axes, and the default device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from attnops.sharding.specs import MeshLike
from attnops.typing import PyTree


def create_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1),
    axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"),
    backend: str = "",
    *,
    axis_types: Sequence[AxisType] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over devices; if JAX knows the topology, neighbours in the mesh are neighbours in the network.

    Args:
        axis_dims: devices along each axis; one may be −1, which is computed from the number of devices.
        axis_names: the axes' names.
        backend: a platform such as ``"tpu"``; empty for JAX's default.
        axis_types: the `jax.sharding.AxisType` of each axis; None for automatic ones.
        devices: the devices of the mesh; None for all of the backend's, in all processes.

    Raises:
        ValueError: the product of the dimensions is not the number of devices, or there is not one name per dimension.
    """
    if devices is None:
        devices = jax.devices(backend) if backend else jax.devices()
    dims, names = list(axis_dims), tuple(axis_names)
    if len(dims) != len(names):
        raise ValueError(f"axis_dims={tuple(dims)} and axis_names={names} must have the same length")
    product = math.prod(size for size in dims if size != -1)
    if dims.count(-1) > 1 or any(size < 1 and size != -1 for size in dims):
        raise ValueError(f"axis_dims={tuple(dims)} must be positive, except for at most one −1")
    if -1 in dims and len(devices) % product == 0:
        dims[dims.index(-1)] = len(devices) // product
    if -1 in dims or math.prod(dims) != len(devices):
        raise ValueError(
            f"axis_dims={tuple(axis_dims)} must multiply to {len(devices)}, the number of devices; one may be −1"
        )
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(names)
    return jax.make_mesh(tuple(dims), names, axis_types=types, devices=devices)


def current_mesh() -> MeshLike | None:
    """The mesh that `jax.set_mesh` or `jax.shard_map` sets; None where none is set."""
    ambient = jax.sharding.get_abstract_mesh()
    return None if ambient.empty else ambient


def get_names_from_partition_spec(partition_specs: PyTree) -> list[str]:
    """The mesh axes that specs name, each once, in order of first appearance.

    Args:
        partition_specs: a `jax.sharding.PartitionSpec`, or a mapping or sequence of them, arbitrarily nested.
    """
    names: dict[str, None] = {}
    items: Iterable[Any] = partition_specs.values() if isinstance(partition_specs, Mapping) else partition_specs
    for item in items:
        if isinstance(item, str):
            names[item] = None
        elif isinstance(item, (Iterable, Mapping)):
            names |= dict.fromkeys(get_names_from_partition_spec(item))
    return list(names)


def manual_axes() -> frozenset[str]:
    """The mesh axes that an enclosing `jax.shard_map` uses."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_arguments(mesh: MeshLike) -> dict[str, Any]:
    """The arguments of `jax.shard_map` that name the current mesh without manual axes, or ``mesh`` if none is set."""
    if (ambient := current_mesh()) is None:
        return {"mesh": mesh}
    manual = manual_axes()
    return {"axis_names": set(ambient.axis_names) - manual} if manual else {}


def default_device() -> jax.Device | None:
    """The device that computes with uncommitted arrays: ``jax_default_device``, else the first local device."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
