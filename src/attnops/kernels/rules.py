"""What rules of `jax.custom_vjp` with symbolic zeros share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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
