"""The arrays of a call that go into `jax.shard_map`, taken out of its arguments and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec


class Operands:
    """A call's arrays, each once, with their specs.

    Attributes:
        arrays: those that go in. What is known when tracing, and not cut, stays known.
        specs: of each.
    """

    def __init__(self, args: tuple[Any, Any, Any], options: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
        """Take the arrays out.

        Args:
            args: query, key and value.
            options: the other arguments.
            specs: of ``args`` and of every option, pytrees of their structure.
        """
        self._leaves, self._tree = jax.tree.flatten({"args": args, **options})
        leaf_specs = jax.tree.leaves(dict(specs), is_leaf=lambda x: isinstance(x, PartitionSpec))
        # One array in two places, such as the segments of queries and of keys, stays one array.
        self._keys = [(id(x), spec) for x, spec in zip(self._leaves, leaf_specs, strict=True)]
        self._operands = {
            key: x for key, x in zip(self._keys, self._leaves, strict=True) if _is_operand(x, key[1])
        }  # fmt: skip
        self.arrays = list(self._operands.values())
        self.specs = [spec for _, spec in self._operands]

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """The arguments of the call, ``args`` and options, with other arrays."""
        local = dict(zip(self._operands, arrays, strict=True))
        leaves = [local.get(key, x) for key, x in zip(self._keys, self._leaves, strict=True)]
        options = jax.tree.unflatten(self._tree, leaves)
        return options.pop("args"), options


def _is_operand(leaf: Any, spec: PartitionSpec) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray)) or hasattr(leaf, "aval")
    return is_array and (not isinstance(leaf, np.ndarray) or any(entry is not None for entry in spec))
