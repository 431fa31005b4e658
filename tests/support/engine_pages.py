"""Batches of an engine's packed rows over its pages, and their attention in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnops_caches.engines import Scores, pages_shape

PAGE, MAX_PAGES, PAGES, N = 16, 5, 24, 64
# New tokens and tokens of each row: a decoded one, a chunk of a prompt, a whole prompt, drafts; and rows of padding.
ROWS = ((1, 41), (19, 50), (23, 23), (3, 17))
B = 6


@dataclasses.dataclass
class Batch:
    """What the engine gives a layer."""

    pages: Any
    query: Any
    key: Any
    value: Any
    lengths: Any
    table: Any
    starts: Any
    distribution: Any

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, x.name) for x in dataclasses.fields(self))


def batch(H: int = 4, K: int = 2, D: int = 64, dtype: Any = jnp.float32, seed: int = 0) -> Batch:
    """Rows with tokens at random pages; NaN in pages that no row has, and after the tokens of a page."""
    rng = np.random.default_rng(seed)
    shape = pages_shape(PAGES, PAGE, K, D, dtype)
    numbers = rng.permutation(PAGES).astype(np.int32)
    table, tokens = np.zeros((B, MAX_PAGES), np.int32), rng.standard_normal(shape)
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    held = np.zeros((PAGES, PAGE), bool)
    for row, (new, length) in enumerate(ROWS):
        count = -(-length // PAGE)
        table[row, :count], numbers = numbers[:count], numbers[count:]
        for i in range(length - new):
            held[table[row, i // PAGE], i % PAGE] = True
    tokens = tokens if is_float else np.clip(40 * tokens, -127, 127)
    tokens = np.where(held[:, None, None, :, None], tokens, np.nan if is_float else 0)
    tokens[..., D : shape[-1] - D] = np.where(held[:, None, None, :, None], 0, tokens[..., D : shape[-1] - D])
    starts = np.zeros(B + 1, np.int32)
    starts[1 : len(ROWS) + 1] = np.cumsum([new for new, _ in ROWS])
    lengths = np.full(B, 7, np.int32)  # of padding: any
    lengths[: len(ROWS)] = [length for _, length in ROWS]
    given = (rng.standard_normal((N, heads, D)) for heads in (H, K, K))
    query, key, value = (jnp.asarray(x, jnp.float32) for x in given)
    key, value = ((x if is_float else jnp.clip(40 * x, -127, 127)).astype(dtype) for x in (key, value))
    query = query.astype(dtype if jnp.dtype(dtype).itemsize > 1 else jnp.bfloat16)
    rows = map(jnp.asarray, (lengths, table.reshape(-1), starts))
    distribution = jnp.array([1, 1, len(ROWS)], jnp.int32)
    return Batch(jnp.asarray(tokens).astype(dtype), query, key, value, *rows, distribution)


def plain(given: Batch, scores: Scores, sinks: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The output and the pages, in float64; 0 for queries of padding."""
    pages, query, key, value, lengths, table, starts, _ = (
        np.asarray(x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x) for x in given.args
    )
    pages, D, H = pages.astype(np.float64).copy(), query.shape[2], query.shape[1]
    out, K = np.zeros(query.shape), key.shape[1]
    for row in range(len(ROWS)):
        T, first = starts[row + 1] - starts[row], lengths[row] - (starts[row + 1] - starts[row])
        at = [(table.reshape(B, -1)[row, i // PAGE], 0, slice(None), i % PAGE) for i in range(lengths[row])]
        for t in range(T if scores.updates else 0):
            pages[at[first + t]] = 0
            pages[at[first + t]][:, :D] = key[starts[row] + t]
            pages[at[first + t]][:, pages.shape[-1] - D :] = value[starts[row] + t]
        tokens = np.stack([pages[x] for x in at]) if at else np.zeros((0, K, pages.shape[-1]))
        keys, values = (
            tokens[..., :D] * (scores.k_scale or 1),
            tokens[..., tokens.shape[-1] - D :] * (scores.v_scale or 1),
        )
        for t in range(T):
            i, j = first + t, np.arange(lengths[row])
            sees = (j <= i) | (not scores.causal)
            sees &= (j > i - scores.window) if scores.window else True
            for h in range(H):
                s = keys[:, h * K // H] @ query[starts[row] + t, h] * scores.scale
                s = scores.soft_cap * np.tanh(s / scores.soft_cap) if scores.soft_cap else s
                s = np.where(sees, s, -np.inf)
                most = max(s.max(), -np.inf if sinks is None else float(sinks[h]))
                weights = np.exp(s - most)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - most))
                out[starts[row] + t, h] = weights @ values[:, h * K // H] / total
    return out, pages


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, False),
    "window, D 80": ({"D": 80}, {"window": 9}, False),
    "both directions, window": ({}, {"causal": False, "window": 6}, False),
    "cap, sinks, D 128": ({"D": 128}, {"soft_cap": 3.0}, True),
    "shared, D 64": ({}, {"updates": False}, False),
    "shared, both directions, sinks": ({}, {"updates": False, "causal": False}, True),
    "bfloat16, one kv head": ({"K": 1, "dtype": jnp.bfloat16}, {"window": 20}, False),
    "int8": ({"dtype": jnp.int8}, {"k_scale": 0.02, "v_scale": 0.03}, False),
    "float8": ({"dtype": jnp.float8_e4m3fn}, {"k_scale": 0.7, "v_scale": 1.5}, True),
}


def problem(case: str) -> tuple[Batch, Scores, Any]:
    of_batch, of_scores, has_sinks = CASES[case]
    given, scores = batch(**of_batch), Scores(**{"scale": 0.3} | of_scores)
    if not scores.updates:  # another layer has written the tokens
        pages = plain(given, dataclasses.replace(scores, updates=True))[1]
        given = dataclasses.replace(given, pages=jnp.asarray(pages).astype(given.pages.dtype))
    return given, scores, jnp.linspace(-1, 2, given.query.shape[1]) if has_sinks else None


def check(given: Batch, scores: Scores, sinks: Any, out: Any, pages: Any) -> None:
    wanted, wanted_pages = plain(given, scores, sinks)
    tolerance = 2e-5 if given.query.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.asarray(pages.astype(jnp.float32)), wanted_pages.astype(np.float32))
