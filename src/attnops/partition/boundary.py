"""How a mesh cuts a call: which of its axes cut batch, heads and lengths; see `attnops.partition.run` for what runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from attnops.output import OperationOutput
from attnops.partition.placing import (
    concrete,
    explicit_names,
    mapped_names,
    mesh_of_types,
    own_entry,
    resharded,
)
from attnops.sharding.axes import BATCH, HEAD, HEAD_DIM, KV_HEAD, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.devices import default_device
from attnops.sharding.mesh import get_names_from_partition_spec
from attnops.sharding.rules import AxisRules, MeshAxes
from attnops.sharding.specs import MeshLike, correct_spec

Entry = MeshAxes

if TYPE_CHECKING:
    from attnops.dispatch.request import AttentionRequest


@dataclasses.dataclass(frozen=True)
class Boundary:
    """How a mesh cuts a call.

    Attributes:
        mesh: the mesh, without the axes that an enclosing `jax.shard_map` has cut already.
        is_ambient: whether it is the one that is set, which `jax.shard_map` then finds by itself.
        batch: the mesh axes that cut the batch.
        heads: that cut query heads.
        kv_heads: that cut key and value heads: the same, or none where they do not divide.
        lengths: that the rules cut queries, and keys, whether these divide or not.
        results: by field of `OperationOutput`, the spec that the rules give it; types say so where axes are explicit.
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
        """Whether an enclosing `jax.shard_map` has cut some axes already."""
        return self.is_ambient and bool(self.mesh.manual_axes)  # type: ignore[union-attr]

    @property
    def is_explicit(self) -> bool:
        """Whether types of arrays name axes of the mesh."""
        return bool(explicit_names(self.mesh))

    @property
    def sequence(self) -> tuple[str, ...]:
        """The mesh axes that the rules cut queries or keys by."""
        return tuple(get_names_from_partition_spec(self.lengths))

    def typed(self, output: OperationOutput) -> OperationOutput:
        """What a call gives, with types that say what the rules do, where axes are explicit."""
        if not self.is_explicit:
            return output
        given = {name: getattr(output, name) for name in self.results}
        return output.replace(
            **{name: resharded(x, self.results[name], self.mesh) for name, x in given.items() if x is not None}
        )


def find_boundary(
    mesh: MeshLike | None, rules: AxisRules, request: AttentionRequest, arrays: Sequence[Any] = ()
) -> Boundary | None:
    """How a mesh cuts a call; None where there is none, or it cuts nothing.

    Arrays whose types name mesh axes can't pass through a forward as they are, so with explicit axes there is always
    a boundary. Axes that the rules don't know then cut batch and heads as they cut those of the query.

    Args:
        mesh: the metadata's; else the one that is set counts, else that of the arrays' types.
        rules: the metadata's.
        request: what the call is.
        arrays: the call's, query [B, T, H, D] first.

    Raises:
        ValueError: ``mesh`` is not the one that is set.
    """
    ambient = jax.sharding.get_abstract_mesh()
    typed = mesh_of_types(arrays)
    found = _mesh_of(mesh, ambient, typed)
    if found is None:
        return None
    manual = mapped_names(arrays) | set(() if ambient.empty else ambient.manual_axes)
    free = {name: size for name, size in found.shape.items() if name not in manual}
    is_explicit = bool(explicit_names(found) | explicit_names(typed))
    is_one_device = math.prod(free.values()) == 1
    if is_one_device and not is_explicit and not _is_elsewhere(found, arrays):
        return None

    cut = functools.partial(_cut, found, frozenset(free))
    of = functools.partial(_names_of, rules, request.mode)
    # Together: what cuts the batch does not cut heads as well.
    spec = rules.spec([BATCH, HEAD], mode=request.mode)
    batch, heads = cut(spec[0], request.batch), cut(spec[1], request.heads)
    kv_heads = cut(rules.spec([BATCH, KV_HEAD], mode=request.mode)[1], request.kv_heads)
    if is_explicit and arrays:
        known = {name for axis in (BATCH, HEAD, KV_HEAD, QUERY_LENGTH, KV_LENGTH) for name in of(axis)}
        of_batch, of_heads = (tuple(x for x in own_entry(arrays[0], axis) if x not in known) for axis in (0, 2))
        batch = batch or cut(of_batch, request.batch)
        if heads is None:
            heads, kv_heads = cut(of_heads, request.heads), cut(of_heads, request.kv_heads)
    taken = get_names_from_partition_spec((batch, heads))
    lengths = (
        tuple(name for name in of(QUERY_LENGTH) if free.get(name, 1) > 1 and name not in taken) or None,
        tuple(name for name in of(KV_LENGTH) if free.get(name, 1) > 1 and name not in taken) or None,
    )
    if (batch, heads, *lengths) == (None, None, None, None) and not is_explicit and not is_one_device:
        return None  # no rule speaks of this mesh, or nothing divides: the compiler may do as it likes
    return Boundary(
        mesh=found,
        is_ambient=not ambient.empty,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads if kv_heads == heads else None,
        lengths=lengths,
        results=_results(cut, of, request, batch, heads) if is_explicit else {},
    )


def _cut(mesh: MeshLike, free: frozenset[str], wanted: Any, size: int) -> Entry:
    """Of the mesh axes that are to cut a dimension, those that do."""
    names = tuple(name for name in get_names_from_partition_spec((wanted,)) if name in free)
    return correct_spec(PartitionSpec(names), (size,), mesh)[0] if names else None  # type: ignore[no-any-return]


def _names_of(rules: AxisRules, mode: str, axis: str) -> list[str]:
    """The mesh axes that the rules cut a semantic axis by, whether it divides or not."""
    return get_names_from_partition_spec(rules.spec([axis], mode=mode))


def _results(
    cut: Callable[[Any, int], Entry], of: Callable[[str], list[str]], request: AttentionRequest, batch: Entry,
    heads: Entry,
) -> dict[str, PartitionSpec]:  # fmt: skip
    """The specs of a call's results, as `attnops.sharding.AttentionShardings` has them."""
    taken = get_names_from_partition_spec((batch, heads))

    def entry(axis: str, size: int) -> Entry:
        found = cut(tuple(name for name in of(axis) if name not in taken), size)
        taken.extend(get_names_from_partition_spec((found,)))
        return found

    queries = entry(QUERY_LENGTH, request.query_length)
    features, taken = entry(HEAD_DIM, request.value_head_dim), get_names_from_partition_spec((batch, heads, queries))
    keys = entry(KV_LENGTH, request.key_length)
    return {
        "attention_outputs": PartitionSpec(batch, queries, heads, features),
        "attention_weights": PartitionSpec(batch, heads, queries, keys),
        "logsumexp": PartitionSpec(batch, heads, queries),
    }


def _mesh_of(mesh: MeshLike | None, ambient: Any, typed: MeshLike | None) -> MeshLike | None:
    """The mesh that a call runs on.

    Raises:
        ValueError: the metadata's is not the one that is set.
    """
    if ambient.empty:
        return mesh if mesh is not None else typed
    if mesh is not None and dict(mesh.shape) != dict(ambient.shape):
        raise ValueError(
            f"metadata.mesh has the axes {dict(mesh.shape)}, but the mesh that jax.set_mesh or jax.shard_map sets has "
            f"{dict(ambient.shape)}; a call runs on one mesh: leave metadata.mesh out, or set the same"
        )
    return ambient  # type: ignore[no-any-return]


def _is_elsewhere(mesh: MeshLike, arrays: Sequence[Any]) -> bool:
    """Whether a call on a mesh of one device would run on another one by itself."""
    if not isinstance(mesh, Mesh):
        return False
    device = mesh.devices.flat[0]
    at_hand = [x for x in map(concrete, arrays) if x is not None]
    return device != default_device() or any(x.sharding.device_set != {device} for x in at_hand)
