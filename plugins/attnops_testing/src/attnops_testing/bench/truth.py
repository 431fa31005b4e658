"""The oracle's results for a case, with which contenders are compared before they are timed."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from attnops_testing import oracle
from attnops_testing.bench.case import Array, Case
from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close, tolerance

# The number of scores that the oracle computes per case, and the least number of queries.
_SCORES: Final = 1 << 21
_FEWEST_ROWS: Final = 4
# With more numbers than this in the keys, the first and the last batch and kv head stand for all.
_KEYS: Final = 1 << 22


def is_large(case: Case) -> bool:
    """Whether the oracle is too slow for all heads of a case."""
    return case.batch * case.length * case.K * case.head_dim > _KEYS


class Truth:
    """Output and gradients of a case by the float64 oracle, and the errors that the tolerance rule allows.

    The oracle is too slow for a long case as a whole, but not for some of its queries, since each query's output is
    independent of the others. With a cotangent that is 0 at all other queries the gradients, those of key and value
    included, depend only on these queries, and the timed program can compute them unchanged.

    Attributes:
        rows: the queries that are checked: all if they are few, else the first, the last and some in between.
        batches, kv_heads, heads: the batches and heads that are checked: all, or in a large case the first and the last
            ones.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        G = case.heads // case.K
        self.batches, self.kv_heads = np.arange(case.batch), np.arange(case.K)
        if is_large(case):
            self.batches, self.kv_heads = (np.unique(x[[0, -1]]) for x in (self.batches, self.kv_heads))
        self.heads = (self.kv_heads[:, None] * G + np.arange(G)).reshape(-1)
        count = max(_FEWEST_ROWS, _SCORES // (len(self.batches) * len(self.heads) * case.length))
        if count >= case.length:
            self.rows = np.arange(case.length)
        else:
            between = np.random.default_rng(case.seed).choice(np.arange(1, case.length - 1), count - 2, replace=False)
            self.rows = np.sort(np.concatenate([[0], between, [case.length - 1]]))

    @property
    def _queries(self) -> tuple[Array, ...]:
        """The place of the checked queries in an array [B, T, H, D]."""
        return np.ix_(self.batches, self.rows, self.heads)

    @property
    def _keys(self) -> tuple[Array, ...]:
        """The place of the keys that they see in an array [B, T, K, D]."""
        return np.ix_(self.batches, np.arange(self.case.length), self.kv_heads)

    @functools.cached_property
    def d_out(self) -> Array:
        """The cotangent to check with, 0 at the queries that are not checked."""
        masked = np.zeros_like(self.case.d_out)
        masked[self._queries] = self.case.d_out[self._queries]
        return masked

    def check(self, results: dict[str, Array]) -> None:
        """Compare a contender's results with the oracle.

        Args:
            results: "output", and with a backward pass "gradient of query", "… key" and "… value".

        Raises:
            AssertionError: a result is wrong; the message says where.
        """
        assert set(results) == set(self.expected), f"gave {sorted(results)}, but must give {sorted(self.expected)}"
        for name, actual in results.items():
            exact, allowed = self.expected[name]
            of_query = name in ("output", "gradient of query")
            shape = self.case.inputs[0 if of_query else 1].shape
            assert actual.shape == shape, f"{name} has shape {actual.shape}, but must have {shape}"
            place = self._queries if of_query else self._keys
            if name != "output":
                others = actual.copy()
                others[place] = 0
                assert not np.any(others), f"{name} is not 0 where the cotangent is"
            assert_close(name, actual[place], exact, allowed)

    @functools.cached_property
    def expected(self) -> dict[str, tuple[Array, float]]:
        """By name, the oracle's result at the checked places, and the allowed error; computed at first use."""
        query, key, value = self.case.inputs
        dtype = jnp.dtype(self.case.dtype)
        inputs = query[self._queries], key[self._keys], value[self._keys]
        options: dict[str, Any] = {"mask": self.case.rows_seen(self.rows, self.batches, self.heads)}
        exact, narrow = (oracle.attention(*inputs, dtype=d, **options) for d in (np.float64, dtype))
        allowed = tolerance(exact.out, narrow.out, exact.out_magnitude, dtype, OUTPUT_FACTOR)
        expected = {"output": (exact.out, allowed)}
        if self.case.backward:
            options["d_out"] = self.case.d_out[self._queries]
            wide, rough = (oracle.attention_gradients(*inputs, dtype=d, **options) for d in (np.float64, dtype))
            for name, gradient in wide.values.items():
                allowed = tolerance(gradient, rough.values[name], wide.magnitudes[name], dtype, GRADIENT_FACTOR)
                expected[f"gradient of {name}"] = gradient, allowed
        return expected
