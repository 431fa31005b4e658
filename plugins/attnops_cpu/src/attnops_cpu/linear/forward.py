"""The call of the handler of linear attention."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata
from attnops.kernels import equally_varying, folds_batch, output_like
from attnops_linear import LinearOutput


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What is static about a call.

    Attributes:
        B: rows.
        scale: of queries.
    """

    B: int
    scale: float


class Arrays(NamedTuple):
    """The arrays of a call, whose first axis is B, or 1 where slices of `jax.vmap` share one row.

    Attributes:
        query: [B, T, K, D], of one dtype with key and value.
        key: [B, T, K, D].
        value: [B, T, Hv, Dv].
        decay: float32 [B, T or 1, Hv]; None for none.
        beta: float32 [B, T, Hv]; None for none.
        is_token: bool [B, T], False for padding; None without padding.
        starts: bool [B, T], whether the state is emptied before the token; None without segments.
        initial: float32 [B, Hv, D, Dv]; None for 0.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array | None
    beta: jax.Array | None
    is_token: jax.Array | None
    starts: jax.Array | None
    initial: jax.Array | None


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False,
) -> LinearOutput:  # fmt: skip
    """See `attnops_linear.LinearAttention.forward_native`. Arrays of several dtypes are multiplied as float32."""
    dtype = query.dtype if query.dtype == key.dtype == value.dtype else jnp.dtype(jnp.float32)
    is_token, starts = (None, None) if mask is None else mask

    def wide(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.astype(jnp.float32)

    if decay is not None and decay.ndim == 1:
        decay = decay[None, None]
    arrays = Arrays(
        query.astype(dtype), key.astype(dtype), value.astype(dtype), wide(decay), wide(beta), is_token, starts,
        wide(initial_state),
    )  # fmt: skip
    plan = LinearPlan(query.shape[0], query.shape[3] ** -0.5 if scale is None else scale)
    outputs, state = _call(plan, arrays)
    return LinearOutput(outputs.astype(query.dtype), state if return_state else None)


@folds_batch
def _call(plan: LinearPlan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The outputs [B, T, Hv, Dv], in the arrays' dtype, and the last state, float32 [B, Hv, D, Dv]."""
    # One row of decays stays one: constant decays have it for all slices.
    whole: dict[str, Any] = {name: _of_batch(plan, x) for name, x in arrays._asdict().items() if name != "decay"}
    query, key, value, decay, beta, is_token, starts, initial = equally_varying(arrays._replace(**whole))

    def given(x: jax.Array | None, dtype: Any) -> jax.Array:
        return jnp.zeros_like(query, shape=(0,), dtype=dtype) if x is None else x

    (T, _, D), (H, Dv) = query.shape[1:], value.shape[2:]
    results = (
        output_like(query, (plan.B, T, H, Dv), query.dtype),
        output_like(query, (plan.B, H, D, Dv), jnp.dtype(jnp.float32)),
    )
    # The first state's buffer becomes the last state's, if it is donated; else XLA copies it.
    over = {} if initial is None else {7: 1}
    outputs, state = jax.ffi.ffi_call("attnops_cpu_linear", results, input_output_aliases=over)(
        query, key, value, given(decay, jnp.float32), given(beta, jnp.float32), given(is_token, jnp.bool_),
        given(starts, jnp.bool_), given(initial, jnp.float32), scale=np.float32(plan.scale),
    )  # fmt: skip
    return outputs, state


def _of_batch(plan: LinearPlan, x: jax.Array | None) -> jax.Array | None:
    return x if x is None or x.shape[0] == plan.B else jnp.broadcast_to(x, (plan.B, *x.shape[1:]))
