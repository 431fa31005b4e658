"""Shardings of operands and results, and the mesh axes in their types."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnops.sharding.specs import MeshLike, entry_of, names_of
from attnops.typing import Leaf


def explicit_names(mesh: MeshLike | None) -> frozenset[str]:
    """The explicit axes of a mesh, which types of arrays name."""
    if mesh is None:
        return frozenset()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def mesh_of_types(arrays: Iterable[Leaf]) -> MeshLike | None:
    """The mesh with explicit axes that the type of an array names; None if no type names one."""
    for x in arrays:
        if isinstance(x, jax.Array):
            mesh: MeshLike = jax.typeof(x).sharding.mesh
            if explicit_names(mesh):
                array = concrete(x)
                sharding = None if array is None else array.sharding
                return sharding.mesh if isinstance(sharding, NamedSharding) else mesh
    return None


def mesh_of_inputs(arrays: Iterable[Leaf]) -> MeshLike | None:
    """The mesh that arrays under `jax.jit` are on; without explicit axes, their types don't say which axes shard."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer) and concrete(x) is None:
            mesh: MeshLike = jax.typeof(x).sharding.mesh
            if not mesh.empty and not mesh.manual_axes:  # type: ignore[union-attr]
                return mesh
    return None


def whole(x: jax.Array) -> jax.Array:
    """An array, replicated if its type names explicit axes: JAX does not index one sharded array by another."""
    mesh = mesh_of_types([x])
    return x if mesh is None else placed(x, PartitionSpec(), mesh)


def concrete(x: Leaf) -> jax.Array | None:
    """The array that an eager `jax.grad` or `jax.vmap` traces; None under `jax.jit`, where there is none yet."""
    while isinstance(x, jax.core.Tracer):
        # Attributes of JAX's tracers. Without them nothing is moved, and JAX raises an error that names the devices.
        x = getattr(x, "primal", getattr(x, "val", None))
    return x if isinstance(x, jax.Array) else None


def placed(x: Leaf, spec: PartitionSpec, mesh: MeshLike) -> Leaf:
    """An operand moved to ``spec`` on the mesh, which JAX does not do for explicit axes or outside `jax.jit`."""
    if isinstance(mesh, Mesh):
        if not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, NamedSharding(mesh, spec))
        array = concrete(x)
        if array is not None and array.sharding.device_set != set(mesh.devices.flat):
            # Replicated: `jax.device_put` does not know which dimension `jax.vmap` maps.
            x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    return resharded(jnp.asarray(x), spec, mesh) if explicit_names(mesh) else x


def resharded(x: jax.Array, spec: PartitionSpec, mesh: MeshLike) -> jax.Array:
    """An array resharded to the explicit axes of ``spec``."""
    return jax.sharding.reshard(x, NamedSharding(mesh, of_axes(spec, explicit_names(mesh))))  # type: ignore[no-any-return]


def explicit_entry(x: Leaf, axis: int) -> tuple[str, ...]:
    """The explicit mesh axes that shard a dimension, by the array's type."""
    if not isinstance(x, jax.Array):
        return ()
    spec = jax.typeof(x).sharding.spec
    return names_of(spec[axis]) if axis < len(spec) else ()


def placed_entry(x: Leaf, axis: int, mesh: MeshLike) -> tuple[str, ...]:
    """The axes of a mesh that shard a dimension: by the array's type, else by its placement."""
    if names := explicit_entry(x, axis):
        return names
    array = concrete(x)
    if array is None or array.shape != x.shape or not isinstance(sharding := array.sharding, NamedSharding):
        return ()
    if dict(sharding.mesh.shape) != dict(mesh.shape) or axis >= len(sharding.spec):
        return ()
    return names_of(sharding.spec[axis])


def unsharded(x: jax.Array, axis: int) -> jax.Array:
    """An array whose dimension ``axis`` no explicit axis shards, as slicing, padding and reordering require."""
    if not explicit_entry(x, axis):
        return x
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(*(None if i == axis % x.ndim else entry for i, entry in enumerate(sharding.spec)))
    return resharded(x, spec, sharding.mesh)


def reshaped(x: jax.Array, *shape: int) -> jax.Array:
    """``x.reshape(*shape)``, also if explicit mesh axes shard a dimension that `jax.vmap` maps, but no other: JAX then
    asks how they shard the result.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not explicit_names(sharding.mesh):
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec()))


def mapped_names(arrays: Iterable[Leaf]) -> frozenset[str]:
    """The explicit mesh axes that shard dimensions mapped by `jax.vmap`; they can't shard any other."""
    names: set[str] = set()
    for x in arrays:
        while isinstance(x, jax.core.Tracer):
            inner = getattr(x, "primal", getattr(x, "val", None))
            axis = getattr(x, "batch_dim", None)
            if isinstance(axis, int):
                names.update(explicit_entry(inner, axis))
            x = inner
    return frozenset(names)


def of_axes(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    """``spec`` restricted to some mesh axes."""
    return PartitionSpec(*(entry_of(name for name in names_of(entry) if name in names) for entry in spec))
