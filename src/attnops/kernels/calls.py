"""Functions with a rule for tangents, which survives what `jax.custom_jvp` does not: a second derivative of a loop.

Where JAX splits the body of a `jax.lax.scan` into what is known and what is linear, it replaces a call of a
`jax.custom_jvp` by the function itself, which is then differentiated without the rule. A primitive stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attnops.programs.functions import is_staged
from attnops.typing import PyTree

Values: TypeAlias = list[Any]
# Some arrays to some arrays.
Function: TypeAlias = Callable[..., Values]
# ``rule(outputs, inputs, tangents)`` gives the outputs, which it may name, and their tangents; None for a zero tangent.
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


def _evaluate(*arrays: jax.Array, function: Function, rule: Rule, jaxpr: PyTree) -> Values:
    return function(*arrays) if jaxpr is None else core.jaxpr_as_fun(jaxpr)(*arrays)


def _abstract(*given: Any, function: Function, rule: Rule, jaxpr: PyTree) -> tuple[Values, PyTree]:
    jaxpr = jax.make_jaxpr(function)(*given) if jaxpr is None else jaxpr
    return list(jaxpr.out_avals), jaxpr.effects  # an interpreter of kernels may have effects


def _jvp(inputs: Sequence[Any], tangents: Sequence[Any], **call: Any) -> tuple[Values, Values]:
    outputs = _call.bind(*inputs, **call)
    given = [None if type(t) is ad.Zero else t for t in tangents]
    outputs, found = call["rule"](outputs, list(inputs), given)
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs)
    return outputs, [zero if t is None else t for t, zero in zip(found, zeros, strict=True)]


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


def _transpose(cotangents: Sequence[Any], *given: Any, **call: Any) -> Values:
    unknown = [i for i, x in enumerate(given) if ad.is_undefined_primal(x)]
    avals = [given[i].aval for i in unknown]
    like = [jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x for x in given]

    def linear(*tangents: jax.Array) -> Values:
        moving = dict(zip(unknown, tangents, strict=True))
        return call["rule"](None, like, [moving.get(i) for i in range(len(given))])[1]

    found = jax.linear_transpose(linear, *avals)([ad.instantiate_zeros(x) for x in cotangents])
    moving = dict(zip(unknown, found, strict=True))
    return [moving.get(i) for i in range(len(given))]


_call.def_impl(_evaluate)
_call.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, mlir.lower_fun(_evaluate, multiple_results=True))
