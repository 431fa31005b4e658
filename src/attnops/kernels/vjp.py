"""The derivative of flash attention, shared by all kernels: residuals, cotangents and refused second derivatives.

The backward pass recomputes the weights from the logsumexp (Dao 2023, arXiv:2307.08691). A kernel supplies its forward
pass and its gradients, as a `FlashKernel`.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values

from attnops.kernels.nograd import not_differentiable
from attnops.kernels.rules import cotangents, is_differentiated
from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops.softmax import Contribution

if TYPE_CHECKING:
    from attnops.typing import BackendPlan, PyTree


class Operands(NamedTuple):
    """The inputs of a kernel.

    Attributes:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        arrays: all other inputs of scores, a NamedTuple with ``sinks``, [1, H] float32 or None.
        schedule: which tiles are computed, in which order.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    arrays: PyTree
    schedule: PyTree


class FlashKernel(abc.ABC):
    """The passes of flash attention in one kernel language. It has no state: instances of a class are equal."""

    # The message of the error that a second derivative raises.
    second_derivative: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abc.abstractmethod
    def forward(self, plan: BackendPlan, operands: Operands) -> tuple[jax.Array, PyTree]:
        """The output [B, T, H, Dv], and the statistics of its softmax, which `logsumexp` converts."""

    @abc.abstractmethod
    def gradients(
        self,
        plan: BackendPlan,
        wants_bias: bool,
        operands: Operands,
        statistics: PyTree,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        """The gradients of query, key and value, and of the arrays: None for arrays without a gradient.

        Args:
            plan: static description of the call.
            wants_bias: whether the gradients of `bias_arrays` are computed.
            operands: the call's operands.
            statistics: [B, H, T] each, from which the weights are recomputed.
            delta: [B, H, T] float32; the gradient of a score is ``weight · (d_out · value − delta)``.
            d_out: [B, T, H, Dv].
        """

    def logsumexp(self, plan: BackendPlan, statistics: PyTree) -> tuple[jax.Array, jax.Array]:
        """The logsumexp and its rounding error, float32 [B, H, T]."""
        lse, residual = statistics
        return lse, residual

    def statistics(self, plan: BackendPlan, lse: jax.Array, lse_residual: jax.Array) -> PyTree:
        """The inverse of `logsumexp`."""
        return lse, lse_residual

    def bias_arrays(self, arrays: PyTree) -> PyTree:
        """The bias's arrays; their gradients need a separate kernel, and are computed only if they are needed."""
        return arrays.bias, arrays.table, arrays.array

    def row_sums(self, x: jax.Array) -> jax.Array:
        """[B, T, H, Dv] float32 summed over the last axis, [B, H, T]."""
        return x.sum(-1).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernel: FlashKernel,
    plan: BackendPlan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: PyTree,
    schedule: PyTree,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output [B, T, H, Dv], the logsumexp [B, H, T], and its rounding error, which has no gradient."""
    out, statistics = kernel.forward(plan, Operands(query, key, value, arrays, schedule))
    return out, *kernel.logsumexp(plan, statistics)


def _forward_rule(kernel: FlashKernel, plan: BackendPlan, *primals: PyTree) -> tuple[PyTree, PyTree]:
    # Residuals must be arrays; the flag is the length of a tuple.
    flag = (None,) * is_differentiated(kernel.bias_arrays(primals[3]))
    operands = Operands(*custom_vjp_primal_tree_values(primals))
    run = not_differentiable(functools.partial(kernel.forward, plan), kernel.second_derivative)
    out, statistics = run(operands)
    # Tagged here, where they become residuals; elsewhere a checkpoint policy would name a copy.
    out, statistics = tag(out, OUTPUT_NAME), jax.tree.map(lambda x: tag(x, LOGSUMEXP_NAME), statistics)
    return (out, *kernel.logsumexp(plan, statistics)), (operands, out, statistics, flag)


def _backward_rule(kernel: FlashKernel, plan: BackendPlan, saved: PyTree, given: PyTree) -> tuple[PyTree, ...]:
    operands, out, statistics, flag = saved
    d_out, d_lse = cotangents(given[:2], operands.query)

    def gradients(
        operands: Operands, out: jax.Array, statistics: PyTree, d_out: jax.Array, d_lse: jax.Array
    ) -> tuple[PyTree, ...]:
        delta = kernel.row_sums(d_out.astype(jnp.float32) * out.astype(jnp.float32)) - d_lse
        *d_qkv, d_arrays = kernel.gradients(plan, bool(flag), operands, statistics, delta, d_out)
        if operands.arrays.sinks is not None:
            d_sinks = _sinks_gradient(operands.arrays.sinks, *kernel.logsumexp(plan, statistics), delta)
            d_arrays = d_arrays._replace(sinks=d_sinks)
        return *d_qkv, d_arrays

    run = not_differentiable(gradients, kernel.second_derivative)
    *d_qkv, d_arrays = run(operands, out, statistics, d_out, d_lse)
    # The gradients of a partial softmax are float32.
    rounded = (d.astype(x.dtype) for d, x in zip(d_qkv, operands[:3], strict=True))
    return *rounded, d_arrays, None


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def contribution_gradients(
    kernel: FlashKernel,
    plan: BackendPlan,
    wants_bias: bool,
    operands: Operands,
    lse: jax.Array,
    lse_residual: jax.Array,
    d: Contribution,
) -> tuple[PyTree, ...]:
    """The gradients of `attnops.softmax.contribution`, from the logsumexp of all keys; runs no forward pass.

    Args:
        kernel: the kernel that the operands are for.
        plan: static description of the call, for float32 gradients.
        wants_bias: whether the gradients of `FlashKernel.bias_arrays` are computed.
        operands: the call's operands, without sinks, which belong to all keys together.
        lse: the logsumexp over all keys, float32 [B, H, T].
        lse_residual: its rounding error, float32 [B, H, T].
        d: the cotangents.

    Returns:
        The gradients of query, key and value, float32; and of ``kernel.bias_arrays(operands.arrays)``, None without
        ``wants_bias``.
    """

    def gradients(operands: Operands, lse: jax.Array, lse_residual: jax.Array, d: Contribution) -> tuple[PyTree, ...]:
        statistics = kernel.statistics(plan, lse, lse_residual)
        *d_qkv, d_arrays = kernel.gradients(plan, wants_bias, operands, statistics, -d.weight, d.out)
        return *d_qkv, kernel.bias_arrays(d_arrays) if wants_bias else None

    return not_differentiable(gradients, kernel.second_derivative)(operands, lse, lse_residual, d)


def _sinks_gradient(sinks: jax.Array, lse: jax.Array, lse_residual: jax.Array, delta: jax.Array) -> jax.Array:
    """[1, H]. A sink is one more logit, whose value is 0; fully masked rows contribute nothing."""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp((sinks[:, :, None] - lse) - lse_residual))
    return -(weight * delta).sum((0, 2))[None]
