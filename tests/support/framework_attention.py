"""The tolerance rule between a framework's attention and attnops' in its place; the framework in float64 is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close, tolerance


def assert_same(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: Any, dtype: Any = np.float32) -> None:
    """Assert that outputs and gradients are the same under the tolerance rule.

    Args:
        ours: of the arrays; its result is a tree of arrays.
        theirs: the framework's.
        arrays: floating-point arrays, which are differentiated.
        dtype: what both compute in.
    """

    def run(function: Callable[..., Any], to: Any) -> tuple[list[Any], list[Any]]:
        @jax.jit
        def both(*given: Any) -> tuple[list[Any], list[Any]]:
            out, pull_back = jax.vjp(lambda *a: jax.tree_util.tree_leaves(function(*a)), *given)
            cotangents = [
                jnp.asarray(np.random.default_rng(i).normal(size=x.shape).astype(dtype)).astype(x.dtype)
                for i, x in enumerate(out)
            ]
            return out, list(pull_back(cotangents))

        return both(*(np.asarray(x).astype(to) for x in arrays))

    rounded = [jnp.asarray(x, dtype) for x in arrays]
    arrays = tuple(np.asarray(x.astype(np.float32)) for x in rounded)
    with jax.enable_x64(True):
        exact = [[np.asarray(x) for x in each] for each in run(theirs, np.float64)]
    same, found = run(theirs, dtype), run(ours, dtype)
    factors = ("output", OUTPUT_FACTOR), ("gradient", GRADIENT_FACTOR)
    for (what, factor), *each in zip(factors, exact, same, found, strict=True):
        for i, (e, s, f) in enumerate(zip(*each, strict=True)):
            magnitude = max(float(np.abs(e).max()), max(float(np.abs(x).max()) for x in arrays))
            assert_close(f"{what} {i}", f, e, tolerance(e, s, magnitude, dtype, factor))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)
