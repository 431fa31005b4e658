"""The skeleton of flash attention: from the options of a call to a kernel's plan, operands and results.

check → dtype → plan → arrays → schedule → derivatives → output; a backend implements these steps (`FlashBackend`), and
`attnops.kernels.derivatives` has the derivatives.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attnops.dropout import ShiftedKey
from attnops.kernels.calls import Values
from attnops.kernels.derivatives import Passes, Result, ReverseInputs, Statistics, attend, gradients
from attnops.kernels.rules import inexact_vjp
from attnops.masks import Mask
from attnops.programs.varying import equally_varying
from attnops.softmax import Contribution, PartialSoftmax
from attnops.typing import Aval, BackendPlan, DType, Leaf, PyTree

if TYPE_CHECKING:
    from attnops.dispatch.metadata import OperationMetadata


@dataclasses.dataclass(frozen=True, eq=False)
class FlashCall:
    """A call of flash attention, with the arguments of a forward: layout "BTHD", mask and bias bound.

    Attributes:
        metadata: the operation's metadata.
        query: [B, T, H, D].
        key: [B, S, K, D]; over a cache its shape and dtype.
        value: [B, S, K, Dv]; over a cache its shape and dtype.
        mask: a bound mask; None for none.
        bias: an array that broadcasts to [B, H, T, S], or an `attnops.biases.Bias`; None for none.
        softmax_scale: None for ``D ** -0.5``.
        logits_soft_cap: None for none.
        sinks: [H]; None for none.
        dropout_key: None for no dropout.
        is_partial: whether this is a partial softmax, over some of the keys, whose results are float32.
        max_logits: whether the largest scores are asked for.
    """

    metadata: OperationMetadata
    query: jax.Array
    key: Aval
    value: Aval
    mask: Mask | None = None
    bias: PyTree = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: jax.Array | None = None
    dropout_key: jax.Array | ShiftedKey | None = None
    is_partial: bool = False
    max_logits: bool = False

    @classmethod
    def of(
        cls, metadata: OperationMetadata, query: jax.Array, key: Aval, value: Aval, options: Mapping[str, Any]
    ) -> FlashCall:
        """A call with these options of the contract, except ``return_lse`` and ``return_weights``."""
        given = {n: x for n, x in options.items() if not n.startswith("return_")}
        return cls(metadata, query, key, value, **given, max_logits=options.get("return_max_logits", False))

    def replace(self, **changes: Any) -> FlashCall:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.query.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def dropout_prob(self) -> float:
        """The probability of dropout; 0 without a key."""
        return 0.0 if self.dropout_key is None else self.metadata.dropout_prob

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores, (B, H, T, S)."""
        return self.query.shape[0], self.query.shape[2], self.query.shape[1], self.key.shape[1]

    @property
    def out_dtype(self) -> DType:
        """The dtype of the output."""
        return jnp.dtype(jnp.float32) if self.is_partial else self.query.dtype


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


class FlashBackend(abc.ABC):
    """Flash attention in one kernel language: the steps of the skeleton and the passes of its kernels.

    It has no state: instances of a class are equal.
    """

    # Head dims are padded with zeros, which change no result, to a multiple of this.
    head_dim_multiple: ClassVar[int] = 1

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def compute_dtype(self, call: FlashCall) -> DType | None:
        """The dtype that query, key and value are cast to before the kernel; None for no cast."""
        return None

    def fit(self, call: FlashCall) -> FlashCall:
        """The call with query, key and value in the kernel's dtype and head dims, and an explicit scale."""
        dtype = self.compute_dtype(call)
        arrays = {name: _padded(self, getattr(call, name)) for name in ("query", "key", "value")}
        if dtype is not None:
            arrays = {name: x.astype(dtype) for name, x in arrays.items()}
        return call.replace(**arrays, softmax_scale=call.scale)

    @abc.abstractmethod
    def plan(self, call: FlashCall) -> BackendPlan:
        """Everything static about a call; hashable."""

    @abc.abstractmethod
    def arrays(self, plan: BackendPlan, call: FlashCall) -> PyTree:
        """The inputs of scores other than query and key; differentiable with respect to bias and sinks."""

    @abc.abstractmethod
    def schedule(self, plan: BackendPlan, call: FlashCall) -> PyTree:
        """Which tiles are computed, in which order."""

    @abc.abstractmethod
    def forward(self, plan: BackendPlan, operands: Operands) -> Result:
        """The output [B, T, H, Dv], the statistics of its softmax, which `logsumexp` converts, and, if the call has
        ``max_logits``, the largest scores [B, H, T] float32, in natural units, without sinks.
        """

    @abc.abstractmethod
    def gradients(
        self,
        plan: BackendPlan,
        wants_bias: bool,
        operands: Operands,
        statistics: Statistics,
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

    def logsumexp(self, plan: BackendPlan, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        """The logsumexp and its rounding error, float32 [B, H, T]."""
        lse, residual = statistics
        return lse, residual

    def statistics(self, plan: BackendPlan, lse: jax.Array, lse_residual: jax.Array) -> Statistics:
        """The inverse of `logsumexp`."""
        return lse, lse_residual

    def bias_arrays(self, arrays: PyTree) -> PyTree:
        """The bias's arrays; their gradients need a separate kernel, and are computed only if they are needed."""
        return arrays.bias, arrays.table, arrays.array

    def row_sums(self, x: jax.Array) -> jax.Array:
        """[B, T, H, Dv] float32 summed over the last axis, [B, H, T]."""
        return x.sum(-1).swapaxes(1, 2)

    def run(self, plan: BackendPlan, operands: Operands) -> Result:
        """`forward`; a backend may compile it."""
        return self.forward(plan, operands)

    def run_gradients(
        self, plan: BackendPlan, wants_bias: bool, operands: Operands, given: ReverseInputs
    ) -> tuple[PyTree, ...]:
        """`attnops.kernels.flash.backward`; a backend may compile it."""
        return backward(self, plan, wants_bias, operands, given)


def backward(
    backend: FlashBackend,
    plan: BackendPlan,
    wants_bias: bool,
    operands: Operands,
    given: ReverseInputs,
) -> tuple[PyTree, ...]:
    """`FlashBackend.gradients` from the cotangents, with the gradient of sinks.

    Args:
        backend: the kernels.
        plan: static description of the call.
        wants_bias: whether the gradients of the bias's arrays are computed.
        operands: the call's operands.
        given: the results and their cotangents.
    """
    out, statistics, d_out, d_lse = given
    delta = -d_lse
    if out is not None:
        delta = backend.row_sums(d_out.astype(jnp.float32) * out.astype(jnp.float32)) - d_lse
    *d_qkv, d_arrays = backend.gradients(plan, wants_bias, operands, statistics, delta, d_out)
    if operands.arrays.sinks is not None:
        weight = _sinks_weight(operands.arrays.sinks, *backend.logsumexp(plan, statistics))
        d_arrays = d_arrays._replace(sinks=-(weight * delta).sum((0, 2))[None])
    return *d_qkv, d_arrays


def _sinks_weight(sinks: jax.Array, lse: jax.Array, lse_residual: jax.Array) -> jax.Array:
    """The weight [B, H, T] of sinks [1, H], logits whose value is 0; 0 in fully masked rows."""
    return jnp.exp((sinks[:, :, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse)) - lse_residual)


def _constant(x: Leaf) -> Leaf:
    # A concrete array is constant: no operation for it.
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


class PlainBackend(FlashBackend):
    """Plain JAX: its ``gradients`` have forward mode."""

    @abc.abstractmethod
    def contribution(self, call: FlashCall, lse: jax.Array, lse_residual: jax.Array) -> Contribution:
        """``Σ exp(s − lse) · v`` and ``Σ exp(s − lse)`` over a fitted call's keys, after dropout; without sinks."""


@dataclasses.dataclass(frozen=True, eq=False)
class FlashPasses(Passes):
    """The passes of a call by a backend.

    Attributes:
        backend: the kernels.
        plan: the plan of the call.
        call: the fitted call; its arrays are arguments instead.
        plain: the backend that computes all derivatives other than reverse mode.
        tree: the structure of the arrays: the call's, the scores' and the schedule's.
        differentiable: how many arrays (query, key, value, bias and sinks) have derivatives.
    """

    backend: FlashBackend
    plan: BackendPlan
    call: FlashCall
    plain: PlainBackend
    tree: PyTree
    differentiable: int

    @classmethod
    def of(cls, backend: FlashBackend, call: FlashCall, plain: PlainBackend) -> tuple[FlashPasses, list[jax.Array]]:
        """The passes of a call, and their arrays."""
        fitted = backend.fit(call)
        plan = backend.plan(fitted)
        given = fitted.query, fitted.key, fitted.value, fitted.bias, fitted.sinks
        rest = fitted.mask, fitted.dropout_key, backend.arrays(plan, fitted), backend.schedule(plan, fitted)
        rest = rest if isinstance(backend, PlainBackend) else jax.tree.map(_constant, rest)
        leaves, tree = jax.tree.flatten((given, rest))
        static = fitted.replace(query=None, key=None, value=None, bias=None, sinks=None, mask=None, dropout_key=None)
        passes = cls(backend, plan, static, plain, tree, len(jax.tree.leaves(given)))
        return passes, equally_varying(leaves)

    def _call(self, arrays: list[jax.Array]) -> tuple[FlashCall, Operands]:
        (query, key, value, bias, sinks), (mask, dropout_key, *rest) = jax.tree.unflatten(self.tree, arrays)
        call = self.call.replace(
            query=query, key=key, value=value, bias=bias, sinks=sinks, mask=mask, dropout_key=dropout_key
        )  # fmt: skip
        return call, Operands(query, key, value, *rest)

    def forward(self, arrays: list[jax.Array]) -> Result:
        return self.backend.run(self.plan, self._call(arrays)[1])

    def logsumexp(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        return self.backend.logsumexp(self.plan, statistics)

    def statistics(self, lse: jax.Array, lse_residual: jax.Array) -> Statistics:
        return self.backend.statistics(self.plan, lse, lse_residual)

    def contribution(self, arrays: list[jax.Array], lse: jax.Array, lse_residual: jax.Array) -> Contribution:
        call, _ = self._call(arrays)
        out, weight = self.plain.contribution(call.replace(sinks=None), lse, lse_residual)
        if call.sinks is not None:
            weight = weight + _sinks_weight(call.sinks.astype(jnp.float32)[None], lse, lse_residual)
        return Contribution(out, weight)

    def gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> list[jax.Array]:
        call, operands = self._call(arrays)
        bias = range(3, 3 + len(jax.tree.leaves(call.bias)))
        wants_bias = any(i in bias for i in wanted)
        *d, d_arrays = self.backend.run_gradients(self.plan, wants_bias, operands, given)
        d += [None] * len(bias)
        if wants_bias:

            def bias_arrays(bias: PyTree) -> PyTree:
                return self.backend.bias_arrays(self.backend.arrays(self.plan, call.replace(bias=bias)))

            d_bias = inexact_vjp(bias_arrays, call.bias)(self.backend.bias_arrays(d_arrays))
            structure: PyTree = jax.tree.structure(call.bias)
            d[3:] = structure.flatten_up_to(d_bias)
        if call.sinks is not None:
            d.append(d_arrays.sinks[0])
        return [d[i] for i in wanted]

    def forward_gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> Values:
        passes, arrays = FlashPasses.of(self.plain, self._call(arrays)[0], self.plain)
        lse, residual = self.logsumexp(given.statistics)
        statistics = lse, jax.lax.stop_gradient(residual)  # zeros as its tangent would cost products
        return passes.gradients(wanted, arrays, given._replace(statistics=statistics))


def attention(backend: FlashBackend, call: FlashCall, plain: PlainBackend) -> tuple[jax.Array, ...]:
    """The output [B, T, H, Dv], the logsumexp [B, H, T] float32, its rounding error and, if the call has
    ``max_logits``, the largest scores, float32 too.

    The output has the query's dtype; float32 for a partial softmax. Derivatives of every order: reverse mode by the
    backend's kernels, all others by ``plain``. The rounding error and the largest scores have none.
    """
    passes, arrays = FlashPasses.of(backend, call, plain)
    out, statistics, *highest = attend(passes, arrays)
    Dv = call.value.shape[3]
    # Eagerly, even a slice of everything costs as much as a kernel's launch.
    out = out if out.shape[3] == Dv else out[..., :Dv]
    out = out if out.dtype == call.out_dtype else out.astype(call.out_dtype)
    return out, *passes.logsumexp(statistics), *highest


def partial(backend: FlashBackend, call: FlashCall, plain: PlainBackend) -> PartialSoftmax:
    """`attention` over some of the keys, in float32."""
    out, lse, residual, *highest = attention(backend, call.replace(is_partial=True), plain)
    return PartialSoftmax(out, lse, jax.lax.stop_gradient(residual), *highest)


def partial_vjp(
    backend: FlashBackend, call: FlashCall, plain: PlainBackend, wants_bias: bool, lse: jax.Array,
    lse_residual: jax.Array, d: Contribution,
) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:  # fmt: skip
    """The gradients of a call's `attnops.softmax.contribution`, from the logsumexp; runs no forward pass.

    Args:
        backend: the kernels.
        call: a call over some of the keys, without sinks, which belong to all keys together.
        plain: the backend that computes the derivatives of these gradients.
        wants_bias: whether the gradient of the bias is computed.
        lse: the logsumexp over all keys, float32 [B, H, T].
        lse_residual: the rounding error of ``lse``, float32 [B, H, T].
        d: the cotangents, float32: of ``out`` [B, T, H, Dv] and of ``weight`` [B, H, T].

    Returns:
        The gradients of query, key and value, float32; and of the bias, in its structure, None for leaves without one.
    """
    passes, arrays = FlashPasses.of(backend, call.replace(is_partial=True), plain)
    is_inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays[3 : passes.differentiable]]
    wanted = (0, 1, 2, *(3 + i for i, moves in enumerate(is_inexact) if wants_bias and moves))
    d = d._replace(out=_padded(backend, d.out))
    arrays, lse, lse_residual, d = equally_varying((arrays, lse, lse_residual, d))
    given = ReverseInputs(None, passes.statistics(lse, lse_residual), *d)
    dq, dk, dv, *d_bias = gradients(passes, wanted, arrays, given)
    D, Dv = call.query.shape[3], call.value.shape[3]
    dq, dk, dv = (x.astype(jnp.float32) for x in (dq[..., :D], dk[..., :D], dv[..., :Dv]))
    if not wants_bias:
        return dq, dk, dv, None
    remaining = iter(d_bias)
    leaves = [next(remaining) if moves else None for moves in is_inexact]
    return dq, dk, dv, jax.tree.unflatten(jax.tree.structure(call.bias), leaves)


def _padded(backend: FlashBackend, x: jax.Array) -> jax.Array:
    """``x`` [B, length, heads, d] with d padded by zeros to a multiple of ``head_dim_multiple``."""
    missing = -x.shape[-1] % backend.head_dim_multiple
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x
