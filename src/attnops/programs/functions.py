"""A caller's function bound to a call: a program and its data, or opaque if it has no program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.program import Program
from attnops.programs.tracing import trace
from attnops.typing import Aval, DType, Function, Leaf

INDEX: Final = jax.ShapeDtypeStruct((), np.int32)
SCORE: Final = jax.ShapeDtypeStruct((), np.float32)

# Primitives that are the identity on a scalar, but combine elements of an array.
_MIXING: Final = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "dot_general")


class Bound(NamedTuple):
    """A function as a program.

    Attributes:
        program: its inputs are the indices (and scores), followed by the data.
        data: the function's arguments and the arrays that it closes over.
    """

    program: Program
    data: tuple[Leaf, ...]


class Opaque:
    """A function without a usable program; equal only to itself, so that a cache never confuses two functions.

    Attributes:
        fn: the function.
        program: a program that can't be compared with others, or evaluated on arrays; None if tracing failed.
        error: the name of the error that tracing raised; empty if it succeeded.
    """

    def __init__(self, fn: Function, program: Program | None, error: str = "") -> None:
        self.fn, self.program, self.error = fn, program, error
        self.__name__ = name_of(fn)

    def __call__(self, *args: Leaf) -> Leaf:
        """Call the function."""
        return self.fn(*args)


def bind_function(
    fn: Function, avals: Sequence[Aval], args: Leaf, dtype: DType, calls: frozenset[str]
) -> Bound | Opaque:
    """A function of scalars and further arguments, bound to these.

    Args:
        fn: ``fn(*scalars, *args)``; traced once, unless it is opaque.
        avals: the abstract values of the scalars.
        args: a tuple of pytrees of arrays, converted by `as_data`.
        dtype: the dtype of the result.
        calls: names of the calls that are inlined.
    """
    if isinstance(fn, Opaque):
        return fn
    leaves, tree = jax.tree.flatten(args)
    n = len(avals)

    def function(*given: Leaf) -> Leaf:
        return jnp.asarray(fn(*given[:n], *jax.tree.unflatten(tree, given[n:])))

    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    try:
        traced = trace(function, [*avals, *shapes], calls)
    except Exception as error:
        # It may still work on arrays.
        return Opaque(fn, None, type(error).__name__)
    program, (result,) = traced.program, traced.results
    is_elementwise = not any(e.is_scalar and e.primitive.name in _MIXING for e in program.equations)
    is_evaluable = program.is_structural and not any(e.is_closed for e in program.equations)
    if traced.has_effects or result.shape or result.dtype != dtype or not (is_elementwise and is_evaluable):
        return Opaque(fn, program)
    return Bound(program, (*leaves, *traced.constants))


def as_data(name: str, args: Leaf) -> Leaf:
    """A function's arguments as arrays of JAX's dtypes; numpy arrays and numbers become numpy arrays.

    Raises:
        ValueError: an argument is not an array or number, or has integers out of range for its dtype in JAX.
    """

    def convert(x: Leaf) -> Leaf:
        if isinstance(x, jax.Array):
            return x
        known = np.asarray(x)
        if known.dtype.kind not in "biufcV":
            raise ValueError(f"{name} hold {x!r} of type {type(x).__name__}, but must be arrays or numbers")
        narrow = jax.dtypes.canonicalize_dtype(known.dtype)
        if known.dtype.kind in "iu" and known.size:
            bounds = np.iinfo(narrow)
            if known.min() < bounds.min or known.max() > bounds.max:
                raise ValueError(
                    f"{name} hold integers from {known.min()} to {known.max()}, but must fit {narrow}: subtract their "
                    f"least, or set jax_enable_x64"
                )
        return known.astype(narrow)

    return jax.tree.map(convert, args)


def name_of(fn: Function) -> str:
    """A function's name, or its class's; without its arrays."""
    return str(getattr(fn, "__name__", type(fn).__name__))


def is_staged() -> bool:
    """Whether computations are staged into a program that is compiled later, as under `jax.jit`.

    Eager transformations, such as `jax.grad` and `jax.vmap` alone, are not staged.
    """
    return isinstance(jax.lax.neg(np.int32(0)), jax.core.Tracer)


def holds_function(value: Leaf) -> bool:
    """Whether a mask or bias, or one nested in it, has a function as a field."""
    if value is None or hasattr(value, "shape"):
        return False
    for x in vars(value).values():
        if hasattr(x, "__dataclass_fields__") and not isinstance(x, (Program, type)):
            if holds_function(x):
                return True
        elif callable(x) and not isinstance(x, type):
            return True
    return False
