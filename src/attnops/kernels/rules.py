"""What rules of `jax.custom_vjp` with symbolic zeros share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero


def is_differentiated(primals: Any) -> bool:
    """Whether a gradient of any array of a pytree is asked for; one given as data costs the backward pass nothing."""
    leaves = jax.tree.leaves(primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    return any(leaf.perturbed for leaf in leaves)


def cotangents(given: Any, like: jax.Array) -> tuple[jax.Array, ...]:
    """The cotangents as arrays, those that are 0 too.

    Args:
        given: as the rule is given them.
        like: an array that varies over the mesh axes that they are to vary over.
    """
    return tuple(
        jnp.zeros_like(like, shape=x.shape, dtype=x.dtype) if isinstance(x, SymbolicZero) else x for x in given
    )


def inexact_vjp(function: Callable[[Any], Any], tree: Any) -> Callable[[Any], Any]:
    """The pullback of ``function`` at a pytree, where integers have no gradient: they are None in what it returns.

    The pullback takes a pytree of the structure of the function's value, with None in place of leaves that have no
    cotangent.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_inexact = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    structure: list[Any] = []

    def of_inexact(given: list[Any]) -> list[Any]:
        rest = iter(given)
        merged = [next(rest) if moves else x for x, moves in zip(leaves, is_inexact, strict=True)]
        value, value_def = jax.tree.flatten(function(jax.tree.unflatten(treedef, merged)))
        structure.append(value_def)
        return value

    value, pull_back = jax.vjp(of_inexact, [x for x, moves in zip(leaves, is_inexact, strict=True) if moves])

    def pulled(d: Any) -> Any:
        given = [_cotangent(x, y) for x, y in zip(value, structure[0].flatten_up_to(d), strict=True)]
        found = iter(pull_back(given)[0])
        return jax.tree.unflatten(treedef, [next(found) if moves else None for moves in is_inexact])

    return pulled


def _cotangent(x: jax.Array, d: jax.Array | None) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.zeros_like(x) if d is None else d.astype(x.dtype)
