"""The pullback of a function of pytrees with integer leaves."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attnops.typing import PyTree


def inexact_vjp(function: Callable[[PyTree], PyTree], tree: PyTree) -> Callable[[PyTree], PyTree]:
    """The pullback of ``function`` at a pytree; the gradient of an integer leaf is None.

    The pullback's argument has the structure of the function's value, with None for leaves without a cotangent.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_inexact = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    structure: list[PyTree] = []

    def of_inexact(given: list[PyTree]) -> list[PyTree]:
        remaining = iter(given)
        merged = [next(remaining) if moves else x for x, moves in zip(leaves, is_inexact, strict=True)]
        value, value_def = jax.tree.flatten(function(jax.tree.unflatten(treedef, merged)))
        structure.append(value_def)
        return value

    value, pull_back = jax.vjp(of_inexact, [x for x, moves in zip(leaves, is_inexact, strict=True) if moves])

    def pulled(d: PyTree) -> PyTree:
        given = [_cotangent(x, y) for x, y in zip(value, structure[0].flatten_up_to(d), strict=True)]
        gradients = iter(pull_back(given)[0])
        return jax.tree.unflatten(treedef, [next(gradients) if moves else None for moves in is_inexact])

    return pulled


def _cotangent(x: jax.Array, d: jax.Array | None) -> PyTree:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.zeros_like(x) if d is None else d.astype(x.dtype)
