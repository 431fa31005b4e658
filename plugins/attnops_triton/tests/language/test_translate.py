"""Each primitive that score functions may be made of, in the interpreter, value and derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ScoreFn
from attnops.masks import MaskFn
from attnops.sharding import create_mesh

# Of scores and of the token's distance; finite everywhere, with finite derivatives except at a score of 0, which tokens
# beyond the last one have.
FUNCTIONS = {
    "tanh": lambda s, d: jnp.tanh(s),
    "exp": lambda s, d: jnp.exp(-jnp.abs(s)) + jnp.exp2(0.1 * s) + jnp.expm1(0.2 * s),
    "log": lambda s, d: jnp.log(s * s + 1) + jnp.log1p(jnp.abs(s)) + jnp.log1p(1e-4 * s),
    "roots": lambda s, d: jnp.sqrt(s * s + 1) + lax.rsqrt(s * s + 2),
    "roots of 0": lambda s, d: jnp.sqrt(jnp.abs(s)) + jnp.sign(s) * jnp.abs(s) ** 0.7,
    "waves": lambda s, d: jnp.sin(s) * jnp.cos(0.3 * s),
    "erf": lambda s, d: lax.erf(s) + jax.nn.sigmoid(s),
    "pow": lambda s, d: (jnp.abs(s) + 1) ** 1.5 + (0.3 * s + 0.1) ** 3 + lax.integer_pow(s * s + 1, -2),
    "square": lambda s, d: jnp.square(s) - s**4 * 0.01,
    "limits": lambda s, d: jnp.maximum(s, 0.2) + jnp.minimum(s, 0.5) + lax.clamp(-0.5, s, 0.7),
    "rounding": lambda s, d: s + jnp.floor(s) + jnp.ceil(2 * s) + jnp.round(3 * s) + lax.round(s),
    "sign": lambda s, d: s * jnp.sign(s) + lax.rem(s, jnp.float32(0.7)),
    "select": lambda s, d: jnp.where((d > 3) & ~(d % 2 == 0) | (s < -1), s * 0.5, s + 1),
    "integers": lambda s, d: s + (d // 3 - (-d) % 5 + (d ^ 3)).astype(jnp.float32) * 0.1,
    "an integer's power": lambda s, d: s * 0.9 ** jnp.abs(d) + 1e5 * jnp.tanh(s / 1e5),
    "float16": lambda s, d: s * jnp.tanh(jnp.float16(0.1) * d.astype(jnp.float16)).astype(jnp.float32),
    "bfloat16": lambda s, d: s * (jnp.bfloat16(0.5) * d.astype(jnp.bfloat16) + 1).astype(jnp.float32),
    "own derivative": lambda s, d: jax.nn.relu(s) + jax.nn.softplus(-s),
    "unsigned": lambda s, d: (
        s + ((d.astype(jnp.uint32) ^ jnp.uint32(2**31 + 5)) > jnp.uint32(2**31)).astype(jnp.float32)
    ),
    "gelu": lambda s, d: jax.nn.gelu(s, approximate=True) + jax.nn.silu(s),
}

# Each of these runs a different branch of the translation; the others are slow.
QUICK = ("rounding", "select", "integers", "own derivative", "unsigned")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS]
)
@pytest.mark.tier(every=7, quick=["own derivative"])
def test_a_score_function_has_the_value_and_gradients_of_vanilla(name: str) -> None:
    function = FUNCTIONS[name]
    rng = np.random.default_rng(1)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(1, 21, 2, 16)), jnp.float32) for _ in range(4))
    scale = jnp.asarray(rng.uniform(0.5, 1.5, 2), jnp.float32)

    def run(operation: object) -> object:
        def bias(factor: jax.Array) -> ScoreFn:
            return ScoreFn(lambda s, b, h, i, j, factor: function(s * factor[h], i - j), (factor,))

        out, pull_back = jax.vjp(lambda q, k, v, x: operation(q, k, v, bias=bias(x)).attention_outputs, q, k, v, scale)
        return out, pull_back(d_out)

    metadata = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_q=16, block_k=16)
    found = run(OperationRegistry.create("attnops-triton:flash", metadata))
    expected = run(OperationRegistry.create("vanilla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_derivative_of_ones_own_under_a_mesh() -> None:
    """Of integers too, whose tangents are nothing."""
    chosen = jax.custom_jvp(lambda x, i: jnp.where(i > 3, x, 2 * x))
    chosen.defjvp(lambda given, d: (chosen(*given), jnp.where(given[1] > 3, d[0], 5 * d[0])))
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 1, 16)), jnp.float32)

    def gradient(operation: object) -> jax.Array:
        bias = ScoreFn(lambda s, b, h, i, j: chosen(s, jnp.broadcast_to(i - j, s.shape)))
        return jax.grad(lambda q: (operation(q, q, q, bias=bias).attention_outputs ** 2).sum())(q)

    mesh = create_mesh((2,), ("dp",), devices=jax.devices()[:2])
    metadata = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", mesh=mesh)
    found = gradient(OperationRegistry.create("attnops-triton:flash", metadata))
    np.testing.assert_allclose(found, gradient(OperationRegistry.create("vanilla")), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_mask_function_of_integers() -> None:
    mask = MaskFn(lambda b, h, q, kv: ((q * 3 + kv) % 5 != h) | (q == kv))
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 40, 3, 16)), jnp.float32) for _ in range(3))
    metadata = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_q=16, block_k=16)
    found = OperationRegistry.create("attnops-triton:flash", metadata)(q, k, v, mask=mask).attention_outputs
    expected = OperationRegistry.create("vanilla")(q, k, v, mask=mask).attention_outputs
    np.testing.assert_allclose(found, expected, atol=2e-6)
