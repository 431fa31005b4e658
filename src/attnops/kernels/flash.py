"""The skeleton of flash attention: from the options of a call to a kernel's plan, operands and results.

check → dtype → plan → arrays → schedule → derivative → output; a backend implements these steps (`FlashBackend`), and
`attnops.kernels.vjp` has the derivative.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from attnops.dropout import ShiftedKey
from attnops.kernels.reverse import REVERSE_ONLY, reverse_mode_only
from attnops.kernels.rules import inexact_vjp
from attnops.kernels.varying import equally_varying
from attnops.kernels.vjp import FlashKernel, Operands, attend, contribution_gradients
from attnops.masks import Mask
from attnops.softmax import Contribution, PartialSoftmax

if TYPE_CHECKING:
    from attnops.dispatch.metadata import OperationMetadata
    from attnops.typing import Aval, BackendPlan, DType, PyTree


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

    @classmethod
    def of(
        cls, metadata: OperationMetadata, query: jax.Array, key: Aval, value: Aval, options: Mapping[str, Any]
    ) -> FlashCall:
        """A call with these options of the contract, except ``return_lse`` and ``return_weights``."""
        return cls(metadata, query, key, value, **{n: x for n, x in options.items() if not n.startswith("return_")})

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


class FlashBackend(FlashKernel):
    """Flash attention in one kernel language: the steps of the skeleton and the passes of `FlashKernel`."""

    # Head dims are padded with zeros, which change no result, to a multiple of this.
    head_dim_multiple: ClassVar[int] = 1

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

    def run(self, plan: BackendPlan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Output, logsumexp and its rounding error, by `attnops.kernels.vjp.attend`."""
        return attend(self, plan, *operands)

    def run_gradients(self, plan: BackendPlan, wants_bias: bool, *given: PyTree) -> tuple[PyTree, ...]:
        """The gradients of a contribution, by `attnops.kernels.vjp.contribution_gradients`."""
        return contribution_gradients(self, plan, wants_bias, *given)


def attention(backend: FlashBackend, call: FlashCall) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output [B, T, H, Dv], the logsumexp [B, H, T] float32, and its rounding error, float32.

    The output has the query's dtype; float32 for a partial softmax. Differentiable, once.
    """
    fitted = backend.fit(call)
    plan = backend.plan(fitted)
    given = fitted.query, fitted.key, fitted.value, backend.arrays(plan, fitted), backend.schedule(plan, fitted)
    out, lse, residual = backend.run(plan, Operands(*equally_varying(reverse_mode_only(given, REVERSE_ONLY))))
    Dv = call.value.shape[3]
    # Eagerly, even a slice of everything costs as much as a kernel's launch.
    out = out if out.shape[3] == Dv else out[..., :Dv]
    return out if out.dtype == call.out_dtype else out.astype(call.out_dtype), lse, residual


def partial(backend: FlashBackend, call: FlashCall) -> PartialSoftmax:
    """`attention` over some of the keys: nothing is rounded to the query's dtype. Differentiable, once."""
    out, lse, residual = attention(backend, call.replace(is_partial=True))
    return PartialSoftmax(out, lse, jax.lax.stop_gradient(residual))


def partial_vjp(
    backend: FlashBackend, call: FlashCall, wants_bias: bool, lse: jax.Array, lse_residual: jax.Array, d: Contribution
) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
    """The gradients of a call's `attnops.softmax.contribution`, from the logsumexp; runs no forward pass.

    Args:
        backend: the kernels.
        call: a call over some of the keys.
        wants_bias: whether the gradient of the bias is computed.
        lse: over all keys, float32 [B, H, T].
        lse_residual: its rounding error, float32 [B, H, T].
        d: the cotangents.

    Returns:
        The gradients of query, key and value, float32; and of the bias, in its structure, None for leaves without one.
    """
    call = call.replace(is_partial=True)
    fitted = backend.fit(call)
    plan = backend.plan(fitted)

    def bias_arrays(bias: PyTree) -> PyTree:
        return backend.bias_arrays(backend.arrays(plan, backend.fit(call.replace(bias=bias))))

    given = fitted.query, fitted.key, fitted.value, backend.arrays(plan, fitted), backend.schedule(plan, fitted)
    d = d._replace(out=_padded(backend, d.out))
    operands, lse, lse_residual, d = equally_varying((Operands(*given), lse, lse_residual, d))
    dq, dk, dv, d_bias_arrays = backend.run_gradients(plan, wants_bias, operands, lse, lse_residual, d)
    d_bias = inexact_vjp(bias_arrays, call.bias)(d_bias_arrays) if wants_bias else None
    D, Dv = call.query.shape[3], call.value.shape[3]
    dq, dk, dv = (x.astype(jnp.float32) for x in (dq[..., :D], dk[..., :D], dv[..., :Dv]))
    return dq, dk, dv, d_bias


def _padded(backend: FlashBackend, x: jax.Array) -> jax.Array:
    """``x`` [B, length, heads, d] with d padded by zeros to a multiple of ``head_dim_multiple``."""
    missing = -x.shape[-1] % backend.head_dim_multiple
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x
