"""Programs of scalars evaluated elementwise on arrays, whatever shapes they have as long as these broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.program import IDENTITIES, Equation, Program, bind

# Primitives that do to each element of arrays of one shape what they do to scalars.
ELEMENTWISE: Final = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type",
    "cbrt", "ceil", "clamp", "convert_element_type", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "population_count", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip


class _Value(NamedTuple):
    """A variable on arrays.

    Attributes:
        array: of its own shape; where it varies, with that of the arguments in front, each dimension 1 or all.
        varies: whether it has a value for each element of the arguments.
    """

    array: Any
    varies: bool


def evaluate(program: Program, arguments: Sequence[Any], data: Sequence[Any]) -> Any:
    """The result of a program of scalars, elementwise.

    Args:
        program: of one result.
        arguments: arrays that broadcast with one another, in the dtypes of its first inputs.
        data: what the other inputs and the constants are; arrays that each element has all of.

    Returns:
        An array of a shape that broadcasts to the arguments'.
    """
    arrays = [jnp.asarray(x) for x in arguments]
    rank = max(x.ndim for x in arrays)
    values = [_Value(x.reshape((1,) * (rank - x.ndim) + x.shape), True) if x.ndim else _Value(x, False) for x in arrays]
    (found,) = _run(program, [*values, *(_Value(jnp.asarray(x), False) for x in data)])
    return found.array


def _run(program: Program, inputs: Sequence[_Value]) -> list[_Value]:
    found: list[_Value] = program.run(inputs, _bind)
    return [x if isinstance(x, _Value) else _Value(jnp.asarray(x), False) for x in found]


def _bind(equation: Equation, inputs: Sequence[Any]) -> Any:
    given = [x if isinstance(x, _Value) else _Value(np.asarray(x), False) for x in inputs]
    several = equation.primitive.multiple_results
    if equation.is_scalar and equation.primitive.name in IDENTITIES:
        return given if several else given[0]
    if not any(x.varies for x in given):
        found = bind(equation, [x.array for x in given])
        return [_Value(x, False) for x in found] if several else _Value(found, False)
    ranks = [len(shape) for shape in equation.shapes]
    lead = np.broadcast_shapes(*(_lead(x, rank) for x, rank in zip(given, ranks, strict=False) if x.varies))
    if equation.rule is not None:
        return _differentiable(equation, given, lead)
    if equation.is_scalar and equation.primitive.name in ELEMENTWISE:
        return _Value(bind(equation, [jnp.broadcast_to(x.array, lead) for x in given]), True)
    # One element after the other, as JAX maps the primitive.
    n = math.prod(lead)
    flat = [
        jnp.broadcast_to(x.array, lead + shape).reshape(n, *shape) if x.varies else x.array
        for x, shape in zip(given, equation.shapes, strict=False)
    ]
    mapped = jax.vmap(lambda *xs: bind(equation, xs), in_axes=[0 if x.varies else None for x in given])(*flat)
    found = [_Value(x.reshape(lead + x.shape[1:]), True) for x in (mapped if several else [mapped])]
    return found if several else found[0]


def _differentiable(equation: Equation, given: Sequence[_Value], lead: tuple[int, ...]) -> list[_Value]:
    """A function with a derivative of its own."""
    assert equation.rule is not None
    shapes = equation.shapes[: len(given)]
    arrays = [
        jnp.broadcast_to(x.array, lead + shape) if x.varies else x.array for x, shape in zip(given, shapes, strict=True)
    ]
    varies = [x.varies for x in given]
    moving = [v for x, v in zip(arrays, varies, strict=True) if jnp.issubdtype(x.dtype, jnp.floating)]
    out_shapes = equation.shapes[len(given) :]

    def evaluated(program: Program, inputs: list[Any]) -> list[jax.Array]:
        found = _run(program, [_Value(x, v) for x, v in zip(inputs, [*varies, *moving], strict=False)])
        return [
            jnp.broadcast_to(x.array, lead + shape) for x, shape in zip(found, out_shapes, strict=True)
        ]  # fmt: skip

    return [_Value(x, True) for x in equation.rule.apply(arrays, evaluated)]


def _lead(x: _Value, rank: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = np.shape(x.array)
    return shape[: len(shape) - rank]
