"""Functions with a rule for tangents that survives a second derivative of a loop, unlike a `jax.custom_jvp`'s.

Where JAX splits the body of a `jax.lax.scan` into what is known and what is linear, it replaces a call of a
`jax.custom_jvp` by the function itself, which is then differentiated without the rule. A primitive stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attnops.programs.functions import is_staged
from attnops.typing import PyTree

Values: TypeAlias = list[Any]
# Some arrays to some arrays.
Function: TypeAlias = Callable[..., Values]
# ``rule(outputs, inputs, tangents)`` gives the outputs, which it may tag, and their tangents; None for a zero tangent.
Rule: TypeAlias = Callable[[Values, Values, Values], tuple[Values, Values]]

_call: Final = core.Primitive("attention_pass")
_call.multiple_results = True


def call(function: Function, rule: Rule, arrays: Sequence[jax.Array]) -> Values:
    """``function(*arrays)``, whose tangents ``rule`` computes. Neither may close over traced arrays."""
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return function(*arrays)
    jaxpr = jax.make_jaxpr(function)(*arrays) if is_staged() else None
    result: Values = _call.bind(*arrays, function=function, rule=rule, jaxpr=jaxpr)
    return result


def replaced(given: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> Values:
    """``given`` with values at some indices."""
    new = dict(zip(indices, values, strict=True))
    return [new.get(i, x) for i, x in enumerate(given)]


def jvp_of(function: Callable[..., PyTree], given: Sequence[Any], tangents: Sequence[Any]) -> PyTree:
    """The tangent of ``function(*given)`` for tangents of some of the arrays; None for zero."""
    moving = [i for i, t in enumerate(tangents) if t is not None]
    primals, tangents = ([x[i] for i in moving] for x in (given, tangents))
    return jax.jvp(lambda *x: function(*replaced(given, moving, x)), primals, tangents)[1]


def _evaluate(*arrays: jax.Array, function: Function, rule: Rule, jaxpr: PyTree) -> Values:
    return function(*arrays) if jaxpr is None else core.jaxpr_as_fun(jaxpr)(*arrays)


def _abstract(*given: Any, function: Function, rule: Rule, jaxpr: PyTree) -> tuple[Values, PyTree]:
    jaxpr = jax.make_jaxpr(function)(*given) if jaxpr is None else jaxpr
    return list(jaxpr.out_avals), jaxpr.effects  # an interpreter of kernels may have effects


def _jvp(inputs: Sequence[Any], tangents: Sequence[Any], **call: Any) -> tuple[Values, Values]:
    outputs = _call.bind(*inputs, **call)
    given = [None if type(t) is ad.Zero else t for t in tangents]
    outputs, out_tangents = call["rule"](outputs, list(inputs), given)
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs)
    return outputs, [zero if t is None else t for t, zero in zip(out_tangents, zeros, strict=True)]


def _batch(
    given: Sequence[Any], axes: Sequence[int | None], *, function: Function, rule: Rule, jaxpr: PyTree
) -> tuple[Values, list[int]]:
    def mapped(*arrays: jax.Array) -> Values:
        return jax.vmap(function, axes)(*arrays)

    def mapped_rule(outputs: Values, inputs: Values, tangents: Values) -> tuple[Values, Values]:
        moving = [None if t is None else a for a, t in zip(axes, tangents, strict=True)]
        return jax.vmap(rule, (0, list(axes), moving))(outputs, inputs, tangents)

    result = call(mapped, mapped_rule, given)
    return result, [0] * len(result)


def _transpose(cotangents: Sequence[Any], *given: Any, rule: Rule, **_: Any) -> Values:
    """The transpose of a call that is linear in the operands without a value: its rule's, which needs no outputs."""
    linear, none = [i for i, x in enumerate(given) if ad.is_undefined_primal(x)], [None] * len(given)
    avals = [given[i].aval for i in linear]
    inputs = replaced(given, linear, [ad.instantiate_zeros(ad.Zero(aval)) for aval in avals])
    pull_back = jax.linear_transpose(lambda *x: rule([], inputs, replaced(none, linear, x))[1], *avals)
    return replaced(none, linear, pull_back([ad.instantiate_zeros(x) for x in cotangents]))


_call.def_impl(_evaluate)
_call.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, mlir.lower_fun(_evaluate, multiple_results=True))
