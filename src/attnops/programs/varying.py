"""The mesh axes that arrays vary over, inside `jax.shard_map`."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

from attnops.typing import Aval, Leaf, PyTree

Tree = TypeVar("Tree")


def equally_varying(tree: Tree) -> Tree:
    """The same arrays, each varying over all mesh axes that any of them varies over, as a loop's carry must.

    Gradients are summed over the axes that are added. Outside `jax.shard_map` the arrays are returned unchanged.
    """
    axes: frozenset[str] = frozenset().union(*map(_axes, jax.tree.leaves(tree)))

    def vary(x: Leaf) -> Leaf:
        missing = axes - _axes(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def varies(tree: PyTree) -> bool:
    """Whether any array varies over a mesh axis."""
    return any(map(_axes, jax.tree.leaves(tree)))


def _axes(x: Leaf) -> frozenset[str]:
    if not isinstance(x, jax.core.Tracer):
        return frozenset()
    aval: Aval = jax.typeof(x)
    varying: frozenset[str] = aval.mat.varying
    return varying
