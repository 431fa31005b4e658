"""What tests of the language model share: tokens, a compiled call, and how close logits must be."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def tokens(shape: tuple[int, ...] = (3, 21)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 96, shape), jnp.int32)


@functools.partial(jax.jit, static_argnames="graphdef")
def _call(graphdef: Any, state: Any, *args: Any, **options: Any) -> Any:
    return nnx.merge(graphdef, state)(*args, **options)


def call(model: nnx.Module, *args: Any, **options: Any) -> Any:
    """The model's output, compiled."""
    return _call(*nnx.split(model), *args, **options)


def close(actual: jax.Array, expected: jax.Array) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=2e-5 * float(np.abs(expected).max(initial=1)))
