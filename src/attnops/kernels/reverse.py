"""A clear error for forward-mode differentiation of functions that only have reverse mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attnops.errors import NotDifferentiableError

if TYPE_CHECKING:
    from attnops.typing import Leaf, PyTree

Tree = TypeVar("Tree")

REVERSE_ONLY: Final = (
    "this implementation has no forward mode (jax.jvp, linearize, jacfwd), only reverse mode (grad, vjp); vanilla has "
    "both"
)
# The identity on tangents: reverse mode transposes it, and only forward mode evaluates it.
_tangent: Final = core.Primitive("reverse_mode_only")


def reverse_mode_only(tree: Tree, message: str) -> Tree:
    """The same arrays, but forward-mode differentiation raises `NotDifferentiableError` with ``message``.

    For the arguments of a `jax.custom_vjp`: JAX's own error for `jax.jvp` does not name the function. Reverse mode is
    unchanged, at no cost.
    """

    @jax.custom_jvp
    def guard(x: jax.Array) -> jax.Array:
        return x

    @guard.defjvp
    def _(primals: PyTree, tangents: PyTree) -> PyTree:
        return primals[0], _tangent.bind(tangents[0], message=message)

    def guarded(x: Leaf) -> Leaf:
        # One by one, so that an array without a tangent gets none. Only tracers have tangents.
        is_float = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
        return guard(x) if is_float else x

    return jax.tree.map(guarded, tree)


def _raise(*_: PyTree, message: str) -> PyTree:
    raise NotDifferentiableError(message)


_tangent.def_impl(_raise)
_tangent.def_abstract_eval(lambda x, *, message: x)
ad.deflinear2(_tangent, lambda cotangent, x, *, message: [cotangent])  # type: ignore[no-untyped-call]
batching.primitive_batchers[_tangent] = lambda given, axes, *, message: (
    _tangent.bind(*given, message=message),
    axes[0],
)
mlir.register_lowering(_tangent, lambda context, x, *, message: _raise(message=message))
