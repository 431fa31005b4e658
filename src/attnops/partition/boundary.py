"""How a call is sharded: which mesh axes shard batch, heads and lengths. `attnops.partition.run` runs it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh, PartitionSpec

from attnops.output import OperationOutput
from attnops.sharding.axes import BATCH, HEAD, HEAD_DIM, KV_HEAD, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.mesh import default_device, get_names_from_partition_spec, manual_axes
from attnops.sharding.placing import (
    concrete,
    explicit_names,
    mapped_names,
    mesh_of_inputs,
    mesh_of_types,
    placed_entry,
    resharded,
)
from attnops.sharding.rules import AxisRules
from attnops.sharding.specs import MeshAxes, MeshLike, correct_spec, names_of
from attnops.typing import Leaf, PyTree

Entry = MeshAxes

if TYPE_CHECKING:
    from attnops.dispatch.request import AttentionRequest


@dataclasses.dataclass(frozen=True)
class Boundary:
    """How a call is sharded over a mesh.

    Attributes:
        mesh: the mesh; axes that an enclosing `jax.shard_map` uses are manual in it.
        is_ambient: whether it is the current mesh, which `jax.shard_map` finds by itself.
        batch: the mesh axes that shard the batch.
        heads: the mesh axes that shard query heads.
        kv_heads: the mesh axes that shard key and value heads: ``heads``, or None if they do not divide K.
        lengths: the mesh axes that the rules give queries, and keys, whether they divide the lengths or not.
        results: by field of `OperationOutput`, the spec that the rules give it; empty without explicit axes.
    """

    mesh: MeshLike
    is_ambient: bool
    batch: Entry
    heads: Entry
    kv_heads: Entry
    lengths: tuple[tuple[str, ...] | None, tuple[str, ...] | None]
    results: Mapping[str, PartitionSpec]

    @property
    def is_nested(self) -> bool:
        """Whether an enclosing `jax.shard_map` uses some of the mesh's axes."""
        return self.is_ambient and bool(self.mesh.manual_axes)  # type: ignore[union-attr]

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh has explicit axes, which types of arrays name."""
        return bool(explicit_names(self.mesh))

    @property
    def sequence(self) -> tuple[str, ...]:
        """The mesh axes that the rules give queries or keys."""
        return tuple(get_names_from_partition_spec(self.lengths))

    def replicated(self, tree: PyTree) -> PyTree:
        """A pytree with its arrays replicated, if axes are explicit.

        JAX has no gradient of `jax.sharding.auto_axes` in `jax.shard_map`.
        """
        if not self.is_explicit:
            return tree
        spec = PartitionSpec()
        return jax.tree.map(lambda x: resharded(x, spec, self.mesh) if isinstance(x, jax.Array) else x, tree)

    def typed(self, output: OperationOutput) -> OperationOutput:
        """An output resharded to the specs of ``results``, if axes are explicit."""
        if not self.is_explicit:
            return output
        given = {name: getattr(output, name) for name in self.results}
        return output.replace(
            **{name: resharded(x, self.results[name], self.mesh) for name, x in given.items() if x is not None}
        )


def find_boundary(
    mesh: MeshLike | None, rules: AxisRules, request: AttentionRequest, arrays: Sequence[Leaf] = ()
) -> Boundary | None:
    """How a call is sharded; None without a mesh, or if the mesh shards nothing.

    A forward can't compute with arrays whose types name mesh axes, so that with explicit axes there is always a
    boundary. Mesh axes that the rules don't name shard batch and heads if they shard the query's, by its type or,
    outside of `jax.jit`, by its placement.

    Args:
        mesh: the metadata's mesh; None for the current mesh, or else the arrays' mesh.
        rules: the metadata's rules.
        request: the description of the call.
        arrays: the call's arrays, query [B, T, H, D] first.

    Raises:
        ValueError: ``mesh`` and the current mesh have different axes.
    """
    ambient = jax.sharding.get_abstract_mesh()
    typed = mesh_of_types(arrays)
    chosen = mesh_of_call(mesh, ambient, typed or mesh_of_inputs(arrays))
    if chosen is None:
        return None
    manual = mapped_names(arrays) | manual_axes()
    free = {name: size for name, size in chosen.shape.items() if name not in manual}
    is_explicit = bool(explicit_names(chosen) | explicit_names(typed))
    is_one_device = math.prod(free.values()) == 1
    if is_one_device and not is_explicit and not is_elsewhere(chosen, arrays):
        return None

    dividing = functools.partial(dividing_axes, chosen, frozenset(free))
    axes_of = functools.partial(rule_axes, rules, request.mode)
    # One spec for both, so that mesh axes that shard the batch do not shard heads.
    spec = rules.spec([BATCH, HEAD], mode=request.mode)
    batch, heads = dividing(spec[0], request.batch), dividing(spec[1], request.heads)
    kv_heads = dividing(rules.spec([BATCH, KV_HEAD], mode=request.mode)[1], request.kv_heads)
    known = {name for axis in (BATCH, HEAD, KV_HEAD, QUERY_LENGTH, KV_LENGTH) for name in axes_of(axis)}
    if arrays:
        entries = (placed_entry(arrays[0], axis, chosen) for axis in (0, 2))
        for_batch, for_heads = (tuple(name for name in entry if name not in known) for entry in entries)
        batch = batch or dividing(for_batch, request.batch)
        if heads is None:
            heads, kv_heads = dividing(for_heads, request.heads), dividing(for_heads, request.kv_heads)
    used = get_names_from_partition_spec((batch, heads))
    queries, keys = (
        tuple(name for name in axes_of(axis) if free.get(name, 1) > 1 and name not in used) or None
        for axis in (QUERY_LENGTH, KV_LENGTH)
    )
    if (batch, heads, queries, keys) == (None, None, None, None) and not is_explicit and not is_one_device:
        return None  # no rule names an axis of this mesh, or none divides: left to the compiler
    return Boundary(
        mesh=chosen,
        is_ambient=not ambient.empty,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads if kv_heads == heads else None,
        lengths=(queries, keys),
        results=result_specs(dividing, axes_of, request, batch, heads) if is_explicit else {},
    )


def unnamed_axes(
    mesh: MeshLike | None, rules: AxisRules, mode: str, boundary: Boundary | None, arrays: Sequence[Leaf]
) -> dict[str, int]:
    """The axes of a call's mesh, and their sizes, that shard nothing and that no rule names.

    Args:
        mesh: the metadata's mesh; None for the current mesh, or else the arrays' mesh.
        rules: the metadata's rules.
        mode: the runtime mode.
        boundary: how the call is sharded; None if it is not.
        arrays: the call's arrays, query [B, T, H, D] first.
    """
    ambient = jax.sharding.get_abstract_mesh()
    chosen = boundary.mesh if boundary is not None else mesh if ambient.empty else ambient
    chosen = chosen or mesh_of_inputs(arrays)
    if chosen is None:
        return {}
    known = manual_axes() | rules.names(mode)
    if boundary is not None:
        known |= {*get_names_from_partition_spec((boundary.batch, boundary.heads))}
    return {name: size for name, size in chosen.shape.items() if size > 1 and name not in known}


def dividing_axes(mesh: MeshLike, free: frozenset[str], wanted: Entry, size: int) -> Entry:
    """The mesh axes of a rule that are free and divide the dimension's size."""
    names = tuple(name for name in names_of(wanted) if name in free)
    return correct_spec(PartitionSpec(names), (size,), mesh)[0] if names else None  # type: ignore[no-any-return]


def rule_axes(rules: AxisRules, mode: str, axis: str) -> list[str]:
    """The mesh axes that the rules give a semantic axis, whether they divide or not."""
    return get_names_from_partition_spec(rules.spec([axis], mode=mode))


def result_specs(
    dividing: Callable[[Leaf, int], Entry], axes_of: Callable[[str], list[str]], request: AttentionRequest,
    batch: Entry, heads: Entry,
) -> dict[str, PartitionSpec]:  # fmt: skip
    """The specs of a call's results, as `attnops.sharding.AttentionShardings` gives them."""
    used = get_names_from_partition_spec((batch, heads))

    def entry(axis: str, size: int) -> Entry:
        names = dividing(tuple(name for name in axes_of(axis) if name not in used), size)
        used.extend(names_of(names))
        return names

    queries = entry(QUERY_LENGTH, request.query_length)
    features, used = entry(HEAD_DIM, request.value_head_dim), get_names_from_partition_spec((batch, heads, queries))
    keys = entry(KV_LENGTH, request.key_length)
    return {
        "attention_outputs": PartitionSpec(batch, queries, heads, features),
        "attention_weights": PartitionSpec(batch, heads, queries, keys),
        **dict.fromkeys(("logsumexp", "max_logits"), PartitionSpec(batch, heads, queries)),
    }


def mesh_of_call(mesh: MeshLike | None, ambient: MeshLike, typed: MeshLike | None) -> MeshLike | None:
    """The mesh that a call runs on.

    Raises:
        ValueError: the metadata's mesh and the current mesh have different axes.
    """
    if ambient.empty:
        return mesh if mesh is not None else typed
    if mesh is not None and dict(mesh.shape) != dict(ambient.shape):
        raise ValueError(
            f"metadata.mesh has the axes {dict(mesh.shape)}, but the mesh that jax.set_mesh or jax.shard_map sets has "
            f"{dict(ambient.shape)}; a call runs on one mesh: leave metadata.mesh out, or set an equal one"
        )
    return ambient  # type: ignore[no-any-return]


def is_elsewhere(mesh: MeshLike, arrays: Sequence[Leaf]) -> bool:
    """Whether a call on a mesh of one device would run on another device without `jax.shard_map`."""
    if not isinstance(mesh, Mesh):
        return False
    device = mesh.devices.flat[0]
    arrays_now = [x for x in map(concrete, arrays) if x is not None]
    return device != default_device() or any(x.sharding.device_set != {device} for x in arrays_now)
