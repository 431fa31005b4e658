"""Derivatives of every order of attention: reverse mode by kernels, all others by one sum over the keys in plain JAX.

With the logsumexp ``lse`` given, attention to keys is a sum over them (`attnops.softmax.Contribution`)::

    out(x; lse) = Σ exp(s − lse) · v        weight(x; lse) = Σ exp(s − lse), which is 1

so that with tangents of both at a fixed ``lse`` the tangents of attention and of its logsumexp are::

    l̊se = weight˙        o̊ut = out˙ − l̊se · out

Reverse mode transposes them, by the kernels that recompute the weights from the logsumexp (Dao 2023, arXiv:2307.08691):
the gradients are the pullback of the sum for the cotangents ``d_out`` and ``d_lse − Σ d_out · out``. JAX differentiates
the sum further; the tangents of the gradients may have a loop of their own (`Passes.forward_gradients`), which reverse
mode replaces by the sum's. Residuals are the arrays, the output and the statistics of the softmax: O(T + S) memory.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attnops.kernels.calls import Function, Values, call, jvp_of, replaced
from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops.softmax import Contribution
from attnops.typing import PyTree

# Two arrays, float32 [B, H, T], from which `Passes.logsumexp` computes the logsumexp.
Statistics: TypeAlias = tuple[jax.Array, ...]
# The output, the statistics of its softmax and, if the call asks for them, the largest scores, float32 [B, H, T].
Result: TypeAlias = tuple[jax.Array, Statistics, *tuple[jax.Array, ...]]


class ReverseInputs(NamedTuple):
    """What reverse mode computes gradients from, in addition to the arrays.

    Attributes:
        out: the output [B, T, H, Dv]; None for the gradients of the sum over the keys, at a fixed logsumexp.
        statistics: the softmax's, two arrays, float32 [B, H, T].
        d_out: the cotangent of the output, [B, T, H, Dv].
        d_lse: the cotangent of the logsumexp, or of the sum's weight, float32 [B, H, T].
    """

    out: jax.Array | None
    statistics: Statistics
    d_out: jax.Array
    d_lse: jax.Array


class Passes(abc.ABC):
    """The passes of one call of attention. Static; all arrays are arguments, in a list.

    Attributes:
        differentiable: how many arrays, from the first on, have derivatives if they are floating-point.
    """

    differentiable: int

    @abc.abstractmethod
    def forward(self, arrays: list[jax.Array]) -> Result:
        """The output [B, T, H, Dv], the statistics of the softmax and, if asked for, the largest scores."""

    @abc.abstractmethod
    def gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> list[jax.Array]:
        """The gradients of the arrays with the indices ``wanted``."""

    @abc.abstractmethod
    def contribution(self, arrays: list[jax.Array], lse: jax.Array, lse_residual: jax.Array) -> Contribution:
        """The sum over the keys in plain JAX, sinks included, which JAX differentiates in O(T + S) memory."""

    def plain_gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> Values:
        """`gradients` by `contribution`, which JAX differentiates."""
        out, statistics, d_out, d_lse = given
        d_out = d_out.astype(jnp.float32)
        d_weight = d_lse if out is None else d_lse - (d_out * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        contribution = functools.partial(_contribution, self, wanted, arrays, statistics)
        return list(jax.vjp(contribution, *(arrays[i] for i in wanted))[1](Contribution(d_out, d_weight)))

    def forward_gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> Values:
        """`gradients` in plain JAX for forward mode alone, which may be faster than `plain_gradients`."""
        return self.plain_gradients(wanted, arrays, given)

    def logsumexp(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        """The logsumexp and its rounding error, float32 [B, H, T]."""
        lse, lse_residual = statistics
        return lse, lse_residual

    def statistics(self, lse: jax.Array, lse_residual: jax.Array) -> Statistics:
        """The inverse of `logsumexp`."""
        return lse, lse_residual


def attend(passes: Passes, arrays: Sequence[jax.Array]) -> Result:
    """The forward pass, with derivatives of every order. The rounding error and the largest scores have none."""

    def forward(*arrays: jax.Array) -> list[jax.Array]:
        out, statistics, *highest = passes.forward(list(arrays))
        return [out, *statistics, *highest]

    def rule(outputs: list[Any], inputs: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        # Tagged here, where they become residuals; elsewhere a checkpoint policy would name a copy.
        outputs = [tag(x, LOGSUMEXP_NAME if i else OUTPUT_NAME) for i, x in enumerate(outputs)]
        out, *statistics = outputs[:3]
        moving = [i for i, t in enumerate(tangents[: passes.differentiable]) if t is not None]
        if not moving:
            return outputs, [None] * len(outputs)
        given = *inputs, out, *statistics, *(tangents[i] for i in moving)
        d_out, d_lse = _tangent.bind(*given, passes=passes, n=len(inputs), moving=tuple(moving), axes=())
        lse, residual = passes.logsumexp(tuple(statistics))
        d_statistics = jax.jvp(passes.statistics, (lse, residual), (d_lse, jnp.zeros_like(residual)))[1]
        return outputs, [d_out, *d_statistics, *[None] * len(outputs[3:])]

    out, lse, residual, *highest = call(forward, rule, arrays)
    return out, (lse, residual), *highest


def gradients(
    passes: Passes, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs
) -> list[jax.Array]:
    """`Passes.gradients`, with derivatives of every order."""
    leaves, tree = jax.tree.flatten((arrays, given))

    def flat(function: Function) -> Function:
        return lambda *given: function(wanted, *jax.tree.unflatten(tree, given))

    def rule(outputs: Values, inputs: Values, tangents: Values) -> tuple[Values, Values]:
        moving, n = [i for i, t in enumerate(tangents) if t is not None], len(inputs)
        dtypes = [x.dtype for x in outputs or jax.eval_shape(flat(passes.gradients), *inputs)]

        def tangent(function: Function, *given: jax.Array) -> Values:
            out = jvp_of(flat(function), given[:n], replaced([None] * n, moving, given[n:]))
            return [x.astype(dtype) for x, dtype in zip(out, dtypes, strict=True)]

        fast, plain = (functools.partial(tangent, f) for f in (passes.forward_gradients, passes.plain_gradients))
        given = [*inputs, *(tangents[i] for i in moving)]
        return outputs, call(fast, lambda outputs, *given: (outputs, jvp_of(plain, *given)), given)

    return call(flat(passes.gradients), rule, leaves)


def _contribution(
    passes: Passes, moving: Sequence[int], arrays: list[jax.Array], statistics: Statistics, *values: jax.Array
) -> Contribution:
    return passes.contribution(replaced(arrays, moving, values), *passes.logsumexp(statistics))


# The tangents of output and logsumexp, linear in the tangents of the arrays ``moving``: a primitive, so that reverse
# mode can transpose it by kernels. Its operands are ``n`` arrays, the output, the statistics, and the tangents.
# ``axes`` has the axes of the operands for each enclosing `jax.vmap`, the outermost first.
_tangent: Final = core.Primitive("attention_tangent")
_tangent.multiple_results = True


def _mapped(axes: tuple[PyTree, ...], function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    for in_axes in reversed(axes):
        function = jax.vmap(function, in_axes)
    return function


def _evaluate(
    *given: jax.Array, passes: Passes, n: int, moving: tuple[int, ...], axes: tuple[PyTree, ...]
) -> list[jax.Array]:
    def one(*given: jax.Array) -> list[jax.Array]:
        arrays, out, statistics, tangents = _split(given, n, moving)
        contribution = functools.partial(_contribution, passes, moving, arrays, statistics)
        d = jax.jvp(contribution, [arrays[i] for i in moving], tangents)[1]
        d_out = d.out - d.weight.swapaxes(1, 2)[..., None] * out.astype(jnp.float32)
        return [d_out.astype(out.dtype), d.weight]

    result: list[jax.Array] = _mapped(axes, one)(*given)
    return result


def _split(
    given: Sequence[jax.Array], n: int, moving: tuple[int, ...]
) -> tuple[list[jax.Array], jax.Array, Statistics, list[jax.Array]]:
    """The arrays, the output, the statistics and the tangents."""
    last = len(given) - len(moving)
    return list(given[:n]), given[n], tuple(given[n + 1 : last]), list(given[last:])


def _transpose(
    cotangents: Sequence[Any], *given: Any, passes: Passes, n: int, moving: tuple[int, ...], axes: tuple[PyTree, ...]
) -> list[Any]:
    known = given[: len(given) - len(moving)]

    def one(*given: jax.Array) -> list[jax.Array]:
        arrays, out, statistics, _ = _split(given[:-2], n, ())
        return gradients(passes, moving, arrays, ReverseInputs(out, statistics, *given[-2:]))

    like = known[n : n + 2]
    d = [jnp.zeros_like(x) if type(d) is ad.Zero else d for d, x in zip(cotangents, like, strict=True)]
    pulled = _mapped(tuple((*a[: len(known)], 0, 0) for a in axes), one)(*known, *d)

    def cotangent(i: int, x: jax.Array) -> jax.Array | None:
        if not ad.is_undefined_primal(given[i]):
            return None  # this tangent is a known value, not an input of the transpose
        shared = [level for level, in_axes in enumerate(axes) if in_axes[i] is None]  # by all elements of a vmap
        return (x.sum(shared) if shared else x).astype(given[i].aval.dtype)

    return [None] * len(known) + [cotangent(len(known) + i, x) for i, x in enumerate(pulled)]


def _jvp(
    given: Sequence[Any],
    tangents: Sequence[Any],
    *,
    n: int,
    moving: tuple[int, ...],
    axes: tuple[PyTree, ...],
    **rest: Any,
) -> tuple[list[jax.Array], list[jax.Array]]:  # fmt: skip
    value = _tangent.bind(*given, n=n, moving=moving, axes=axes, **rest)
    known = len(given) - len(moving)
    kept = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if kept[0] >= known:  # linear in these, so that it is transposed by kernels again
        select = [*range(known), *kept]
        axes = tuple(tuple(a[i] for i in select) for a in axes)
        given, moving = given[:known], tuple(moving[i - known] for i in kept)
        return value, _tangent.bind(*given, *(tangents[i] for i in kept), n=n, moving=moving, axes=axes, **rest)
    function = functools.partial(_evaluate, n=n, moving=moving, axes=axes, **rest)
    return value, jvp_of(function, given, [None if type(t) is ad.Zero else t for t in tangents])


def _batch(
    given: Sequence[Any], batched: Sequence[int | None], *, n: int, axes: tuple[PyTree, ...], **rest: Any
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[a] for x, a in zip(given, batched, strict=True) if a is not None)
    moved = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(given, batched, strict=True)]
    # The results have the shapes of the output and of a statistic.
    for i in (n, n + 1):
        moved[i] = moved[i] if batched[i] is not None else jnp.broadcast_to(moved[i], (size, *moved[i].shape))
    in_axes = tuple(None if a is None and i not in (n, n + 1) else 0 for i, a in enumerate(batched))
    return _tangent.bind(*moved, n=n, axes=(in_axes, *axes), **rest), [0, 0]


_tangent.def_impl(_evaluate)
_tangent.def_abstract_eval(lambda *given, n, **_: [x.update(weak_type=False) for x in given[n : n + 2]])
ad.primitive_jvps[_tangent] = _jvp
ad.primitive_transposes[_tangent] = _transpose
batching.primitive_batchers[_tangent] = _batch
mlir.register_lowering(_tangent, mlir.lower_fun(_evaluate, multiple_results=True))
