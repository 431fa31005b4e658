"""A bias or a sink that is +inf or NaN makes its row NaN, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ScoreFn
from attnops_testing.not_finite import CASES, check_not_finite


@pytest.mark.parametrize(
    ("operation", "case"),
    [(name, case) for name in ("vanilla", "flash", "sdpa") for case in CASES if name != "sdpa" or "bias" in case],
)
@pytest.mark.tier(slow=["vanilla-bias +inf", "flash-bias +inf", "vanilla-bias NaN", "flash-bias NaN"])
def test_a_row_that_is_nan_is_alone(operation, case):
    metadata = OperationMetadata(platform="cpu", block_q=8, block_k=8, on_unsupported="error")
    check_not_finite(OperationRegistry.create(operation, metadata), case, sinks=operation != "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_derivative_that_is_infinite_at_0_is_not_that_of_tokens_beyond_the_last_one(platform):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, n, 1, 16)).astype(np.float32) for n in (20, 24, 24))

    def gradients(operation):
        def out(*qkv):
            return operation(*qkv, bias=ScoreFn(lambda s, b, h, i, j: jnp.sqrt(jnp.abs(s)))).attention_outputs

        return jax.jit(jax.grad(lambda *qkv: (out(*qkv) ** 2).sum(), argnums=(0, 1, 2)))(query, key, value)

    metadata = OperationMetadata(platform=platform, interpret=platform != "cpu", on_unsupported="error")
    found, expected = (
        gradients(x) for x in (OperationRegistry.create("flash", metadata), OperationRegistry.create("vanilla"))
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4, rtol=1e-4)
