"""The arrays of a call that are operands of `jax.shard_map`, taken out of its arguments and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from attnops.typing import Leaf, Options, PyTree

# Types of leaves that may be part of a cache key: compared by value.
_PLAIN: Final = (bool, int, float, str)


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """The arguments of a call without its operands.

    Attributes:
        tree: the structure of ``args`` and options.
        leaves: the leaves of the tree; None for an operand.
        places: for each leaf, the index of its operand; None if it is not an operand.
    """

    tree: PyTreeDef
    leaves: tuple[Leaf, ...]
    places: tuple[int | None, ...]

    def filled(self, arrays: Sequence[Leaf]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, ``args`` and options, with these operands."""
        given = (x if i is None else arrays[i] for x, i in zip(self.leaves, self.places, strict=True))
        options = jax.tree.unflatten(self.tree, given)
        return options.pop("args"), options

    @property
    def key(self) -> Hashable | None:
        """A cache key; None if a leaf is neither an operand nor a number or string."""
        if not all(i is not None or type(x) in _PLAIN for x, i in zip(self.leaves, self.places, strict=True)):
            return None
        # By type and text: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        key = self.tree, tuple((type(x).__name__, repr(x)) for x in self.leaves), self.places
        try:
            hash(key)
        except TypeError:
            return None  # an unhashable static field of a caller's own mask
        return key


class ShardedOperands:
    """A call's arrays, each once, with their specs.

    Attributes:
        arrays: the operands. Replicated numpy arrays are left out, so that they stay known when tracing.
        specs: their partition specs.
        template: the arguments of the call without them.
    """

    def __init__(self, args: tuple[PyTree, ...], options: Options, specs: Mapping[str, PyTree]) -> None:
        """Take the arrays out.

        Args:
            args: query, key and value; or query and cache.
            options: the other arguments.
            specs: partition specs of ``args`` and of every option, pytrees of their structure.
        """
        leaves, tree = jax.tree.flatten({"args": args, **options})
        leaf_specs = jax.tree.leaves(dict(specs), is_leaf=lambda x: isinstance(x, PartitionSpec))
        # One array in two places, such as the segments of queries and of keys, stays one array.
        indices: dict[tuple[int, PartitionSpec], int] = {}
        places: list[int | None] = []
        self.arrays: list[Leaf] = []
        for x, spec in zip(leaves, leaf_specs, strict=True):
            if not _is_operand(x, spec):
                places.append(None)
                continue
            if (id(x), spec) not in indices:
                indices[id(x), spec] = len(self.arrays)
                self.arrays.append(x)
            places.append(indices[id(x), spec])
        self.specs = [spec for _, spec in indices]
        static = tuple(x if i is None else None for x, i in zip(leaves, places, strict=True))
        self.template = Template(tree, static, tuple(places))


def _is_operand(leaf: Leaf, spec: PartitionSpec) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray)) or hasattr(leaf, "aval")
    return is_array and (not isinstance(leaf, np.ndarray) or any(entry is not None for entry in spec))
