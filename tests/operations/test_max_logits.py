"""The largest score that each query sees: under transformations, and with what must not change it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, KeyPadding
from attnops.models.remat import get_gradient_checkpoint_policy
from attnops_testing import oracle

B, T, S, H, K, D = 1, 20, 36, 4, 2, 16
RNG = np.random.default_rng(0)
Q, KEY, VALUE = (RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, D)))
SEEN = np.tril(np.ones((T, S), bool), S - T) & (np.arange(S) != 3)
BACKENDS = [("vanilla", "cpu"), ("flash", "cpu"), ("flash", "tpu"), ("flash", "cuda")]


def make(name: str, platform: str, **fields: Any) -> Any:
    metadata = OperationMetadata(
        platform=platform, interpret=platform != "cpu", block_q=16, block_k=16, on_unsupported="error", **fields
    )
    return OperationRegistry.create(name, metadata)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "platform"), BACKENDS)
def test_neither_sinks_nor_dropout_change_it_and_it_has_no_gradient(name: str, platform: str) -> None:
    operation = make(name, platform, dropout_prob=0.3)
    sinks = np.array([-50.0, 0.0, 50.0, -np.inf], np.float32)
    # The third row of queries sees no key.
    mask = Causal() & KeyPadding(np.arange(S) != 3) & (np.arange(T) != 2)[None, None, :, None]

    def loss(weight: float, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = operation(q, k, v, mask=mask, sinks=sinks, dropout_key=jax.random.key(0), return_max_logits=True)
        finite = jnp.where(jnp.isfinite(out.max_logits), out.max_logits, 0)
        return (out.attention_outputs * jnp.sin(jnp.arange(D))).sum() + weight * (finite**2).sum(), out.max_logits

    gradients = jax.jit(jax.grad(loss, (1, 2, 3, 4), has_aux=True))
    (with_it, found), (without, _) = (gradients(weight, Q, KEY, VALUE, sinks) for weight in (1.0, 0.0))
    exact = oracle.attention(Q, KEY, VALUE, mask=SEEN & (np.arange(T) != 2)[:, None]).max_logits
    np.testing.assert_allclose(found, exact, atol=2e-6)
    assert np.isneginf(found[:, :, 2]).all()
    jax.tree.map(np.testing.assert_array_equal, with_it, without)


def largest(operation: Any, q: Any, scale: float = 1.0) -> tuple[Any, Any]:
    out = operation(scale * q, KEY, VALUE, mask=Causal(), return_max_logits=True)
    return out.attention_outputs, out.max_logits


def layers(operation: Any, q: Any) -> Any:
    """A loop over layers, each checkpointed, in which the largest score is a factor that counts as a constant."""

    @functools.partial(jax.checkpoint, policy=get_gradient_checkpoint_policy("save_attention"))
    def layer(q: Any, scale: Any) -> tuple[Any, Any]:
        out, highest = largest(operation, q, scale)
        return q + out / highest.max(), highest

    return jax.lax.scan(layer, q, jnp.array([0.5, 1.5]))


TRANSFORMED = {
    "eager": lambda f: largest(f, Q),
    "vmap": lambda f: jax.jit(jax.vmap(lambda s: largest(f, Q, s)))(jnp.array([0.5, -2.0])),
    "scan and remat": lambda f: jax.jit(jax.grad(lambda q: (layers(f, q)[0] ** 2).sum()))(jnp.asarray(Q)),
    "jvp": lambda f: jax.jvp(lambda q: largest(f, q), (Q,), (np.sin(Q),)),
    "second derivative": lambda f: jax.jit(
        jax.grad(lambda q: jax.jvp(lambda q: (layers(f, q)[0] ** 2).sum(), (q,), (jnp.sin(q),))[1])
    )(jnp.asarray(Q)),
}


@functools.cache
def of_vanilla(transform: str) -> Any:
    return TRANSFORMED[transform](make("vanilla", "cpu"))


# The rule of each transformation is the skeleton's, which has the native kernel with all of them.
@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.tier(exhaustive=["tpu-eager", "tpu-scan and remat", "tpu-jvp", "cuda-eager", "cuda-second derivative"])
def test_it_is_that_of_vanilla_under_transformations(platform: str, transform: str) -> None:
    found, expected = TRANSFORMED[transform](make("flash", platform)), of_vanilla(transform)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=5e-5), found, expected)
    if transform == "jvp":
        assert not np.any(found[1][1])
