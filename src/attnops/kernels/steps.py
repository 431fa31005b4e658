"""Functions of scalars as lists of steps: from a jaxpr to one, and how one is run.

A function with a derivative of its own, such as `jax.nn.relu`, is one step that knows the steps of both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.kernels.varying import equally_varying

# Calls whose body counts as if it were written out.
CALLS: Final = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})
# Likewise where nothing is differentiated, so that the derivatives that they come with play no part.
WITH_DERIVATIVES: Final = frozenset({"custom_jvp_call", "custom_vjp_call"})
# On scalars these change nothing.
IDENTITIES: Final = {"broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "optimization_barrier"}


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number in a step's inputs."""

    value: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Step:
    """One primitive on scalars, or beside scores elementwise on what broadcasts to a tile.

    Attributes:
        primitive: JAX's.
        params: its parameters.
        inputs: numbers of variables, and literals.
        outputs: numbers of variables.
        shapes: of inputs and outputs.
        dtypes: of outputs.
        rule: of a function with a derivative of its own, where this can be taken apart.
        is_closed: of such a function, whether it can't be differentiated where it is evaluated again: its derivative
            closes over an argument or an index.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    rule: Rule | None = None
    is_closed: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The primitive's name, or those of its rule; with the shape where it works on more than scalars."""
        if self.rule is not None:
            return frozenset().union(*(step.names for part in self.rule for step in part.steps))
        wide = next((shape for shape in self.shapes if shape), None)
        return frozenset([self.primitive.name if wide is None else f"{self.primitive.name} of {list(wide)}"])


class Part(NamedTuple):
    """A function as steps: of its inputs, in order, to its results."""

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    results: tuple[int | Literal, ...]

    def run(self, inputs: Sequence[Any], bind: Callable[..., Any]) -> list[Any]:
        """Its results."""
        return run(self.steps, dict(zip(self.inputs, inputs, strict=True)), self.results, bind)


class Rule(NamedTuple):
    """A function of scalars with a derivative of its own.

    Attributes:
        value: of its inputs.
        derivative: of its inputs, and of the tangents of those that are floating-point; gives the results' tangents.
    """

    value: Part
    derivative: Part

    def on_tiles(self, inputs: Sequence[jax.Array], bind: Callable[..., Any]) -> list[jax.Array]:
        """The function of arrays of one shape, elementwise, with that derivative."""
        moving = [x for x in inputs if _is_floating(x)]
        if not moving:
            return self.value.run(inputs, bind)

        def evaluated(part: Part, given: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
            rest = iter(given)
            every = [next(rest) if _is_floating(x) else x for x in inputs]
            return [jnp.broadcast_to(x, moving[0].shape) for x in part.run([*every, *tangents], bind)]

        # Integers are closed over: else each would have a tangent of no width, which kernels can't have.
        @jax.custom_jvp
        def function(*given: Any) -> list[jax.Array]:
            return evaluated(self.value, given, ())

        @function.defjvp
        def _(given: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            return function(*given), evaluated(self.derivative, given, tangents)

        found: list[jax.Array] = function(*moving)
        return found


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array that a function closes over, as a primitive without inputs."""

    value: Any
    name = "constant"
    multiple_results = False

    def get_bind_params(self, params: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), params

    def bind(self) -> Any:
        return jnp.asarray(self.value)


def constant(variable: int, value: Any) -> Step:
    return Step(Constant(value), {}, (), (variable,), (jnp.shape(value),), (jnp.result_type(value),))


def inline(
    jaxpr: Any,
    constants: list[int],
    inputs: Sequence[int | Literal],
    numbers: Iterator[int],
    steps: list[Step],
    calls: frozenset[str],
) -> list[int | Literal]:
    """Append the steps of a jaxpr, calls written out; the variables of its results."""
    names: dict[Any, int | Literal] = dict(zip(jaxpr.constvars, constants, strict=True))
    names |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int | Literal:
        # A literal has a value; to import its class would be a fifth of what `import attnops` costs.
        return Literal(atom.val, atom.aval.dtype) if hasattr(atom, "val") else names[atom]

    for eqn in jaxpr.eqns:
        found = [read(atom) for atom in eqn.invars]
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in calls and body is not None:
            closed = getattr(body, "consts", [])
            fresh = [next(numbers) for _ in closed]
            for number, value in zip(fresh, closed, strict=True):
                steps.append(constant(number, value))
            outputs = inline(getattr(body, "jaxpr", body), fresh, found, numbers, steps, calls)
            names |= dict(zip(eqn.outvars, outputs, strict=True))
            continue
        new = tuple(next(numbers) for _ in eqn.outvars)
        names |= dict(zip(eqn.outvars, new, strict=True))
        shapes = tuple(tuple(x.aval.shape) for x in (*eqn.invars, *eqn.outvars))
        dtypes = tuple(x.aval.dtype for x in eqn.outvars)  # type: ignore[attr-defined]
        # What differentiating adds, and nobody wrote.
        primitive = lax.add_p if eqn.primitive.name == "add_any" else eqn.primitive
        rule, is_closed = _rule(eqn, calls) if eqn.primitive.name == "custom_jvp_call" else (None, False)
        steps.append(Step(primitive, dict(eqn.params), tuple(found), new, shapes, dtypes, rule, is_closed))
    return [read(atom) for atom in jaxpr.outvars]


def needed(steps: Sequence[Step], results: Any) -> list[Step]:
    """The steps that the results depend on, in order."""
    wanted = {x for x in results if isinstance(x, int)}
    kept = []
    for step in reversed(steps):
        if wanted & set(step.outputs):
            kept.append(step)
            wanted |= {x for x in step.inputs if isinstance(x, int)}
    return kept[::-1]


def _rule(eqn: Any, calls: frozenset[str]) -> tuple[Rule | None, bool]:
    """Of a call of a `jax.custom_jvp`, and whether its derivative closes over what is gone by now.

    None where it is not of scalars, has integer results, or closes over arrays.
    """
    avals = [x.aval for x in eqn.invars]

    def pushed_forward(inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        def function(*moving: Any) -> Any:
            rest = iter(moving)
            return bind(eqn, [next(rest) if _is_floating(x) else x for x in inputs])

        return jax.jvp(function, [x for x in inputs if _is_floating(x)], tangents)[1]

    try:
        derivative = jax.make_jaxpr(pushed_forward)(avals, [aval for aval in avals if _is_floating(aval)])
    except jax.errors.UnexpectedTracerError:
        return None, True
    if any(isinstance(x, jax.core.Tracer) for x in derivative.consts):
        return None, True
    if any(x.aval.shape or not _is_floating(x.aval) for x in eqn.outvars) or any(aval.shape for aval in avals):
        return None, False
    value = _part(eqn.params["call_jaxpr"], calls)
    # In which nothing is differentiated again; a rule may well call its own function.
    change = _part(derivative, calls | WITH_DERIVATIVES)
    return (None if value is None or change is None else Rule(value, change)), False


def _part(closed: Any, calls: frozenset[str]) -> Part | None:
    """A jaxpr as steps; None where it closes over arrays, which kernels can't."""
    if closed.consts:
        return None
    numbers = itertools.count()
    inputs = [next(numbers) for _ in closed.jaxpr.invars]
    steps: list[Step] = []
    results = inline(closed.jaxpr, [], inputs, numbers, steps, calls)
    kept = needed(steps, results)
    if any(isinstance(step.primitive, Constant) for step in kept):
        return None
    return Part(tuple(inputs), tuple(kept), tuple(results))


def run(
    steps: Sequence[Step], known: dict[int, Any], results: Sequence[int | Literal], bind: Callable[..., Any]
) -> list[Any]:
    """The results of steps, of variables that are known."""

    def read(x: int | Literal) -> Any:
        return np.asarray(x.value, x.dtype)[()] if isinstance(x, Literal) else known[x]

    known = dict(known)
    for step in steps:
        found = bind(step, [read(x) for x in step.inputs])
        known |= dict(zip(step.outputs, found if step.primitive.multiple_results else [found], strict=True))
    return [read(x) for x in results]


def bind(step: Any, inputs: Sequence[Any]) -> Any:
    """What JAX computes of a step, or of an equation."""
    bound = step.primitive.get_bind_params(step.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX 0.10.2 has no functions beside
    # In `jax.shard_map` a primitive does not by itself make what it takes vary alike.
    return step.primitive.bind(*functions, *equally_varying([*map(jnp.asarray, inputs)]), **params)
