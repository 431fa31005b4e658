"""Derivatives of a kernel: reverse mode by a second kernel, all others by plain JAX.

The tangents of the results are a linear function of the arrays' tangents: a primitive, which reverse mode transposes by
the kernel. The gradients that the kernel computes have derivatives too, by the plain computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attnops.typing import PyTree


def differentiable(
    forward: Callable[[PyTree], tuple[PyTree, PyTree]],
    backward: Callable[[PyTree, PyTree, PyTree], PyTree],
    plain: Callable[[PyTree], PyTree],
    arrays: PyTree,
) -> PyTree:
    """The results of ``forward``, with derivatives of all orders.

    None of the functions may close over traced arrays.

    Args:
        forward: gives its results for the arrays, and what ``backward`` needs besides the arrays.
        backward: gives the gradients of the floating-point arrays, a list in the order of their leaves, from the
            arrays, what ``forward`` kept, and the gradients of the results.
        plain: the same results in plain JAX.
        arrays: the arrays; those that are not floating-point have no derivatives.
    """
    leaves, tree = jax.tree.flatten(arrays)
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def moved(leaves: Sequence[Any], values: Sequence[Any]) -> PyTree:
        """The arrays with these floating-point ones."""
        new = dict(zip(moving, values, strict=True))
        return jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)])

    def of_moving(leaves: Sequence[Any]) -> Callable[..., PyTree]:
        return lambda *values: plain(moved(leaves, values))

    @jax.custom_jvp
    def run(leaves: list[jax.Array]) -> tuple[PyTree, PyTree]:
        return forward(jax.tree.unflatten(tree, leaves))

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        results, kept = run(*primals)
        (leaves,), (tangents,) = primals, tangents
        outputs: PyTree = jax.tree.structure(results)
        kept_leaves, kept_tree = jax.tree.flatten(kept)
        known = *leaves, *kept_leaves
        n, m = len(leaves), len(known)

        def tangent(*given: jax.Array) -> list[jax.Array]:
            found = jax.jvp(of_moving(given[:n]), [given[i] for i in moving], list(given[m:]))[1]
            return jax.tree.leaves(found)

        def transposed(*given: jax.Array) -> list[jax.Array]:
            return list(gradients(list(given[:n]), list(given[n:m]), list(given[m:])))

        @jax.custom_jvp
        def gradients(leaves: Any, kept: Any, d: Any) -> list[jax.Array]:
            d = jax.tree.unflatten(outputs, d)
            return backward(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(kept_tree, kept), d)

        @gradients.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return gradients(*primals), jax.jvp(plain_gradients, primals, tangents)[1]

        def plain_gradients(leaves: Any, kept: Any, d: Any) -> list[jax.Array]:
            pull_back = jax.vjp(of_moving(leaves), *(leaves[i] for i in moving))[1]
            return list(pull_back(jax.tree.unflatten(outputs, d)))

        moved_by = (tangents[i] for i in moving)
        found = _linear.bind(*known, *moved_by, function=tangent, transpose=transposed, known=m)
        return (results, kept), (jax.tree.unflatten(outputs, found), jax.tree.map(jnp.zeros_like, kept))

    return run(leaves)[0]


# ``function(*operands)``, linear in all but the first ``known`` of them. From these and the cotangents of the results
# ``transpose`` gives the cotangents of the others.
_linear: Final = core.Primitive("linear_attention_tangent")
_linear.multiple_results = True


def _evaluate(*given: jax.Array, function: Callable[..., Any], **_: Any) -> list[jax.Array]:
    return list(function(*given))


def _abstract(*given: Any, function: Callable[..., Any], **_: Any) -> list[Any]:
    return list(jax.make_jaxpr(function)(*given).out_avals)


def _jvp(given: Sequence[Any], tangents: Sequence[Any], **call: Any) -> tuple[list[Any], list[Any]]:
    results, known = _linear.bind(*given, **call), call["known"]
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if moving[0] >= known:  # transposed by the kernel again
        return results, _linear.bind(*given[:known], *map(ad.instantiate_zeros, tangents[known:]), **call)

    def of_moving(*values: jax.Array) -> list[jax.Array]:
        new = dict(zip(moving, values, strict=True))
        return list(call["function"](*(new.get(i, x) for i, x in enumerate(given))))

    return results, jax.jvp(of_moving, [given[i] for i in moving], [tangents[i] for i in moving])[1]


def _transpose(
    cotangents: Sequence[Any], *given: Any, transpose: Callable[..., Any], known: int, **_: Any
) -> list[Any]:
    found = transpose(*given[:known], *map(ad.instantiate_zeros, cotangents))
    pairs = zip(given[known:], found, strict=True)
    return [None] * known + [x if ad.is_undefined_primal(given) else None for given, x in pairs]


def _batch(
    given: Sequence[Any], axes: Sequence[int | None], *, function: Any, transpose: Any, known: int
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[a] for x, a in zip(given, axes, strict=True) if a is not None)
    # Each slice has a tangent of its own: no cotangent is a sum over slices.
    given = [
        jnp.broadcast_to(x, (size, *x.shape)) if a is None and i >= known else x if a is None else jnp.moveaxis(x, a, 0)
        for i, (x, a) in enumerate(zip(given, axes, strict=True))
    ]
    each = tuple(None if a is None else 0 for a in axes[:known])

    def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: jax.vmap(function, (*each, *[0] * (len(given) - known)))(*given)

    found = _linear.bind(*given, function=mapped(function), transpose=mapped(transpose), known=known)
    return found, [0] * len(found)


_linear.def_impl(_evaluate)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
