"""A forward under a mesh: one `jax.shard_map` over batch and heads, in which every device runs a part of the call.

Kernels can't be partitioned by the compiler, which sees but a name. What cuts query and key says how everything beside
them is cut: masks, biases, sinks, dropout, outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnops.dispatch.output import OperationOutput
from attnops.dispatch.request import AttentionRequest
from attnops.dropout import ShiftedKey
from attnops.partition.options import CONTRACT, own_axis, own_option_specs
from attnops.partition.parts import Place, part_of, specs_of
from attnops.sharding.axes import BATCH, HEAD, KV_HEAD, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.mesh import get_names_from_partition_spec
from attnops.sharding.rules import AxisRules, MeshAxes
from attnops.sharding.specs import MeshLike, correct_spec

Entry = MeshAxes


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
    """

    mesh: MeshLike
    is_ambient: bool
    batch: Entry
    heads: Entry
    kv_heads: Entry
    lengths: tuple[tuple[str, ...] | None, tuple[str, ...] | None]

    @property
    def is_nested(self) -> bool:
        """Whether an enclosing `jax.shard_map` has cut some axes already."""
        return self.is_ambient and bool(self.mesh.manual_axes)  # type: ignore[union-attr]

    @property
    def sequence(self) -> tuple[str, ...]:
        """The mesh axes that the rules cut queries or keys by."""
        return tuple(get_names_from_partition_spec(self.lengths))


def find_boundary(mesh: MeshLike | None, rules: AxisRules, request: AttentionRequest) -> Boundary | None:
    """How a mesh cuts a call; None where there is no mesh of more than one device, or it cuts nothing.

    Args:
        mesh: the metadata's; where one is set, that one counts.
        rules: the metadata's.
        request: what the call is.
    """
    ambient = jax.sharding.get_abstract_mesh()
    found: MeshLike | None = mesh if ambient.empty else ambient
    manual = set() if ambient.empty else set(ambient.manual_axes)
    if found is None:
        return None
    free = {name: size for name, size in found.shape.items() if name not in manual}
    if math.prod(free.values()) == 1:
        return None

    def cut(wanted: Any, size: int) -> Entry:
        names = tuple(name for name in get_names_from_partition_spec((wanted,)) if name in free)
        return correct_spec(PartitionSpec(names), (size,), found)[0] if names else None  # type: ignore[no-any-return]

    # Together: what cuts the batch does not cut heads as well.
    spec = rules.spec([BATCH, HEAD], mode=request.mode)
    batch, heads = cut(spec[0], request.batch), cut(spec[1], request.heads)
    kv_heads = cut(rules.spec([BATCH, KV_HEAD], mode=request.mode)[1], request.kv_heads)
    taken = get_names_from_partition_spec((batch, heads))

    def wanted(axis: str) -> tuple[str, ...] | None:
        """What the rules cut a length by, whether it divides or not."""
        names = get_names_from_partition_spec(rules.spec([axis], mode=request.mode))
        return tuple(name for name in names if free.get(name, 1) > 1 and name not in taken) or None

    lengths = wanted(QUERY_LENGTH), wanted(KV_LENGTH)
    if (batch, heads, *lengths) == (None, None, None, None):
        return None  # no rule speaks of this mesh, or nothing divides: the compiler may do as it likes
    return Boundary(
        mesh=found,
        is_ambient=not ambient.empty,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads if kv_heads == heads else None,
        lengths=lengths,
    )


def run_in_parts(
    boundary: Boundary,
    function: Callable[..., OperationOutput],
    args: tuple[Any, Any, Any],
    options: Mapping[str, Any],
    lengths: tuple[Entry, Entry] = (None, None),
    is_interpreted: bool = False,
    option_axes: Mapping[str, str] = MappingProxyType({}),
) -> OperationOutput:
    """What ``function(*args, **options)`` gives, each device computing its batches and heads.

    Args:
        boundary: see `find_boundary`.
        function: a forward.
        args: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv].
        options: those of the contract, bound, and others.
        lengths: the mesh axes that cut queries, and keys. Without, every device has whole sequences: those that are cut
            are gathered. With them, query, key, value and outputs are cut; masks and biases are not.
        is_interpreted: whether kernels are; Pallas's interpreter mixes what varies over devices with what does not.
        option_axes: how the arrays of options that are not the contract's are cut, see `OperationImpl.option_axes`.

    Raises:
        UnsupportedError: they have arrays that it does not name.
    """
    H, K = args[0].shape[2], args[1].shape[2]
    cuts = {"b": boundary.batch, "h": boundary.heads, "k": boundary.kv_heads}
    sizes = {"b": args[0].shape[0], "h": H, "k": K}

    def spec_of(shape: tuple[int, ...], letters: str) -> PartitionSpec:
        sized = zip(letters, shape, strict=False)
        return PartitionSpec(*(cuts.get(letter) if size > 1 else None for letter, size in sized))

    q_spec = PartitionSpec(boundary.batch, lengths[0], boundary.heads)
    kv_spec = PartitionSpec(boundary.batch, lengths[1], boundary.kv_heads)
    given = {"args": args, **options}
    specs: dict[str, Any] = {"args": (q_spec, kv_spec, kv_spec)}
    for name, option in options.items():
        if name in ("mask", "bias"):
            specs[name] = specs_of(option, spec_of)
        elif name not in CONTRACT:
            specs[name] = own_option_specs(name, option, option_axes, sizes, spec_of)
        else:
            by_head = "h" if name == "sinks" else ""
            specs[name] = jax.tree.map(lambda x, by=by_head: spec_of(jnp.shape(x), by), option)  # type: ignore[misc]
    leaves, tree = jax.tree.flatten(given)
    leaf_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    is_operand = [_is_operand(x, spec) for x, spec in zip(leaves, leaf_specs, strict=True)]
    # One array in two places, such as the segments of queries and of keys, stays one array.
    keys = [(id(x), spec) for x, spec in zip(leaves, leaf_specs, strict=True)]
    operands = {key: x for key, x, moves in zip(keys, leaves, is_operand, strict=True) if moves}
    operand_specs = [spec for _, spec in operands]

    def part(*arrays: Any) -> tuple[Any, ...]:
        local = dict(zip(operands, arrays, strict=True))
        here = jax.tree.unflatten(tree, [local.get(key, x) for key, x in zip(keys, leaves, strict=True)])
        (query, key, value), rest = here.pop("args"), here
        place = Place(_first(boundary.batch, query.shape[0]), _first(boundary.heads, query.shape[2]),
                      query.shape[0], query.shape[2])  # fmt: skip
        if boundary.kv_heads != boundary.heads:
            key, value = (_kv_heads(x, place, H // K) for x in (key, value))
            for name in options:
                if (axis := own_axis(name, option_axes)) is not None and name not in CONTRACT:
                    rest[name] = jax.tree.map(
                        lambda x, a=axis: x if x.shape[a] == 1 else _kv_heads(x, place, H // K, a),  # type: ignore[misc]
                        rest[name],
                    )
        for name in ("mask", "bias"):
            if name in rest:
                rest[name] = part_of(rest[name], place)
        if "dropout_key" in rest:
            rest["dropout_key"] = ShiftedKey(rest["dropout_key"], place.b, place.h)
        found = function(query, key, value, **rest)
        if not isinstance(found, OperationOutput):
            raise TypeError(f"a forward returned a {type(found).__name__}, but must return OperationOutput")
        return tuple(getattr(found, name) for name in wanted)

    fields = {
        "attention_outputs": q_spec,
        "attention_weights": PartitionSpec(boundary.batch, boundary.heads, lengths[0]),
        "logsumexp": PartitionSpec(boundary.batch, boundary.heads, lengths[0]),
    }
    asked = {"attention_weights": "return_weights", "logsumexp": "return_lse"}
    wanted = [name for name in fields if name not in asked or asked[name] in options]
    mapped: Any = jax.shard_map(
        part, in_specs=tuple(operand_specs), out_specs=tuple(fields[name] for name in wanted),
        check_vma=not is_interpreted, **_where(boundary),
    )  # fmt: skip
    moved = [_placed(boundary, x, spec) for x, spec in zip(operands.values(), operand_specs, strict=True)]
    # Compiled in any case: outside `jax.jit` JAX can't differentiate a kernel's rule inside `jax.shard_map`.
    compiled = jax.jit(mapped, **_given_at(boundary.mesh, operand_specs))
    return OperationOutput(**dict(zip(wanted, compiled(*moved), strict=True)))


def _is_operand(leaf: Any, spec: PartitionSpec) -> bool:
    """Whether a leaf goes through `jax.shard_map`. What is known when tracing, and not cut, stays known."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray)) or hasattr(leaf, "aval")
    return is_array and (not isinstance(leaf, np.ndarray) or any(entry is not None for entry in spec))


def _where(boundary: Boundary) -> dict[str, Any]:
    if not boundary.is_ambient:
        return {"mesh": boundary.mesh}
    manual = set(boundary.mesh.manual_axes)  # type: ignore[union-attr]
    return {"axis_names": set(boundary.mesh.axis_names) - manual} if manual else {}


def _placed(boundary: Boundary, x: Any, spec: PartitionSpec) -> Any:
    """An operand where the mesh wants it: explicit axes, and arrays outside `jax.jit`, do not move by themselves."""
    mesh = boundary.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, spec))
    if not isinstance(mesh, jax.sharding.Mesh) or isinstance(x, jax.core.Tracer):
        return x
    return jax.device_put(x, NamedSharding(mesh, spec))


def _given_at(mesh: MeshLike, specs: list[PartitionSpec]) -> dict[str, Any]:
    """Where `jax.jit` is given its operands: unlike `_placed`, it knows of mapped axes."""
    if not isinstance(mesh, jax.sharding.Mesh) or any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return {}
    return {"in_shardings": tuple(NamedSharding(mesh, spec) for spec in specs)}


def _first(entry: Entry, size: int) -> Any:
    """The first index of this device's part of a dimension, of which it has ``size``."""
    return jnp.int32(0) if entry is None else lax.axis_index(entry) * size


def _kv_heads(x: jax.Array, place: Place, group: int, axis: int = 2) -> jax.Array:
    """Of all kv heads those of this device's query heads: a divisor of them, repeated as few times as possible.

    Args:
        x: keys or values [B, S, K, d], or an array that has K along another axis.
        place: the device's.
        group: query heads a kv head, in the whole call.
        axis: that of kv heads.
    """
    first, count = place.h // group, max(1, place.heads // group)
    if place.heads % group == 0 or group % place.heads == 0:
        return lax.dynamic_slice_in_dim(x, first, count, axis=axis)
    return jnp.take(x, (place.h + jnp.arange(place.heads)) // group, axis=axis)
