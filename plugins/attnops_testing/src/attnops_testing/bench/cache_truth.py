"""The oracle's results of a call over a cache: attention over the dequantised tokens, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import jax.numpy as jnp
import numpy as np

from attnops_caches import Quantized
from attnops_testing import oracle
from attnops_testing.bench.case import Array
from attnops_testing.bench.tokens import Tokens
from attnops_testing.tolerance import OUTPUT_FACTOR, assert_close, tolerance

# The number of scores that the oracle computes per case, the least number of queries, and the most elements of arrays.
_SCORES: Final = 1 << 20
_FEWEST: Final = 2
_ELEMENTS: Final = 1 << 26


class CacheTruth:
    """The output of some queries of a call, and the error that the tolerance rule allows.

    Attributes:
        rows: the queries that are checked, (row, query): all if they are few, else the first, the last and some in
            between.
        d_out: empty, since calls over a cache have no gradient.
    """

    def __init__(self, tokens: Tokens, codec: Quantized | None, seen: Callable[[int, Array], Array]) -> None:
        self._tokens, self._codec, self._seen = tokens, codec, seen
        self.d_out = np.zeros(0)
        every = np.array([(row, i) for row, count in enumerate(tokens.queries) for i in range(count)])
        count = max(_FEWEST, _SCORES // (tokens.heads * max(tokens.lengths)))
        if count < len(every):
            between = np.random.default_rng(tokens.seed).choice(np.arange(1, len(every) - 1), count - 2, replace=False)
            every = every[np.sort(np.concatenate([[0], between, [len(every) - 1]]).astype(int))]
        self.rows = every

    def check(self, results: dict[str, Array]) -> None:
        """Compare a contender's output [B, T, H, Dv] with the oracle.

        Raises:
            AssertionError: the output is wrong; the message says where.
        """
        out, (exact, allowed) = results["output"], self._expected
        shape = (self._tokens.batch, self._tokens.T, self._tokens.heads, self._tokens.value_head_dim)
        assert out.shape == shape, f"output has shape {out.shape}, but must have {shape}"
        assert_close("output of checked query", out[self.rows[:, 0], self.rows[:, 1]], exact, allowed)

    @functools.cached_property
    def _expected(self) -> tuple[Array, float]:
        """The output of the checked queries, [queries, H, Dv], and the tolerance."""
        dtype = jnp.dtype(self._tokens.dtype)
        parts = [part for row in np.unique(self.rows[:, 0]) for part in self._row(int(row))]
        exact, narrow, magnitude = (np.concatenate(x) for x in zip(*parts, strict=True))
        return exact, tolerance(exact, narrow, magnitude, dtype, OUTPUT_FACTOR)

    def _row(self, row: int) -> list[tuple[Array, Array, Array]]:
        """For the checked queries of one row: the output in float64, the output in the dtype, and its magnitudes."""
        tokens = self._tokens
        queries, length = self.rows[self.rows[:, 0] == row, 1], tokens.lengths[row]
        key, value = (x[None, :length] for x in tokens.dequantised(self._codec, row))
        query, seen = tokens.inputs[0][row, queries][None], self._seen(row, queries)
        groups = tokens.heads // tokens.kv_heads
        # The number of kv heads at a time: the oracle repeats them for each query head.
        at_once = max(1, _ELEMENTS // (length * tokens.head_dim * groups))
        outputs: list[list[Array]] = [[], [], []]
        for first in range(0, tokens.kv_heads, at_once):
            kv = slice(first, first + at_once)
            h = slice(first * groups, (first + at_once) * groups)
            arrays = query[:, :, h], key[:, :, kv], value[:, :, kv]
            mask = seen[None] if seen.shape[0] == 1 else seen[None, h]
            exact, narrow = (
                oracle.attention(*arrays, mask=mask, dtype=d) for d in (np.float64, jnp.dtype(tokens.dtype))
            )
            for whole, part in zip(outputs, (exact.out, narrow.out, exact.out_magnitude), strict=True):
                whole.append(part[0])
        exact_out, narrow_out, magnitude = (np.concatenate(x, axis=1) for x in outputs)
        return [(exact_out, narrow_out, magnitude)]
