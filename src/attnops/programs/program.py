"""Programs: the equations of a scalar function's jaxpr, with calls inlined, compared by what they compute.

A call of a `jax.custom_jvp` function, such as `jax.nn.relu`, is one equation, with programs of value and derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.varying import equally_varying, varies
from attnops.typing import DType, Function, JaxprLike, Leaf, PyTree

# Primitives that are the identity on scalars.
IDENTITIES: Final = {
    "broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "optimization_barrier", "pvary", "pcast",
    "reduced_vary_cast",
}  # fmt: skip


class Literal:
    """A number among an equation's inputs; literals of equal dtype and bits are equal."""

    def __init__(self, value: Leaf, dtype: DType) -> None:
        self.value = np.asarray(value, dtype)[()]
        self.dtype = np.dtype(dtype)
        self._key = self.dtype, self.value.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# The index of a variable, or a literal.
Atom = int | Literal


# Inside `jax.shard_map` these declare varying axes, which `bind` does too.
_VARYING: Final = frozenset({"pvary", "pcast", "reduced_vary_cast"})
# Primitives with bodies.
_CONTROL: Final = frozenset({"cond", "while", "scan"})


class Unique:
    """A key that is equal only to itself, for parameters that can't be compared by what they compute."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive, on scalars, or on arrays, one for each score or token.

    Attributes:
        primitive: JAX's primitive.
        params: its parameters; empty if there is a rule.
        key: a key by which the parameters are compared.
        inputs: indices of variables, and literals.
        outputs: indices of variables.
        shapes: the shapes of inputs and outputs.
        dtypes: the dtypes of outputs.
        rule: the programs of a `jax.custom_jvp` function; None for other primitives, or if it has none.
        is_closed: whether the derivative of a `jax.custom_jvp` function closes over an argument or an index, so that it
            can't be differentiated when it is evaluated again.
    """

    primitive: JaxprLike
    params: dict[str, JaxprLike] = dataclasses.field(compare=False)
    key: Hashable
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    rule: Rule | None = None
    is_closed: bool = False

    @property
    def is_scalar(self) -> bool:
        """Whether all inputs and outputs are scalars."""
        return not any(self.shapes)

    @property
    def is_structural(self) -> bool:
        """Whether it is compared by what it computes, and holds no function."""
        return not isinstance(self.key, Unique)

    @property
    def names(self) -> frozenset[str]:
        """The primitive's name, or the names in its rule; with the shape if it is not on scalars."""
        if self.rule is not None and self.is_scalar:
            return frozenset().union(*(e.names for program in self.rule for e in program.equations))
        wide = next((shape for shape in self.shapes if shape), None)
        return frozenset([self.primitive.name if wide is None else f"{self.primitive.name} of {list(wide)}"])


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, static and hashable.

    Attributes:
        inputs: the variables of its arguments.
        constants: the variables of the arrays that it closes over, which follow its arguments.
        equations: in order.
        results: variables, or literals.
    """

    inputs: tuple[int, ...]
    constants: tuple[int, ...]
    equations: tuple[Equation, ...]
    results: tuple[Atom, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.constants, self.equations, self.results))

    def run(self, inputs: Sequence[Leaf], bind: Function) -> list[Leaf]:
        """The program's results; ``bind(equation, inputs)`` evaluates an equation."""
        return run(self.equations, dict(zip((*self.inputs, *self.constants), inputs, strict=True)), self.results, bind)

    def evaluate(self, arguments: Sequence[Leaf], data: Sequence[Leaf]) -> jax.Array:
        """The result of a program of scalars, elementwise; what depends on some dimensions is computed for these alone.

        Args:
            arguments: arrays that broadcast with one another, in the dtypes of its first inputs.
            data: the other inputs and the constants; arrays that all elements share.

        Returns:
            An array of a shape that broadcasts to the arguments'.
        """
        read = {*self.results, *(x for equation in self.equations for x in equation.inputs)}
        arrays = [jnp.asarray(x) for x in arguments]
        rank = max(x.ndim for x in arrays)
        # An argument that is not read has no dimensions.
        is_read = [i in read for i in self.inputs[: len(arrays)]]
        shapes = [(1,) * (rank - x.ndim) + x.shape if i else (1,) * rank for x, i in zip(arrays, is_read, strict=True)]
        squeezed = [x.reshape([n for n in shape if n != 1]) if i else x.reshape(-1)[0]
                    for x, shape, i in zip(arrays, shapes, is_read, strict=True)]  # fmt: skip
        function = lambda *scalars: self.run([*scalars, *data], bind)[0]  # noqa: E731
        for axis in reversed(range(rank)):
            axes = [0 if shape[axis] != 1 else None for shape in shapes]
            function = function if set(axes) == {None} else jax.vmap(function, axes)
        return jnp.asarray(function(*squeezed)).reshape(jnp.broadcast_shapes(*shapes))

    @property
    def is_structural(self) -> bool:
        """Whether it is compared by what it computes, and holds no function."""
        return all(equation.is_structural for equation in self.equations)

    def without_literals(self) -> tuple[Program, list[Leaf]]:
        """The program with constants in place of literals, and their values: new numbers then make no new program."""
        fresh = 1 + max([*self.inputs, *self.constants, *(x for e in self.equations for x in e.outputs), -1])
        values: list[Leaf] = []

        def variable(x: Atom) -> int:
            if not isinstance(x, Literal):
                return x
            values.append(x.value)
            return fresh + len(values) - 1

        equations = tuple(dataclasses.replace(e, inputs=tuple(map(variable, e.inputs))) for e in self.equations)
        results = tuple(map(variable, self.results))
        new = tuple(range(fresh, fresh + len(values)))
        return Program(self.inputs, (*self.constants, *new), equations, results), values


class Rule(NamedTuple):
    """The programs of a `jax.custom_jvp` function.

    Attributes:
        value: from its inputs to the results.
        derivative: from its inputs and the tangents of floating-point inputs to the tangents of the results.
    """

    value: Program
    derivative: Program

    def apply(self, inputs: Sequence[Leaf]) -> list[jax.Array]:
        """The function on arrays, with this derivative."""

        @jax.custom_jvp
        def function(*given: Leaf) -> list[jax.Array]:
            return self.value.run(given, bind)

        @function.defjvp
        def _(given: Leaf, tangents: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
            moving = [d for x, d in zip(given, tangents, strict=True) if is_floating(x)]
            return function(*given), self.derivative.run([*given, *moving], bind)

        results: list[jax.Array] = function(*inputs)
        return results

    def on_tiles(self, inputs: Sequence[jax.Array], bind: Function) -> list[jax.Array]:
        """The function on arrays of one shape, elementwise, with this derivative, inside a kernel.

        Integers are closed over: as arguments they would have tangents of dtype float0, which kernels don't support.
        """
        moving = [x for x in inputs if is_floating(x)]
        if not moving:
            return self.value.run(inputs, bind)

        def evaluated(program: Program, given: Sequence[Leaf], tangents: Sequence[PyTree]) -> list[jax.Array]:
            floats = iter(given)
            every = [next(floats) if is_floating(x) else x for x in inputs]
            return [jnp.broadcast_to(x, moving[0].shape) for x in program.run([*every, *tangents], bind)]

        @jax.custom_jvp
        def function(*given: Leaf) -> list[jax.Array]:
            return evaluated(self.value, given, ())

        @function.defjvp
        def _(given: Leaf, tangents: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
            return function(*given), evaluated(self.derivative, given, tangents)

        results: list[jax.Array] = function(*moving)
        return results


def is_floating(x: Leaf) -> bool:
    """Whether an array, concrete or abstract, is floating-point."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def in_32_bits(equation: Equation) -> Equation:
    """An equation whose 64-bit numbers have 32 bits, for kernels, whose languages may have no others."""
    params = {name: narrow(x) if isinstance(x, np.dtype) else x for name, x in equation.params.items()}
    rule = equation.rule and Rule(*(
        dataclasses.replace(
            program, equations=tuple(map(in_32_bits, program.equations)), results=tuple(map(narrowed, program.results))
        )
        for program in equation.rule
    ))  # fmt: skip
    return dataclasses.replace(
        equation, params=params, inputs=tuple(map(narrowed, equation.inputs)),
        dtypes=tuple(map(narrow, equation.dtypes)), rule=rule,
    )  # fmt: skip


def narrowed(x: Atom) -> Atom:
    """A variable, or a literal of at most 32 bits."""
    return Literal(x.value, narrow(x.dtype)) if isinstance(x, Literal) else x


def narrow(dtype: DType) -> DType:
    """The dtype that JAX uses in place of this one if x64 is off."""
    known = np.dtype(dtype)
    return np.dtype(f"{known.kind}4") if known.kind in "iuf" and known.itemsize == 8 else dtype


def needed(equations: Sequence[Equation], results: Leaf) -> list[Equation]:
    """The equations that the results depend on, in order."""
    wanted = {x for x in results if isinstance(x, int)}
    kept = []
    for equation in reversed(equations):
        if wanted & set(equation.outputs):
            kept.append(equation)
            wanted |= {x for x in equation.inputs if isinstance(x, int)}
    return kept[::-1]


def run(equations: Sequence[Equation], known: dict[int, Leaf], results: Sequence[Atom], bind: Function) -> list[Leaf]:
    """The results of equations, given the values of known variables."""

    def read(x: Atom) -> Leaf:
        return x.value if isinstance(x, Literal) else known[x]

    known = dict(known)
    for equation in equations:
        result = bind(equation, [read(x) for x in equation.inputs])
        several = equation.primitive.multiple_results
        known |= dict(zip(equation.outputs, result if several else [result], strict=True))
    return [read(x) for x in results]


def bind(equation: JaxprLike, inputs: Sequence[Leaf]) -> Leaf:
    """Evaluate an `Equation`, or a jaxpr's equation, with JAX."""
    # Inside `jax.shard_map` a primitive's inputs must vary over the same axes.
    inputs = equally_varying([*map(jnp.asarray, inputs)])
    if equation.primitive.name in _VARYING:
        return inputs if equation.primitive.multiple_results else inputs[0]
    rule = getattr(equation, "rule", None)
    if rule is not None:
        return rule.apply(inputs)
    if equation.primitive.name in _CONTROL and varies(inputs):
        from attnops.programs.control import control_flow

        return control_flow(equation.primitive.name, equation.params, inputs)
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX 0.10.2 returns no functions
    return equation.primitive.bind(*functions, *inputs, **params)
