"""Meshes and the names of their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from attnops.sharding.specs import MeshLike


def create_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1),
    axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"),
    backend: str = "",
    *,
    axis_types: Sequence[AxisType] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over devices, neighbours in it being neighbours in the machine where JAX knows how.

    Args:
        axis_dims: devices along each axis; one of them may be −1, for what the others leave.
        axis_names: the axes' names.
        backend: whose devices, such as ``"tpu"``; empty for JAX's default.
        axis_types: of each axis, `jax.sharding.AxisType`; None for automatic ones.
        devices: which; None for all of the backend's, in all processes.

    Raises:
        ValueError: the dimensions do not make up the devices, or have not a name each.
    """
    if devices is None:
        devices = jax.devices(backend) if backend else jax.devices()
    dims, names = list(axis_dims), tuple(axis_names)
    if len(dims) != len(names):
        raise ValueError(f"axis_dims={tuple(dims)} and axis_names={names} must be equally many")
    rest = math.prod(size for size in dims if size != -1)
    if dims.count(-1) > 1 or any(size < 1 and size != -1 for size in dims):
        raise ValueError(f"axis_dims={tuple(dims)} must be positive, but for one −1 at most")
    if -1 in dims and len(devices) % rest == 0:
        dims[dims.index(-1)] = len(devices) // rest
    if -1 in dims or math.prod(dims) != len(devices):
        raise ValueError(f"axis_dims={tuple(axis_dims)} must make up the {len(devices)} devices; write −1 for the rest")
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(names)
    return jax.make_mesh(tuple(dims), names, axis_types=types, devices=devices)


def current_mesh() -> MeshLike | None:
    """The mesh that `jax.set_mesh` or `jax.shard_map` sets; None where none is set."""
    ambient = jax.sharding.get_abstract_mesh()
    return None if ambient.empty else ambient


def names_in_mesh(*names: str) -> bool:
    """Whether the mesh that is set has axes of all these names; False where none is set."""
    mesh = current_mesh()
    return mesh is not None and set(names) <= set(mesh.axis_names)


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """The mesh axes that specs name, each once, in the order in which they come.

    Args:
        partition_specs: a `jax.sharding.PartitionSpec`, or a mapping or sequence of them, nested as one likes.
    """
    found: dict[str, None] = {}
    items: Iterable[Any] = partition_specs.values() if isinstance(partition_specs, Mapping) else partition_specs
    for item in items:
        if isinstance(item, str):
            found[item] = None
        elif isinstance(item, (Iterable, Mapping)):
            found |= dict.fromkeys(get_names_from_partition_spec(item))
    return list(found)


def get_ranks_and_size(mesh: Mesh) -> dict[str, Any]:
    """How the processes of `jax.distributed` share a mesh: a model spans so many of them, and there are so many models.

    Args:
        mesh: with model-parallel axes "tp" and "sp", as far as it has them.

    Returns:
        ``mesh``; ``mp_node_size``, processes a model spans; ``dp_node_size``, copies of the model, at least 1;
        ``dp_node_rank`` and ``mp_node_rank``, this process's place among either.
    """
    model = math.prod(mesh.shape.get(name, 1) for name in ("tp", "sp"))
    mp_node_size = max(1, model // jax.local_device_count())
    rank = jax.process_index()
    return {
        "mesh": mesh,
        "mp_node_size": mp_node_size,
        "dp_node_size": max(1, jax.process_count() // mp_node_size),
        "dp_node_rank": rank // mp_node_size,
        "mp_node_rank": rank % mp_node_size,
    }
