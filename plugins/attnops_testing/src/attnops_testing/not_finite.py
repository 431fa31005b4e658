"""Biases and sinks that are +inf or NaN make their row NaN, and no other."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dispatch.attention import OperationImpl
from attnops.masks import Causal, KeyPadding, Mask
from attnops_testing import oracle
from attnops_testing.problem import FAST_COMPILE

if TYPE_CHECKING:
    from attnops.typing import Function, PyTree

_ROW: Final = (0, 1, 7)  # batch, head and query of the bias that is not finite
_KEY: Final = 3  # a key that this query sees; it does not see the second key
_HIDDEN_KEY: Final = 21
# By case: the bias at one score, and the sink of head 1.
CASES: Final[dict[str, tuple[float, float]]] = {
    "bias +inf": (np.inf, 0.5),
    "bias NaN": (np.nan, 0.5),
    "sink +inf": (0.0, np.inf),
    "sink NaN": (0.0, np.nan),
    "sink −inf": (0.0, -np.inf),
}


def check_not_finite(
    operation: OperationImpl, case: str, *, sinks: bool, gradients: bool = True, max_logits: bool = False
) -> None:
    """Assert that output, logsumexp, largest scores and the gradients of finite rows equal the oracle's, with NaN
    exactly where the oracle has NaN.

    One row is fully masked, and a masked score has a bias of NaN: neither may make a row NaN.

    Args:
        operation: the operation to check.
        case: a key of `CASES`.
        sinks: whether the call has sinks and asks for the logsumexp.
        gradients: whether gradients are checked.
        max_logits: whether the call asks for the largest scores.

    Raises:
        AssertionError: a value differs.
        UnsupportedError: the operation refuses the call.
    """
    rng = np.random.default_rng(0)
    B, T, S, H, K, D = 1, 20, 24, 2, 1, 8
    q, k, v, d_out = (rng.standard_normal(x).astype(np.float32) for x in
                      ((B, T, H, D), (B, S, K, D), (B, S, K, D), (B, T, H, D)))  # fmt: skip
    bias = rng.standard_normal((B, H, T, S)).astype(np.float32)
    at_score, at_head = CASES[case]
    bias[(*_ROW, _KEY)] += at_score
    bias[(*_ROW, _HIDDEN_KEY)] = np.nan
    inputs: dict[str, oracle.Array] = {"query": q, "key": k, "value": v, "bias": bias}
    if sinks:
        inputs["sinks"] = np.array([0.3, at_head], np.float32)
    dense = np.asarray(_mask(S).dense(B, H, T, S))
    out, (lse, highest), computed = _compiled(operation, sinks, gradients, max_logits)(
        {name: jnp.asarray(x) for name, x in inputs.items()}, d_out
    )
    extra = {name: x for name, x in inputs.items() if name in ("bias", "sinks")}
    expected = oracle.attention(q, k, v, mask=dense, **extra)
    np.testing.assert_allclose(out, expected.out, atol=1e-5, err_msg=f"{case}: output")
    if sinks:
        np.testing.assert_allclose(lse, expected.logsumexp, atol=1e-5, err_msg=f"{case}: logsumexp")
    if max_logits:
        np.testing.assert_allclose(highest, expected.max_logits, atol=1e-5, err_msg=f"{case}: max_logits")
    if not gradients:
        return
    wanted = oracle.attention_gradients(q, k, v, d_out=d_out, mask=dense, **extra).values
    finite: Any = np.isfinite(expected.out).all(-1)  # [B, T, H]
    for name, rows in (("query", finite), ("bias", finite.swapaxes(1, 2)), ("sinks", finite.all((0, 1)))):
        if name in computed:
            np.testing.assert_allclose(
                np.asarray(computed[name])[rows], wanted[name][rows], atol=1e-4, err_msg=f"{case}: gradient of {name}"
            )


def _mask(S: int) -> Mask:
    return Causal(offset=-1) & KeyPadding(np.arange(S) != 2)


@functools.cache
def _compiled(operation: OperationImpl, lse: bool, gradients: bool, max_logits: bool) -> Function:
    """Output, logsumexp, largest scores and gradients, compiled once for all cases."""

    def call(inputs: dict[str, PyTree]) -> tuple[jax.Array, PyTree]:
        q, k, v = (inputs[name] for name in ("query", "key", "value"))
        options = {name: x for name, x in inputs.items() if name in ("bias", "sinks")}
        output = operation(q, k, v, mask=_mask(k.shape[1]), return_lse=lse, return_max_logits=max_logits, **options)
        return output.attention_outputs, (output.logsumexp, output.max_logits)

    def both(inputs: dict[str, Any], d_out: jax.Array) -> PyTree:
        if not gradients:
            return *call(inputs), {}
        out, pull_back, by_query = jax.vjp(call, inputs, has_aux=True)
        return out, by_query, pull_back(d_out)[0]

    return jax.jit(both, compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else None)
