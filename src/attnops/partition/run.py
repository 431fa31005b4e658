"""A forward under a mesh: one `jax.shard_map` over batch and heads, in which every device runs its shard of the call.

The compiler can't partition kernels, which are opaque to it. The specs of query and key determine those of masks,
biases, sinks, dropout and outputs. A call that differs from an earlier one in its arrays only reuses that call's
compiled program, also outside `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from attnops.dropout import ShiftedKey
from attnops.output import OperationOutput
from attnops.partition.boundary import Boundary, Entry
from attnops.partition.operands import Operands, Template
from attnops.partition.options import CONTRACT, own_axis, own_option_specs
from attnops.partition.placing import placed, resharded
from attnops.partition.shards import Shard, shard_of, specs_of
from attnops.programs.functions import holds_function

if TYPE_CHECKING:
    from attnops.typing import Function, Index, Leaf, Options, PyTree


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
        boundary: see `attnops.partition.boundary.find_boundary`.
        function: a forward.
        args: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv].
        options: those of the contract, bound, and others.
        lengths: the mesh axes that shard queries, and keys; query, key, value and outputs are then sharded by length,
            masks and biases are not. (None, None): every device has all tokens, gathered if necessary.
        is_interpreted: whether kernels are interpreted; Pallas's interpreter fails `jax.shard_map`'s check of what
            varies over devices.
        option_axes: the axes of arrays in options that are not in the contract, see `OperationImpl.option_axes`.
        key: all that ``function`` depends on other than its arguments: with equal keys calls share a compiled program.
            None: compiled for this call only, as is a call whose options hold a function, or numpy arrays that are
            known when tracing.

    Raises:
        UnsupportedError: other options have arrays that ``option_axes`` does not name.
    """
    q_spec = PartitionSpec(boundary.batch, lengths[0], boundary.heads)
    kv_spec = PartitionSpec(boundary.batch, lengths[1], boundary.kv_heads)
    operands = Operands(
        args, options, {"args": (q_spec, kv_spec, kv_spec), **_specs(boundary, args, options, option_axes)}
    )
    by_head = PartitionSpec(boundary.batch, boundary.heads, lengths[0])
    fields = {"attention_outputs": q_spec, "attention_weights": by_head, "logsumexp": by_head}
    wanted = _wanted(options)
    local = _ShardForward(
        function, operands.template, wanted, boundary.batch, boundary.heads, boundary.kv_heads,
        args[0].shape[2] // args[1].shape[2], _by_kv_head(options, option_axes),
    )  # fmt: skip
    where = _where(boundary)
    program = _Program(
        local, tuple(operands.specs), tuple(fields[name] for name in wanted), not is_interpreted, where,
        None if key is None else _key(key, boundary, local, options, where),
    )  # fmt: skip
    compiled = _compiled(program) if program.key is not None else program.compiled()
    moved = [placed(x, spec, boundary.mesh) for x, spec in zip(operands.arrays, operands.specs, strict=True)]
    return OperationOutput(**dict(zip(wanted, compiled(*moved), strict=True)))


@dataclasses.dataclass(frozen=True, eq=False)
class _ShardForward:
    """The computation of one device; holds no operand.

    Attributes:
        function: the forward.
        template: the call's arguments without its operands.
        wanted: the fields of the output that the call asks for.
        batch, heads, kv_heads: the mesh axes that shard them.
        group: query heads a kv head, in the whole call.
        by_kv_head: by name of an option that is not in the contract, the axis of its arrays that is kv heads.
    """

    function: Callable[..., OperationOutput]
    template: Template
    wanted: tuple[str, ...]
    batch: Entry
    heads: Entry
    kv_heads: Entry
    group: int
    by_kv_head: tuple[tuple[str, int], ...]

    def run(self, *arrays: Leaf) -> tuple[Leaf, ...]:
        """The wanted fields of this device's shard, from its operands; inside `jax.shard_map`."""
        (query, key, value), rest = self.template.filled(arrays)
        shard = Shard(_first(self.batch, query.shape[0]), _first(self.heads, query.shape[2]),
                      query.shape[0], query.shape[2])  # fmt: skip
        if self.kv_heads != self.heads:
            key, value = (_kv_heads(x, shard, self.group) for x in (key, value))
            for name, axis in self.by_kv_head:
                rest[name] = jax.tree.map(
                    lambda x, a=axis: x if x.shape[a] == 1 else _kv_heads(x, shard, self.group, a),  # type: ignore[misc]
                    rest[name],
                )
        for name in ("mask", "bias"):
            if name in rest:
                rest[name] = shard_of(rest[name], shard)
        if "dropout_key" in rest:
            rest["dropout_key"] = ShiftedKey(rest["dropout_key"], shard.b, shard.h)
        return _fields(self.function(query, key, value, **rest), self.wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A `jax.shard_map`, compared by its key only.

    Attributes:
        local: the computation of one device.
        in_specs: of its operands.
        out_specs: of the wanted fields.
        check_vma: see `jax.shard_map`.
        where: the mesh, or the axes of the current mesh.
        key: None for a program that must not be cached.
    """

    local: _ShardForward
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    check_vma: bool
    where: dict[str, Any]
    key: Hashable | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple[Hashable, ...]:
        return self.in_specs, self.out_specs, self.check_vma, self.key

    def compiled(self) -> Function:
        """The program under `jax.jit`: without it JAX has no gradient of a kernel's rule inside `jax.shard_map`."""
        return jax.jit(
            jax.shard_map(
                self.local.run, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=self.check_vma, **self.where
            )
        )


@functools.lru_cache(maxsize=256)
def _compiled(program: _Program) -> Function:
    return program.compiled()


def forget_programs() -> None:
    """Drop compiled programs: a forward may look up another operation by name, which has changed."""
    _compiled.cache_clear()


def _key(
    key: Hashable, boundary: Boundary, local: _ShardForward, options: Options, where: Mapping[str, Any]
) -> Hashable | None:
    """The cache key of a program, without arrays or functions of the caller's; None where it would hold one."""
    if holds_function(options.get("mask")) or holds_function(options.get("bias")):
        return None
    own = [option for name, option in options.items() if name not in CONTRACT]
    if not jax.tree_util.all_leaves(own):
        return None  # the structure of an operation's own option may hold anything
    template = local.template.key
    if template is None:
        return None
    return (key, template, boundary.mesh, tuple(sorted(where)), local.wanted, local.batch, local.heads, local.kv_heads,
            local.group, local.by_kv_head)  # fmt: skip


def _by_kv_head(options: Options, option_axes: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    own = ((name, own_axis(name, option_axes)) for name in options if name not in CONTRACT)
    return tuple((name, axis) for name, axis in own if axis is not None)


def run_unsharded(
    boundary: Boundary, function: Callable[..., OperationOutput], args: tuple[Leaf, Leaf, Leaf], options: Options
) -> OperationOutput:
    """``function(*args, **options)``, which is plain JAX, partitioned by JAX's compiler.

    With explicit axes all devices compute all of it, since JAX has no gradient of `jax.sharding.auto_axes` in
    `jax.shard_map`.

    Args:
        boundary: nested in another, see `Boundary.is_nested`.
        function: a forward.
        args: see `run_sharded`.
        options: those of the contract, bound.
    """
    if not boundary.is_explicit:
        return function(*args, **options)
    given = {"args": args, **options}
    replicated = jax.tree.map(
        lambda x: resharded(x, PartitionSpec(), boundary.mesh) if isinstance(x, jax.Array) else x, given
    )
    return function(*replicated.pop("args"), **replicated)


def _specs(
    boundary: Boundary, args: tuple[Leaf, Leaf, Leaf], options: Options, option_axes: Mapping[str, str]
) -> dict[str, Any]:
    """The specs of each option's arrays, by its name."""
    entries = {"b": boundary.batch, "h": boundary.heads, "k": boundary.kv_heads}
    sizes = {"b": args[0].shape[0], "h": args[0].shape[2], "k": args[1].shape[2]}

    def spec_of(shape: tuple[int, ...], letters: str) -> PartitionSpec:
        sized = zip(letters, shape, strict=False)
        return PartitionSpec(*(entries.get(letter) if size > 1 else None for letter, size in sized))

    specs: dict[str, PyTree] = {}
    for name, option in options.items():
        if name in ("mask", "bias"):
            specs[name] = specs_of(option, spec_of)
        elif name not in CONTRACT:
            specs[name] = own_option_specs(name, option, option_axes, sizes, spec_of)
        else:
            by_head = "h" if name == "sinks" else ""
            specs[name] = jax.tree.map(lambda x, by=by_head: spec_of(jnp.shape(x), by), option)  # type: ignore[misc]
    return specs


def _wanted(options: Options) -> tuple[str, ...]:
    """The fields of the output that a call asks for."""
    asked = {"return_weights": "attention_weights", "return_lse": "logsumexp"}
    return ("attention_outputs", *(field for option, field in asked.items() if option in options))


def _fields(output: OperationOutput, wanted: tuple[str, ...]) -> tuple[Leaf, ...]:
    if not isinstance(output, OperationOutput):
        raise TypeError(f"a forward returned a {type(output).__name__}, but must return OperationOutput")
    return tuple(getattr(output, name) for name in wanted)


def _where(boundary: Boundary) -> dict[str, Any]:
    if not boundary.is_ambient:
        return {"mesh": boundary.mesh}
    manual = set(boundary.mesh.manual_axes)  # type: ignore[union-attr]
    return {"axis_names": set(boundary.mesh.axis_names) - manual} if manual else {}


def _first(entry: Entry, size: int) -> Index:
    """The first index of this device's shard of a dimension, of ``size`` indices."""
    return jnp.int32(0) if entry is None else lax.axis_index(entry) * size


def _kv_heads(x: jax.Array, shard: Shard, group: int, axis: int = 2) -> jax.Array:
    """The kv heads that this device's query heads use, selected from all K.

    One kv head per query head, with repeats, if neither the group nor the device's number of query heads divides the
    other.

    Args:
        x: keys or values [B, S, K, d], or an array that has K along another axis.
        shard: of the device.
        group: query heads a kv head, in the whole call.
        axis: of kv heads.
    """
    first, count = shard.h // group, max(1, shard.heads // group)
    if shard.heads % group == 0 or group % shard.heads == 0:
        return lax.dynamic_slice_in_dim(x, first, count, axis=axis)
    return jnp.take(x, (shard.h + jnp.arange(shard.heads)) // group, axis=axis)
