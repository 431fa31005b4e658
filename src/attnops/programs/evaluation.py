"""Programs of scalars evaluated elementwise on arrays whose shapes broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from attnops.programs.program import Program, bind

if TYPE_CHECKING:
    from attnops.typing import Leaf


def evaluate(program: Program, arguments: Sequence[Leaf], data: Sequence[Leaf]) -> jax.Array:
    """The result of a program of scalars, elementwise; what depends on some dimensions is computed for these alone.

    Args:
        program: has one result.
        arguments: arrays that broadcast with one another, in the dtypes of its first inputs.
        data: the other inputs and the constants; arrays that all elements share.

    Returns:
        An array of a shape that broadcasts to the arguments'.
    """
    read = {*program.results, *(x for equation in program.equations for x in equation.inputs)}
    arrays = [jnp.asarray(x) for x in arguments]
    rank = max(x.ndim for x in arrays)
    # An argument that is not read has no dimensions.
    is_read = [i in read for i in program.inputs[: len(arrays)]]
    shapes = [(1,) * (rank - x.ndim) + x.shape if i else (1,) * rank for x, i in zip(arrays, is_read, strict=True)]
    squeezed = [x.reshape([n for n in shape if n != 1]) if i else x.reshape(-1)[0]
                for x, shape, i in zip(arrays, shapes, is_read, strict=True)]  # fmt: skip
    function = lambda *scalars: program.run([*scalars, *data], bind)[0]  # noqa: E731
    for axis in reversed(range(rank)):
        axes = [0 if shape[axis] != 1 else None for shape in shapes]
        function = function if set(axes) == {None} else jax.vmap(function, axes)
    return jnp.asarray(function(*squeezed)).reshape(jnp.broadcast_shapes(*shapes))
