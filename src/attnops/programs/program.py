"""Programs: a function of scalars as the equations of its jaxpr, calls written out, compared by what they compute.

A function with a derivative of its own, such as `jax.nn.relu`, is one equation that has the programs of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.varying import equally_varying, varies

# On scalars these change nothing.
IDENTITIES: Final = {
    "broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "optimization_barrier", "pvary", "pcast",
    "reduced_vary_cast",
}  # fmt: skip


class Literal:
    """A number among an equation's inputs; equal to those of the same dtype and bits."""

    def __init__(self, value: Any, dtype: Any) -> None:
        self.value = np.asarray(value, dtype)[()]
        self.dtype = np.dtype(dtype)
        self._key = self.dtype, self.value.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# The number of a variable, or a literal.
Atom = int | Literal


# In `jax.shard_map` these state what `bind` sees to by itself.
_VARYING: Final = frozenset({"pvary", "pcast", "reduced_vary_cast"})
# What has bodies.
_CONTROL: Final = frozenset({"cond", "while", "scan"})


class Unique:
    """What compares by identity: stands in for parameters that can't be compared by what they compute."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive on scalars, or on arrays of which each score, or token, has one.

    Attributes:
        primitive: JAX's.
        params: its parameters; empty where there is a rule.
        key: what they are compared by.
        inputs: numbers of variables, and literals.
        outputs: numbers of variables.
        shapes: of inputs and outputs.
        dtypes: of outputs.
        rule: of a function with a derivative of its own, where this can be taken apart.
        is_closed: of such a function, whether it can't be differentiated where it is evaluated again: its derivative
            closes over an argument or an index.
    """

    primitive: Any
    params: dict[str, Any] = dataclasses.field(compare=False)
    key: Hashable
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
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
        """The primitive's name, or those of its rule; with the shape where it works on more than scalars."""
        if self.rule is not None and self.is_scalar:
            return frozenset().union(*(e.names for program in self.rule for e in program.equations))
        wide = next((shape for shape in self.shapes if shape), None)
        return frozenset([self.primitive.name if wide is None else f"{self.primitive.name} of {list(wide)}"])


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, static and hashable.

    Attributes:
        inputs: the variables of its arguments.
        constants: the variables of the arrays that it closes over, which are given to it after its arguments.
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

    def run(self, inputs: Sequence[Any], bind: Callable[..., Any]) -> list[Any]:
        """Its results, ``bind(equation, inputs)`` giving those of each equation."""
        return run(self.equations, dict(zip((*self.inputs, *self.constants), inputs, strict=True)), self.results, bind)

    @property
    def is_structural(self) -> bool:
        """Whether equal programs are found equal, and none holds a function."""
        return all(equation.is_structural for equation in self.equations)

    def without_literals(self) -> tuple[Program, list[Any]]:
        """The same with its literals as further constants, and their values: numbers then make no new programs."""
        fresh = 1 + max(
            [*self.inputs, *self.constants, *(x for e in self.equations for x in e.outputs), -1]
        )  # fmt: skip
        values: list[Any] = []

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
    """A function with a derivative of its own.

    Attributes:
        value: of its inputs.
        derivative: of its inputs, and of the tangents of those that are floating-point; gives the results' tangents.
    """

    value: Program
    derivative: Program

    def apply(self, inputs: Sequence[Any], evaluate: Callable[[Program, list[Any]], list[jax.Array]]) -> list[Any]:
        """The function of arrays, with that derivative.

        Args:
            inputs: arrays.
            evaluate: what gives the results of a program of such inputs, and of tangents of those that are floats.
        """

        @jax.custom_jvp
        def function(*given: Any) -> list[jax.Array]:
            return evaluate(self.value, list(given))

        @function.defjvp
        def _(given: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            moving = [d for x, d in zip(given, tangents, strict=True) if is_floating(x)]
            return function(*given), evaluate(self.derivative, [*given, *moving])

        found: list[jax.Array] = function(*inputs)
        return found

    def on_tiles(self, inputs: Sequence[jax.Array], bind: Callable[..., Any]) -> list[jax.Array]:
        """The function of arrays of one shape, elementwise, with that derivative, inside a kernel.

        Integers are closed over: else each would have a tangent of no width, which kernels can't have.
        """
        moving = [x for x in inputs if is_floating(x)]
        if not moving:
            return self.value.run(inputs, bind)

        def evaluated(program: Program, given: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
            floats = iter(given)
            every = [next(floats) if is_floating(x) else x for x in inputs]
            return [jnp.broadcast_to(x, moving[0].shape) for x in program.run([*every, *tangents], bind)]

        @jax.custom_jvp
        def function(*given: Any) -> list[jax.Array]:
            return evaluated(self.value, given, ())

        @function.defjvp
        def _(given: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            return function(*given), evaluated(self.derivative, given, tangents)

        found: list[jax.Array] = function(*moving)
        return found


def is_floating(x: Any) -> bool:
    """Whether an array, or an abstract one, holds floats."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def needed(equations: Sequence[Equation], results: Any) -> list[Equation]:
    """The equations that the results depend on, in order."""
    wanted = {x for x in results if isinstance(x, int)}
    kept = []
    for equation in reversed(equations):
        if wanted & set(equation.outputs):
            kept.append(equation)
            wanted |= {x for x in equation.inputs if isinstance(x, int)}
    return kept[::-1]


def run(
    equations: Sequence[Equation], known: dict[int, Any], results: Sequence[Atom], bind: Callable[..., Any]
) -> list[Any]:
    """The results of equations, of variables that are known."""

    def read(x: Atom) -> Any:
        return x.value if isinstance(x, Literal) else known[x]

    known = dict(known)
    for equation in equations:
        found = bind(equation, [read(x) for x in equation.inputs])
        several = equation.primitive.multiple_results
        known |= dict(zip(equation.outputs, found if several else [found], strict=True))
    return [read(x) for x in results]


def bind(equation: Any, inputs: Sequence[Any]) -> Any:
    """What JAX computes of an equation, ours or a jaxpr's."""
    # In `jax.shard_map` a primitive does not by itself make what it takes vary alike.
    inputs = equally_varying([*map(jnp.asarray, inputs)])
    if equation.primitive.name in _VARYING:
        return inputs if equation.primitive.multiple_results else inputs[0]
    rule = getattr(equation, "rule", None)
    if rule is not None:
        return rule.apply(inputs, lambda program, given: program.run(given, bind))
    if equation.primitive.name in _CONTROL and varies(inputs):
        from attnops.programs.control import control_flow

        return control_flow(equation.primitive.name, equation.params, inputs)
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX 0.10.2 returns no functions
    return equation.primitive.bind(*functions, *inputs, **params)
