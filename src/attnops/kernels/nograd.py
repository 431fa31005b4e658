"""Functions whose first or second derivative raises a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from attnops.errors import NotDifferentiableError
from attnops.typing import Function, PyTree

Result = TypeVar("Result")


def _of_arrays(function: Callable[..., Result], tree: PyTree) -> tuple[Callable[[list[jax.Array]], Result], PyTree]:
    """``function(*args, **options)`` as a function of the arrays of ``tree``, (args, options); and these arrays."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def of_arrays(arrays: list[jax.Array]) -> Result:
        remaining = iter(arrays)
        merged = [next(remaining) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        args, options = jax.tree.unflatten(structure, merged)
        return function(*args, **options)

    return of_arrays, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]


def not_differentiable(function: Callable[..., Result], message: str) -> Callable[..., Result]:
    """``function``, but differentiating it raises `NotDifferentiableError` with ``message``.

    Positional and keyword arguments may be pytrees of arrays and of anything else.
    """

    def wrapped(*args: PyTree, **options: Any) -> Result:
        call, arrays = _of_arrays(function, (args, options))
        run = jax.custom_jvp(call)

        @run.defjvp
        def _(primals: PyTree, tangents: PyTree) -> PyTree:
            raise NotDifferentiableError(message)

        result: Result = run(arrays)
        return result

    return wrapped


def without_gradient(tree: PyTree, message: str) -> PyTree:
    """``tree`` unchanged, but differentiating with respect to an array of it raises `NotDifferentiableError`."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = iter(not_differentiable(lambda x: x, message)([x for x, a in zip(leaves, is_array, strict=True) if a]))
    return jax.tree.unflatten(structure, [next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)])


def once_differentiable(function: Callable[..., Result], message: str) -> Callable[..., Result]:
    """``function``, but differentiating its gradient raises `NotDifferentiableError` with ``message``.

    For a third party's kernel with a `jax.custom_vjp`, whose gradient has no derivative or a wrong one.
    Positional and keyword arguments may be pytrees of arrays and of anything else; results are pytrees of arrays.
    """

    def wrapped(*args: PyTree, **options: Any) -> Result:
        call, arrays = _of_arrays(function, (args, options))
        run = jax.custom_vjp(call)

        def forward(arrays: list[jax.Array]) -> tuple[Result, PyTree]:
            result: tuple[Result, PyTree] = not_differentiable(lambda x: jax.vjp(call, x), message)(arrays)
            return result

        def backward(pull_back: Function, cotangents: PyTree) -> PyTree:
            return not_differentiable(lambda pull, given: pull(given), message)(pull_back, cotangents)

        run.defvjp(forward, backward)
        return run(arrays)

    return wrapped
