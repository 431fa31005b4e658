"""Compiled programs of calls under a mesh, shared by calls that differ only in their arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from attnops.partition.boundary import Boundary, Entry
from attnops.partition.operands import Template
from attnops.partition.options import CONTRACT
from attnops.programs.functions import holds_function
from attnops.typing import Function, Index, Options


@dataclasses.dataclass(frozen=True)
class ShardedProgram:
    """A `jax.shard_map`, compared without its computation and its mesh, which the key stands for.

    Attributes:
        local: the computation of one device, from its operands to the results of its shard; holds no operand.
        in_specs: the specs of its operands.
        out_specs: the specs of the wanted fields.
        check_vma: whether `jax.shard_map` checks over which axes results vary.
        where: the arguments of `jax.shard_map` that name the mesh, or the axes of the current mesh.
        key: the cache key; None for a program that must not be cached.
    """

    local: Function = dataclasses.field(compare=False)
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    check_vma: bool
    where: dict[str, Any] = dataclasses.field(compare=False)
    key: Hashable | None

    def compiled(self) -> Function:
        """The program under `jax.jit`: without it JAX has no gradient of a kernel's rule inside `jax.shard_map`."""
        return jax.jit(
            jax.shard_map(
                self.local, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=self.check_vma, **self.where
            )
        )


@functools.lru_cache(maxsize=256)
def compiled(program: ShardedProgram) -> Function:
    return program.compiled()


def forget_programs() -> None:
    """Drop compiled programs: they may contain an operation looked up by a name that now means another."""
    compiled.cache_clear()


def program_key(
    key: Hashable,
    boundary: Boundary,
    template: Template,
    options: Options,
    where: Mapping[str, Any],
    static: tuple[Hashable, ...],
) -> Hashable | None:
    """The cache key of a program; None if it would hold an array or a function of the caller's.

    Args:
        key: all that the forward depends on besides its arguments.
        boundary: how the call is sharded.
        template: the call's arguments without its operands.
        options: the call's options.
        where: the arguments that name the mesh.
        static: what else the computation of one device depends on.
    """
    if holds_function(options.get("mask")) or holds_function(options.get("bias")):
        return None
    other_options = [option for name, option in options.items() if name not in CONTRACT]
    if not jax.tree_util.all_leaves(other_options):
        return None  # the structure of an operation's own option may hold anything
    if template.key is None:
        return None
    return key, template.key, boundary.mesh, tuple(sorted(where)), static


def first_index(entry: Entry, size: int) -> Index:
    """The first index of this device's shard of a dimension, of ``size`` indices."""
    return jnp.int32(0) if entry is None else lax.axis_index(entry) * size
