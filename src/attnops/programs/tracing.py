"""From functions to programs."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

import jax
import numpy as np
from jax import lax

from attnops.programs.program import Atom, Equation, Literal, Program, Rule, Unique, bind, is_floating, needed
from attnops.typing import Aval, Function, JaxprLike, Leaf, PyTree

# Calls that are inlined.
CALLS: Final = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})
# Calls that are inlined too if nothing is differentiated, so that their custom derivatives are not needed.
WITH_DERIVATIVES: Final = frozenset({"custom_jvp_call", "custom_vjp_call"})


class Traced(NamedTuple):
    """A function as a program.

    Attributes:
        program: the program.
        constants: the arrays that the function closes over, tracers included.
        results: the shape and dtype of each result.
        has_effects: whether it has side effects, such as printing.
    """

    program: Program
    constants: list[Leaf]
    results: list[Leaf]
    has_effects: bool


def trace(function: Function, avals: Sequence[Aval], calls: frozenset[str]) -> Traced:
    """The program of a function.

    Args:
        function: a function of arrays, which returns one array or a list of them.
        avals: the shape and dtype of each of its arguments.
        calls: names of the calls that are inlined.
    """
    closed = jax.make_jaxpr(function)(*avals)
    return Traced(*_program(closed, calls), list(closed.out_avals), bool(closed.effects))


def _program(closed: JaxprLike, calls: frozenset[str]) -> tuple[Program, list[Leaf]]:
    """A closed jaxpr as a program, and the arrays that it closes over."""
    numbers = itertools.count()
    inputs = [next(numbers) for _ in closed.jaxpr.invars]
    constants = {next(numbers): value for value in closed.consts}
    equations: list[Equation] = []
    results = _inline(closed.jaxpr, [*constants], inputs, numbers, equations, constants, calls)
    program = Program(tuple(inputs), tuple(constants), tuple(needed(equations, results)), tuple(results))
    return program, list(constants.values())


def _inline(
    jaxpr: JaxprLike,
    names_of_constants: Sequence[int],
    inputs: Sequence[Atom],
    numbers: Iterator[int],
    equations: list[Equation],
    constants: dict[int, Leaf],
    calls: frozenset[str],
) -> list[Atom]:
    """Append a jaxpr's equations, with calls inlined, and the calls' constants. Returns the results' variables."""
    names: dict[JaxprLike, Atom] = dict(zip(jaxpr.constvars, names_of_constants, strict=True))
    names |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: JaxprLike) -> Atom:
        # Only a literal has a value; importing its class would take a fifth of the time of `import attnops`.
        return Literal(atom.val, atom.aval.dtype) if hasattr(atom, "val") else names[atom]

    for eqn in jaxpr.eqns:
        atoms = [read(atom) for atom in eqn.invars]
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in calls and body is not None:
            closed = {next(numbers): value for value in getattr(body, "consts", [])}
            constants |= closed
            inner = getattr(body, "jaxpr", body)
            outputs = _inline(inner, [*closed], atoms, numbers, equations, constants, calls)
            names |= dict(zip(eqn.outvars, outputs, strict=True))
            continue
        new = tuple(next(numbers) for _ in eqn.outvars)
        names |= dict(zip(eqn.outvars, new, strict=True))
        equations.append(_equation(eqn, atoms, new, calls))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: JaxprLike, inputs: Sequence[Atom], outputs: tuple[int, ...], calls: frozenset[str]) -> Equation:
    shapes = tuple(tuple(x.aval.shape) for x in (*eqn.invars, *eqn.outvars))
    dtypes = tuple(x.aval.dtype for x in eqn.outvars)
    rule, is_closed = _rule(eqn, calls) if eqn.primitive.name == "custom_jvp_call" else (None, False)
    # Differentiation emits it in place of `add`.
    primitive = lax.add_p if eqn.primitive.name == "add_any" else eqn.primitive
    params = {} if rule is not None else dict(eqn.params)
    try:
        key: Hashable = _structure(params)
        hash(key)
    except TypeError:
        key = Unique()
    return Equation(primitive, params, key, tuple(inputs), outputs, shapes, dtypes, rule, is_closed)


def _rule(eqn: JaxprLike, calls: frozenset[str]) -> tuple[Rule | None, bool]:
    """The rule of a call of a `jax.custom_jvp`, and whether its derivative closes over tracers.

    The rule is None if the function has integer results or closes over arrays.
    """
    avals = [x.aval for x in eqn.invars]

    def pushed_forward(inputs: Sequence[Leaf], tangents: Sequence[PyTree]) -> Leaf:
        def function(*moving: PyTree) -> Leaf:
            floats = iter(moving)
            return bind(eqn, [next(floats) if is_floating(x) else x for x in inputs])

        return jax.jvp(function, [x for x in inputs if is_floating(x)], tangents)[1]

    try:
        derivative = jax.make_jaxpr(pushed_forward)(avals, [aval for aval in avals if is_floating(aval)])
    except jax.errors.UnexpectedTracerError:
        return None, True
    if any(isinstance(x, jax.core.Tracer) for x in derivative.consts):
        return None, True
    if not all(is_floating(x.aval) for x in eqn.outvars):
        return None, False
    value = closed_program(eqn.params["call_jaxpr"], calls)
    # The derivative is not differentiated again; it may call the function itself.
    change = closed_program(derivative, calls | WITH_DERIVATIVES)
    return (None if value is None or change is None else Rule(value, change)), False


def closed_program(closed: JaxprLike, calls: frozenset[str]) -> Program | None:
    """A jaxpr as a program; None if it closes over arrays, which kernels don't support."""
    program, constants = _program(closed, calls)
    return None if constants else program


_PLAIN: Final = (int, str, bytes, type(None), type(Ellipsis), type, np.dtype, enum.Enum)


def _structure(value: Leaf) -> Hashable:
    """The key by which a parameter of a primitive is compared.

    Raises:
        TypeError: the parameter holds a function, or a jaxpr that closes over an array.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (float, complex, np.generic)):
        return type(value), repr(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, _structure(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (tuple, list, frozenset)):
        return type(value), tuple(map(_structure, value))
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        open_jaxpr = None if hasattr(value, "consts") else SimpleNamespace(jaxpr=value, consts=value.constvars)
        program = closed_program(open_jaxpr or value, frozenset())
        if program is None or not program.is_structural:
            raise TypeError("a jaxpr that holds functions or arrays is not compared by what it computes")
        return program
    if callable(value) or isinstance(value, jax.Array):
        raise TypeError(f"a {type(value).__name__} is not compared by what it computes")
    return type(value), value
