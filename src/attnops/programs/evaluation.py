"""Programs of scalars evaluated elementwise on arrays whose shapes broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.program import IDENTITIES, Equation, Program, bind

if TYPE_CHECKING:
    from attnops.typing import Leaf

# Primitives that are elementwise on arrays of one shape.
ELEMENTWISE: Final = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type",
    "cbrt", "ceil", "clamp", "convert_element_type", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "population_count", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip


class _Value(NamedTuple):
    """The value of a variable, elementwise over the arguments.

    Attributes:
        array: has the variable's shape; if it varies, preceded by the arguments' shape, each dimension 1 or all.
        varies: whether it has a value for each element of the arguments.
    """

    array: Leaf
    varies: bool


def evaluate(program: Program, arguments: Sequence[Leaf], data: Sequence[Leaf]) -> Leaf:
    """The result of a program of scalars, elementwise.

    Args:
        program: has one result.
        arguments: arrays that broadcast with one another, in the dtypes of its first inputs.
        data: the other inputs and the constants; arrays that all elements share.

    Returns:
        An array of a shape that broadcasts to the arguments'.
    """
    arrays = [jnp.asarray(x) for x in arguments]
    rank = max(x.ndim for x in arrays)
    values = [_Value(x.reshape((1,) * (rank - x.ndim) + x.shape), True) if x.ndim else _Value(x, False) for x in arrays]
    (result,) = _run(program, [*values, *(_Value(jnp.asarray(x), False) for x in data)])
    return result.array


def _run(program: Program, inputs: Sequence[_Value]) -> list[_Value]:
    results: list[_Value] = program.run(inputs, _bind)
    return [x if isinstance(x, _Value) else _Value(jnp.asarray(x), False) for x in results]


def _bind(equation: Equation, inputs: Sequence[Leaf]) -> Leaf:
    given = [x if isinstance(x, _Value) else _Value(np.asarray(x), False) for x in inputs]
    several = equation.primitive.multiple_results
    if equation.is_scalar and equation.primitive.name in IDENTITIES:
        return given if several else given[0]
    if not any(x.varies for x in given):
        result = bind(equation, [x.array for x in given])
        return [_Value(x, False) for x in result] if several else _Value(result, False)
    ranks = [len(shape) for shape in equation.shapes]
    lead = np.broadcast_shapes(*(_lead(x, rank) for x, rank in zip(given, ranks, strict=False) if x.varies))
    if equation.rule is not None:
        return _differentiable(equation, given, lead)
    if equation.is_scalar and equation.primitive.name in ELEMENTWISE:
        return _Value(bind(equation, [jnp.broadcast_to(x.array, lead) for x in given]), True)
    # Element by element, with the primitive's batching rule.
    n = math.prod(lead)
    flat = [
        jnp.broadcast_to(x.array, lead + shape).reshape(n, *shape) if x.varies else x.array
        for x, shape in zip(given, equation.shapes, strict=False)
    ]
    mapped = jax.vmap(lambda *xs: bind(equation, xs), in_axes=[0 if x.varies else None for x in given])(*flat)
    results = [_Value(x.reshape(lead + x.shape[1:]), True) for x in (mapped if several else [mapped])]
    return results if several else results[0]


def _differentiable(equation: Equation, given: Sequence[_Value], lead: tuple[int, ...]) -> list[_Value]:
    """A call of a `jax.custom_jvp` function."""
    assert equation.rule is not None
    shapes = equation.shapes[: len(given)]
    arrays = [
        jnp.broadcast_to(x.array, lead + shape) if x.varies else x.array for x, shape in zip(given, shapes, strict=True)
    ]
    varies = [x.varies for x in given]
    moving = [v for x, v in zip(arrays, varies, strict=True) if jnp.issubdtype(x.dtype, jnp.floating)]
    out_shapes = equation.shapes[len(given) :]

    def evaluated(program: Program, inputs: list[Leaf]) -> list[jax.Array]:
        results = _run(program, [_Value(x, v) for x, v in zip(inputs, [*varies, *moving], strict=False)])
        return [jnp.broadcast_to(x.array, lead + shape) for x, shape in zip(results, out_shapes, strict=True)]

    return [_Value(x, True) for x in equation.rule.apply(arrays, evaluated)]


def _lead(x: _Value, rank: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = np.shape(x.array)
    return shape[: len(shape) - rank]
