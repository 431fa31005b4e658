"""Functions that have no derivative and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from attnops.errors import NotDifferentiableError

Result = TypeVar("Result")


def not_differentiable(function: Callable[..., Result], message: str) -> Callable[..., Result]:
    """``function``, but differentiating it raises `NotDifferentiableError` with ``message``.

    Positional and keyword arguments may be pytrees of arrays and of anything else.
    """

    def wrapped(*args: Any, **options: Any) -> Result:
        leaves, tree = jax.tree.flatten((args, options))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

        @jax.custom_jvp
        def run(arrays: list[jax.Array]) -> Result:
            rest = iter(arrays)
            merged = [next(rest) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
            args, options = jax.tree.unflatten(tree, merged)
            return function(*args, **options)

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise NotDifferentiableError(message)

        result: Result = run([leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
        return result

    return wrapped
