"""A forward under a mesh: one `jax.shard_map` over batch and heads, in which every device runs a part of the call.

Kernels can't be partitioned by the compiler, which sees but a name. What cuts query and key says how everything beside
them is cut: masks, biases, sinks, dropout, outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from attnops.dropout import ShiftedKey
from attnops.output import OperationOutput
from attnops.partition.operands import Operands
from attnops.partition.options import CONTRACT, own_axis, own_option_specs
from attnops.partition.parts import Place, part_of, specs_of
from attnops.partition.placing import (
    concrete,
    explicit_names,
    mapped_names,
    mesh_of_types,
    own_entry,
    placed,
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
    q_spec = PartitionSpec(boundary.batch, lengths[0], boundary.heads)
    kv_spec = PartitionSpec(boundary.batch, lengths[1], boundary.kv_heads)
    operands = Operands(
        args, options, {"args": (q_spec, kv_spec, kv_spec), **_specs(boundary, args, options, option_axes)}
    )
    wanted = _wanted(options)

    def part(*arrays: Any) -> tuple[Any, ...]:
        (query, key, value), rest = operands.filled(arrays)
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
        return _fields(function(query, key, value, **rest), wanted)

    by_head = PartitionSpec(boundary.batch, boundary.heads, lengths[0])
    fields = {"attention_outputs": q_spec, "attention_weights": by_head, "logsumexp": by_head}
    mapped: Any = jax.shard_map(
        part, in_specs=tuple(operands.specs), out_specs=tuple(fields[name] for name in wanted),
        check_vma=not is_interpreted, **_where(boundary),
    )  # fmt: skip
    moved = [placed(x, spec, boundary.mesh) for x, spec in zip(operands.arrays, operands.specs, strict=True)]
    # Compiled in any case: outside `jax.jit` JAX can't differentiate a kernel's rule inside `jax.shard_map`.
    return OperationOutput(**dict(zip(wanted, jax.jit(mapped)(*moved), strict=True)))


def run_whole(
    boundary: Boundary, function: Callable[..., OperationOutput], args: tuple[Any, Any, Any], options: Mapping[str, Any]
) -> OperationOutput:
    """What ``function(*args, **options)``, which is plain JAX, gives, for JAX's compiler to cut.

    It can't where axes are explicit: there every device of these computes all, as JAX has no gradient of
    `jax.sharding.auto_axes` in `jax.shard_map`.

    Args:
        boundary: nested in another, see `Boundary.is_nested`.
        function: a forward.
        args: see `run_in_parts`.
        options: those of the contract, bound.
    """
    if not boundary.is_explicit:
        return function(*args, **options)
    given = {"args": args, **options}
    whole = jax.tree.map(
        lambda x: resharded(x, PartitionSpec(), boundary.mesh) if isinstance(x, jax.Array) else x, given
    )
    return function(*whole.pop("args"), **whole)


def _specs(
    boundary: Boundary, args: tuple[Any, Any, Any], options: Mapping[str, Any], option_axes: Mapping[str, str]
) -> dict[str, Any]:
    """Of each option, the specs of its arrays."""
    cuts = {"b": boundary.batch, "h": boundary.heads, "k": boundary.kv_heads}
    sizes = {"b": args[0].shape[0], "h": args[0].shape[2], "k": args[1].shape[2]}

    def spec_of(shape: tuple[int, ...], letters: str) -> PartitionSpec:
        sized = zip(letters, shape, strict=False)
        return PartitionSpec(*(cuts.get(letter) if size > 1 else None for letter, size in sized))

    specs: dict[str, Any] = {}
    for name, option in options.items():
        if name in ("mask", "bias"):
            specs[name] = specs_of(option, spec_of)
        elif name not in CONTRACT:
            specs[name] = own_option_specs(name, option, option_axes, sizes, spec_of)
        else:
            by_head = "h" if name == "sinks" else ""
            specs[name] = jax.tree.map(lambda x, by=by_head: spec_of(jnp.shape(x), by), option)  # type: ignore[misc]
    return specs


def _wanted(options: Mapping[str, Any]) -> list[str]:
    """The fields of the output that a call asks for."""
    asked = {"return_weights": "attention_weights", "return_lse": "logsumexp"}
    return ["attention_outputs", *(field for option, field in asked.items() if option in options)]


def _fields(found: Any, wanted: list[str]) -> tuple[Any, ...]:
    if not isinstance(found, OperationOutput):
        raise TypeError(f"a forward returned a {type(found).__name__}, but must return OperationOutput")
    return tuple(getattr(found, name) for name in wanted)


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


def _where(boundary: Boundary) -> dict[str, Any]:
    if not boundary.is_ambient:
        return {"mesh": boundary.mesh}
    manual = set(boundary.mesh.manual_axes)  # type: ignore[union-attr]
    return {"axis_names": set(boundary.mesh.axis_names) - manual} if manual else {}


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
