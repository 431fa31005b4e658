"""A forward that finds out while it is traced that it can't serve a call."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationOutput, Reason, UnsupportedError, UnsupportedWarning
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.oracle import attention


class Late(VanillaAttention):
    def forward_tpu(self, query: Any, key: Any, value: Any, *, softmax_scale: float | None = None) -> OperationOutput:
        reason = Reason("mask", "jaxpr", "has no form in this kernel", "write it otherwise")
        raise UnsupportedError("not today", [reason])


RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(1, 5, 2, 8)), jnp.float32) for _ in range(3))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.tier(quick=["jit"])
def test_its_native_forward_runs_and_warns_once(wrap: Any) -> None:
    operation = type(f"Late{wrap.__name__.strip('<>')}", (Late,), {})(OperationMetadata(platform="tpu"))
    name = type(operation).__name__
    with pytest.warns(
        UnsupportedWarning, match=f"{name}.forward_tpu can't serve .* mask=jaxpr: has no form in "
    ) as seen:
        out = wrap(operation)(Q, K, V).attention_outputs
    np.testing.assert_allclose(out, attention(Q, K, V).out, atol=1e-5)
    if wrap is not jax.jit:
        assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(operation)(Q, K, V)
    grad = jax.grad(lambda q: operation(q, K, V).attention_outputs[0, 0, 0, 0])(Q)
    expected = jax.grad(lambda q: VanillaAttention()(q, K, V).attention_outputs[0, 0, 0, 0])(Q)
    np.testing.assert_allclose(grad, expected, atol=1e-6)


def test_it_raises_where_the_metadata_wants_errors() -> None:
    with pytest.raises(UnsupportedError, match="not today"):
        Late(OperationMetadata(platform="tpu", on_unsupported="error"))(Q, K, V)


def test_it_raises_where_the_native_forward_cannot_either() -> None:
    def forward_native(self: Any, query: Any, key: Any, value: Any) -> OperationOutput:
        raise AssertionError("not asked")

    cls = type("LateAlone", (Late,), {"forward_native": forward_native})
    with pytest.raises(UnsupportedError, match="not today"):
        cls(OperationMetadata(platform="tpu"))(Q, K, V, softmax_scale=2.0)
