"""Calls inside a `jax.shard_map` of the caller: how it shards the arrays, and how masks and biases are gathered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from attnops import (
    AttentionRequest,
    OperationImpl,
    OperationMetadata,
    OperationOutput,
    Reason,
    UnsupportedError,
    forward_for,
)
from attnops.biases import Bias, ScoreFn
from attnops.dropout import ShiftedKey
from attnops.kernels import equally_varying
from attnops.masks import Mask, MaskFn
from attnops.sharding import BATCH, HEAD, KV_HEAD, KV_LENGTH, QUERY_LENGTH, AxisRules, get_names_from_partition_spec
from attnops_ring.gather import Axis, gathered
from attnops_ring.orders import Order, positions

if TYPE_CHECKING:
    from attnops import Call
    from attnops.typing import Function, Leaf


# The rules of a device's operation: inside `jax.shard_map` it shards nothing.
NO_RULES: Final = AxisRules(batch=None, head=None, kv_head=None, query_length=None, kv_length=None, decode=())


class ManualSharding(NamedTuple):
    """How an enclosing `jax.shard_map` shards the sequence.

    Attributes:
        axes: the mesh axes that shard the keys, each of at least two devices.
        sizes: the number of devices along each of ``axes``.
        has_all_queries: whether the queries are replicated.
        free: mesh axes of at least two devices that are not manual in the `jax.shard_map`: JAX's compiler shards them.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    has_all_queries: bool
    free: tuple[str, ...]

    @property
    def lengths(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The mesh axes that shard the queries (None if replicated), and those that shard the keys."""
        return (None if self.has_all_queries else self.axes), self.axes

    @property
    def shards(self) -> tuple[int, int]:
        """The number of shards of the queries, and of the keys."""
        n = math.prod(self.sizes)
        return (1 if self.has_all_queries else n), n


def find_manual_sharding(metadata: OperationMetadata, mode: str) -> ManualSharding | None:
    """How the mesh axes that the rules name for queries and keys shard a call's arrays; None if none of them is manual.

    Args:
        metadata: the metadata of the operation.
        mode: the runtime mode of the call.

    Raises:
        UnsupportedError: the rules do not say how the arrays are sharded.
        ValueError: the metadata's mesh and the current mesh have different axes.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.manual_axes:
        return None
    rules = metadata.axis_rules

    def names(*axes: str) -> tuple[str, ...]:
        named = get_names_from_partition_spec(rules.spec(axes, mode=mode))
        return tuple(name for name in named if mesh.shape.get(name, 1) > 1)

    # As without an enclosing `jax.shard_map`, axes that shard the batch or heads do not shard the sequence.
    others = {*names(BATCH, HEAD), *names(BATCH, KV_HEAD)}
    by_query, by_key = (tuple(x for x in names(axis) if x not in others) for axis in (QUERY_LENGTH, KV_LENGTH))
    manual = frozenset(mesh.manual_axes)
    if not manual & {*by_query, *by_key}:
        return None
    if by_query not in ((), by_key) or not manual.issuperset(by_key):
        _refuse(
            "axis_rules", f"query_length={by_query or None}, kv_length={by_key or None}, manual axes={sorted(manual)}",
            "inside jax.shard_map must give keys, and queries, the same manual axes, or queries none",
            "name them all in shard_map's axis_names and in both rules, or set query_length=None",
        )  # fmt: skip
    if metadata.mesh is not None and dict(metadata.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"metadata.mesh has the axes {dict(metadata.mesh.shape)}, but the mesh that jax.shard_map sets has "
            f"{dict(mesh.shape)}; a call runs on one mesh: leave metadata.mesh out, or set an equal one"
        )
    free = tuple(name for name, size in mesh.shape.items() if name not in manual and size > 1)
    return ManualSharding(by_key, tuple(mesh.shape[name] for name in by_key), not by_query, free)


def check_varying(sharding: ManualSharding, arrays: Mapping[str, Leaf]) -> None:
    """Raise an `UnsupportedError` for arrays that are equal on all devices, and so can't be shards.

    `jax.shard_map` knows which arrays these are only with ``check_vma=True``.

    Args:
        sharding: how the sequence is sharded.
        arrays: query, key and value by name.
    """
    wanted = {*sharding.axes} & _varying(lax.axis_index(sharding.axes))
    for name, x in arrays.items():
        if name == "query" and sharding.has_all_queries:
            continue
        if missing := wanted - _varying(x):
            _refuse(
                name, f"{x.dtype} {list(x.shape)}, equal along {sorted(missing)}",
                f"must be a device's shard of a sequence that {list(sharding.axes)} shard",
                "give it in_specs with these axes; or jax.lax.pcast(x, axes, to='varying') where all shards are equal; "
                "or set query_length=None for queries that all devices have",
            )  # fmt: skip


def check_free(sharding: ManualSharding, request: AttentionRequest, operation: OperationImpl) -> None:
    """Raise an `UnsupportedError` if JAX would have to shard a kernel over axes that are not manual.

    Args:
        sharding: how the sequence is sharded.
        request: the request of the call.
        operation: the operation that each device runs.
    """
    types = dict(
        zip(jax.sharding.get_abstract_mesh().axis_names, jax.sharding.get_abstract_mesh().axis_types, strict=True)
    )
    is_plain = operation.is_plain(forward_for(type(operation), request.platform))
    wrong = [name for name in sharding.free if types[name] != AxisType.Auto or not is_plain]
    if wrong:
        _refuse(
            "shard_map", f"axis_names without {wrong}", "JAX's compiler can't shard a kernel, nor explicit axes",
            "name all mesh axes in axis_names",
        )  # fmt: skip


def _varying(x: Leaf) -> frozenset[str]:
    """The manual mesh axes over which an array varies."""
    kind: Any = jax.typeof(x)
    names: frozenset[str] = kind.mat.varying
    return names


def _refuse(argument: str, given: object, limit: str, hint: str) -> None:
    reason = Reason(argument, given, limit, hint)
    raise UnsupportedError(f"RingAttention can't serve this call inside jax.shard_map:\n  - {reason}", [reason])


def run_here(function: Function, call: Call, options: dict[str, Any]) -> OperationOutput:
    """Run a device's function on this device's arrays, inside a `jax.shard_map` of the caller."""
    key = options.get("dropout_key")
    if key is not None:
        options["dropout_key"] = key if isinstance(key, ShiftedKey) else ShiftedKey(key)
    leaves, tree = jax.tree.flatten((call.args, options))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def run(arrays: list[jax.Array]) -> OperationOutput:
        given = dict(zip(places, arrays, strict=True))  # numpy arrays stay known when tracing
        args, named = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        output: OperationOutput = function(*args, **named)
        return output

    # Outside `jax.jit` JAX has no gradient of the ring's rule inside `jax.shard_map`.
    output = jax.jit(run)([leaves[i] for i in places])
    return output.replace(attention_outputs=output.attention_outputs.astype(call.args[0].dtype))


class WholeArrays:
    """Gathers arrays of the whole sequence from the devices' shards.

    Args:
        sharding: how the sequence is sharded.
        lengths: the numbers of this device's queries and keys.
        order: the layout of the tokens in the shards.
        devices: the number of devices that ``order`` refers to.
    """

    def __init__(self, sharding: ManualSharding, lengths: tuple[int, int], order: Order, devices: int) -> None:
        self.axes: Axis = sharding.axes
        self.order, self.devices = order, devices
        self.lengths = {
            letter: (local, local * n) for letter, local, n in zip("ts", lengths, sharding.shards, strict=True)
        }  # fmt: skip
        self._whole: dict[tuple[int, int], tuple[Leaf, Leaf]] = {}

    def gather(self, value: Leaf, name: str) -> Leaf:
        """A mask, a bias, or an array [B or 1, H or 1, T or 1, S or 1], with whole arrays.

        Args:
            value: not bound yet. Its arrays are whole or this device's shards; their lengths tell which. The arrays of
                a mask or bias that declares no axes must be whole.
            name: the argument's name, for errors.

        Raises:
            ValueError: an array has neither the whole length nor a shard's, or could have either.
        """
        if not isinstance(value, (Mask, Bias)):
            return self._array(value, "bhts", name) if np.ndim(value) == 4 else value
        if isinstance(value, (MaskFn, ScoreFn)):
            self._check_whole(value, name)
        copy = object.__new__(type(value))  # without __init__, which checks arrays
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            x = getattr(value, field.name)
            letters = (value.axes or {}).get(field.name, "")
            if isinstance(x, (Mask, Bias)):
                x = self.gather(x, name)
            elif x is not None and {*letters} & {"t", "s"}:
                x = self._array(x, letters, f"{type(value).__name__}'s {field.name}")
            object.__setattr__(copy, field.name, x)
        return copy

    def _check_whole(self, value: MaskFn | ScoreFn, name: str) -> None:
        """Raise an `UnsupportedError` for arrays of a function that are, or seem to be, this device's shards."""
        is_known = bool(_varying(lax.axis_index(self.axes)))
        shards = {local for local, whole in self.lengths.values() if local != whole}
        for x in jax.tree.leaves(value.args):
            sharded_by = _varying(x) & {*self.axes} if is_known else shards & {*np.shape(x)}
            if sharded_by:
                _refuse(
                    name, f"{type(value).__name__} with an array {list(np.shape(x))}, "
                    f"sharded by {sorted(map(str, sharded_by))}",
                    "a function's arrays must be whole, since their axes are not known",
                    "give all devices the whole array, by `jax.lax.all_gather(x, axes, axis=..., tiled=True)`; with "
                    "check_vma=True JAX knows which arrays differ, else those with a device's length are refused",
                )  # fmt: skip

    def _array(self, x: Leaf, letters: str, name: str) -> Leaf:
        shape = np.shape(x)
        # Ids of tokens may lack the batch.
        present = letters[len(letters) - len(shape) :] if len(shape) <= len(letters) else ""
        sharding = [axis for axis, letter in enumerate(present) if self._is_shard(shape[axis], letter, name, shape)]
        if len(sharding) > 1:
            raise ValueError(
                f"{name} has shape {shape}, a device's shard along queries and along keys: a device needs all keys of "
                f"its queries; give it whole along one of them"
            )
        return x if not sharding else self._gathered(x, sharding[0])

    def _is_shard(self, size: int, letter: str, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a dimension of an array has only this device's tokens; False for broadcast dimensions."""
        if letter not in self.lengths:
            return False
        local, whole = self.lengths[letter]
        if local == whole:
            return False
        what = "queries" if letter == "t" else "keys"
        if size == local == 1:
            raise ValueError(
                f"{name} has shape {shape}, with 1 along {what}: with one token per device that is its shard, or "
                f"the same for all {whole}; give it whole"
            )
        if size not in (1, local, whole):
            raise ValueError(
                f"{name} has shape {shape}, with {size} along {what}, but must have all {whole} or this device's "
                f"{local}"
            )
        return size == local

    def _gathered(self, x: Leaf, axis: int) -> Leaf:
        key = id(x), axis
        if key not in self._whole:  # an array that is used twice is gathered once
            whole = gathered(self.axes, axis, equally_varying((jnp.asarray(x), lax.axis_index(self.axes)))[0])
            if self.order != "contiguous":
                tokens = np.argsort(positions(whole.shape[axis], self.devices, self.order))
                whole = jnp.take(whole, tokens, axis=axis)
            self._whole[key] = x, whole  # with x, so that no other array gets its id
        return self._whole[key][1]
