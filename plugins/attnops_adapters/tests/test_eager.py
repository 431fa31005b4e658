"""Eager calls of frameworks' attention: a second one of equal shapes compiles nothing, whatever its values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_budget import compiled

from attnops_adapters.flax import attention_fn
from attnops_adapters.jax_nn import dot_product_attention

B, T, H, K, D = 2, 6, 4, 2, 8


def arrays(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, D), "bias": (B, H, T, T)}
    found = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return found | {"mask": jnp.asarray(rng.random((B, 1, T, T)) > 0.3)}


def by_jax_nn(x: dict[str, jax.Array], seed: int) -> jax.Array:
    lengths = {"query_seq_lengths": [T, seed + 1], "key_value_seq_lengths": jnp.array([seed + 2, T])}
    return dot_product_attention(x["q"], x["k"], x["v"], x["bias"], x["mask"], scale=seed + 0.5, **lengths,
                                 implementation="flash")  # fmt: skip


def by_flax(x: dict[str, jax.Array], seed: int) -> jax.Array:
    key = jax.random.key(seed)
    dropping = {"dropout_rng": key, "dropout_rate": 0.2, "broadcast_dropout": seed < 0}
    return attention_fn("flash")(x["q"], x["k"], x["v"], x["bias"], x["mask"].astype(jnp.float32), **dropping)


def gradient_by_flax(x: dict[str, jax.Array], seed: int) -> jax.Array:
    def loss(q: jax.Array) -> jax.Array:
        given = {"dropout_rng": jax.random.key(seed), "dropout_rate": 0.2}  # of all heads alike: under jax.vmap
        return attention_fn("flash")(q, x["k"], x["v"], mask=x["mask"], **given).sum()

    return jax.grad(loss)(x["q"])


@pytest.mark.slow
@pytest.mark.parametrize("call", [by_jax_nn, by_flax, gradient_by_flax])
def test_a_second_call_compiles_nothing(call: Callable[[dict[str, jax.Array], int], Any]) -> None:
    given = [(arrays(seed), seed) for seed in (0, 0, 1)]
    first = call(*given[0])
    before = compiled()
    again, other = (call(*x) for x in given[1:])
    assert compiled() == before
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
