"""A forward under a mesh: one `jax.shard_map` over batch and heads, in which every device runs its shard of the call.

The compiler can't partition kernels, which are opaque to it. The specs of query and key determine the specs of masks,
biases, sinks, dropout and outputs. A call that differs from an earlier one only in its arrays reuses that call's
compiled program, also outside `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from attnops.dropout import ShiftedKey
from attnops.output import OPTIONAL_FIELDS, OperationOutput
from attnops.partition.boundary import Boundary, Entry
from attnops.partition.operands import ShardedOperands
from attnops.partition.options import CONTRACT, kv_head_axes, specs_of_option
from attnops.partition.program import ShardedProgram, compiled, first_index, program_key
from attnops.partition.shards import Shard, shard_of, specs_of
from attnops.sharding.mesh import mesh_arguments
from attnops.sharding.placing import placed
from attnops.typing import Leaf, Options, PyTree

if TYPE_CHECKING:
    Compute = Callable[[Shard, tuple[PyTree, ...], dict[str, Any]], tuple[Leaf, ...]]


def run_sharded(
    boundary: Boundary,
    function: Callable[..., OperationOutput],
    args: tuple[Leaf, Leaf, Leaf],
    options: Options,
    lengths: tuple[Entry, Entry] = (None, None),
    is_interpreted: bool = False,
    option_axes: Mapping[str, str] = MappingProxyType({}),
    key: Hashable | None = None,
) -> OperationOutput:
    """``function(*args, **options)``, each device computing its batches and heads.

    Args:
        boundary: which mesh axes shard the batch, the heads and the lengths.
        function: a forward.
        args: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv].
        options: the contract's options, bound, and the operation's own.
        lengths: the mesh axes that shard queries, and those that shard keys; query, key, value and outputs are then
            sharded by length, masks and biases are not. (None, None): every device has all tokens, gathered if need be.
        is_interpreted: whether kernels are interpreted; Pallas's interpreter fails `jax.shard_map`'s check of which
            values vary over devices.
        option_axes: the axes of arrays in options that are not in the contract, see `OperationImpl.option_axes`.
        key: all that ``function`` depends on besides its arguments: calls with equal keys share a compiled program.
            None: the program is compiled for this call only, as it is if options hold a function, or numpy arrays that
            are known when tracing.

    Raises:
        UnsupportedError: other options have arrays that ``option_axes`` does not name.
    """
    q_spec = PartitionSpec(boundary.batch, lengths[0], boundary.heads)
    kv_spec = PartitionSpec(boundary.batch, lengths[1], boundary.kv_heads)
    by_head = PartitionSpec(boundary.batch, boundary.heads, lengths[0])
    fields = {"attention_outputs": q_spec} | dict.fromkeys(OPTIONAL_FIELDS.values(), by_head)
    wanted, kv_heads = wanted_fields(options), args[1].shape[2]
    group = args[0].shape[2] // kv_heads

    def compute(shard: Shard, args: tuple[Leaf, ...], options: dict[str, Any]) -> tuple[Leaf, ...]:
        query, key, value = args
        if boundary.kv_heads != boundary.heads:
            key, value = (kv_heads_of(x, shard, group) for x in (key, value))
        if "dropout_key" in options:
            options["dropout_key"] = ShiftedKey(options["dropout_key"], shard.b, shard.h)
        return fields_of(function(query, key, value, **options), wanted)

    results = run_on_shards(
        boundary, compute, args, (q_spec, kv_spec, kv_spec), options, tuple(fields[name] for name in wanted), key,
        (wanted,), kv_heads=kv_heads, option_axes=option_axes, check_vma=not is_interpreted,
    )  # fmt: skip
    return OperationOutput(**dict(zip(wanted, results, strict=True)))


def run_on_shards(
    boundary: Boundary, compute: Compute, args: tuple[PyTree, ...], arg_specs: tuple[PyTree, ...], options: Options,
    out_specs: tuple[PartitionSpec, ...], key: Hashable | None, static: tuple[Hashable, ...], *,
    kv_heads: int, option_axes: Mapping[str, str], check_vma: bool, keys: Entry = None,
) -> tuple[Leaf, ...]:  # fmt: skip
    """The results of ``compute``, which each device runs on its shard of a call, as whole arrays.

    Args:
        boundary: which mesh axes shard the batch and the heads.
        compute: the computation of one device, from its batches and heads, args and options; holds no operand.
        args: the query [B, T, H, D], and the other arguments that are not options.
        arg_specs: partition specs of ``args``, pytrees of their structure.
        options: the contract's options, bound, and the operation's own.
        out_specs: the specs of the results.
        key: all that ``compute`` depends on besides its arguments and ``static``, as in `run_sharded`.
        static: what ``compute`` depends on besides ``key``, the boundary and its arguments.
        kv_heads: K of the whole call.
        option_axes: the axes of arrays in options that are not in the contract, see `OperationImpl.option_axes`.
        check_vma: whether `jax.shard_map` checks over which axes results vary.
        keys: the mesh axes that shard keys in options' arrays.
    """
    batch, heads, group = boundary.batch, boundary.heads, args[0].shape[2] // kv_heads
    entries = {"b": batch, "h": heads, "k": boundary.kv_heads, "s": keys}
    sizes = {"b": args[0].shape[0], "h": args[0].shape[2], "k": kv_heads}
    specs = option_specs(entries, sizes, options, option_axes)
    operands = ShardedOperands(args, options, {"args": arg_specs, **specs})
    template, kv_options = operands.template, () if boundary.kv_heads == heads else kv_head_axes(options, option_axes)

    def local(*arrays: Leaf) -> tuple[Leaf, ...]:  # holds no operand
        given, rest = template.filled(arrays)
        B, _, H, _ = given[0].shape
        shard = Shard(first_index(batch, B), first_index(heads, H), B, H)
        for name, axis in kv_options:
            rest[name] = jax.tree.map(
                lambda x, a=axis: x if x.shape[a] == 1 else kv_heads_of(x, shard, group, a),  # type: ignore[misc]
                rest[name],
            )
        rest |= {name: shard_of(rest[name], shard) for name in ("mask", "bias") if name in rest}
        return compute(shard, given, rest)

    where = mesh_arguments(boundary.mesh)
    if key is not None:
        static = *static, batch, heads, boundary.kv_heads, group, kv_options
        key = program_key(key, boundary, template, options, where, static)
    program = ShardedProgram(local, tuple(operands.specs), out_specs, check_vma, where, key)
    run = compiled(program) if key is not None else program.compiled()
    moved = [placed(x, spec, boundary.mesh) for x, spec in zip(operands.arrays, operands.specs, strict=True)]
    return run(*moved)  # type: ignore[no-any-return]


def option_specs(
    entries: Mapping[str, Entry], sizes: Mapping[str, int], options: Options, option_axes: Mapping[str, str]
) -> dict[str, Any]:
    """The specs of each option's arrays, by its name.

    Args:
        entries: the mesh axes that shard each dimension, by letter.
        sizes: B, H and K of the call, by letter.
        options: the contract's options, bound, and the operation's own.
        option_axes: the axes of arrays in options that are not in the contract, see `OperationImpl.option_axes`.
    """

    def spec_of(shape: tuple[int, ...], letters: str) -> PartitionSpec:
        sized = zip(letters, shape, strict=False)
        return PartitionSpec(*(entries.get(letter) if size > 1 else None for letter, size in sized))

    specs: dict[str, PyTree] = {}
    for name, option in options.items():
        if name in ("mask", "bias"):
            specs[name] = specs_of(option, spec_of)
        elif name not in CONTRACT:
            specs[name] = specs_of_option(name, option, option_axes, sizes, spec_of)
        else:
            by_head = "h" if name == "sinks" else ""
            specs[name] = jax.tree.map(lambda x, by=by_head: spec_of(jnp.shape(x), by), option)  # type: ignore[misc]
    return specs


def wanted_fields(options: Options) -> tuple[str, ...]:
    """The fields of the output that a call asks for."""
    return ("attention_outputs", *(field for option, field in OPTIONAL_FIELDS.items() if option in options))


def fields_of(output: OperationOutput, wanted: tuple[str, ...]) -> tuple[Leaf, ...]:
    if not isinstance(output, OperationOutput):
        raise TypeError(f"a forward returned a {type(output).__name__}, but must return OperationOutput")
    return tuple(getattr(output, name) for name in wanted)


def kv_heads_of(x: jax.Array, shard: Shard, group: int, axis: int = 2) -> jax.Array:
    """The kv heads that this device's query heads use, selected from all K.

    One kv head per query head, with repeats, if neither the group nor the device's number of query heads divides the
    other.

    Args:
        x: keys or values [B, S, K, d], or an array that has K along another axis.
        shard: the device's shard.
        group: query heads per kv head, in the whole call.
        axis: the axis of kv heads.
    """
    first, count = shard.h // group, max(1, shard.heads // group)
    if shard.heads % group == 0 or group % shard.heads == 0:
        return lax.dynamic_slice_in_dim(x, first, count, axis=axis)
    return jnp.take(x, (shard.h + jnp.arange(shard.heads)) // group, axis=axis)
