"""Linear attention in chunks, in plain JAX: matrix products within a chunk, and one state from chunk to chunk.

With S the state before a chunk, and decays e(i, j) from token j to token i, the delta rule's updates u of a chunk solve
(I + A) u = β (v - e(i, start) S k), A_ij = β_i e(i, j) k_i·k_j for j < i: the WY form of "Parallelizing Linear
Transformers with the Delta Rule" (Yang et al. 2024, arXiv:2406.06484; gated: arXiv:2412.06464). Without β, u = v.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import equally_varying
from attnops_linear.gates import CHUNK, Sums, before, cumulative, product
from attnops_linear.triangular import inverse

# Products of decays between exp(-30) and exp(30) leave room for those of keys and queries in float32.
_MILD: Final = 30.0
# Keys and queries that such products do not overflow.
_ORDINARY: Final = 1e12
# Calls of at most so many tokens go token by token.
FEW: Final = 4


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array | None,
    beta: jax.Array | None,
    starts: jax.Array | None,
    state: jax.Array,
    is_constant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, Dv] and the last state [B, Hv, D, Dv], float32.

    Its memory is O(T · (D + Dv)); reverse mode keeps a state for each 32 tokens (16 with decays
    by channel or constant ones), and computes the rest again.

    Args:
        query: [B, T, K, D] float32, times the scale.
        key: [B, T, K, D] float32.
        value: [B, T, Hv, Dv] float32.
        decay: None, [B, T, Hv, 1] or [B, T, Hv, D] float32.
        beta: None or [B, T, Hv] float32.
        starts: None or bool [B, T], whether the state is emptied before the token.
        state: [B, Hv, D, Dv] float32.
        is_constant: whether decays are those of all tokens. Their gradient is a sum over pairs of tokens, computed as
            a difference of sums, whose error grows with the chunk.
    """
    (B, T, K, D), (H, Dv) = query.shape, value.shape[2:]
    if T == 0:
        return jnp.zeros((B, 0, H, Dv), jnp.float32), state
    if decay is None:
        decay = jnp.zeros((B, T, H, 1), jnp.float32)
    C = 1 if T <= FEW else CHUNK if is_constant or decay.shape[-1] > 1 or T <= CHUNK else 2 * CHUNK
    R, count = H // K, -(-T // C)
    by_key, by_value = (K, 1), (K, R)
    if C == 1:  # states keep their shape: XLA updates no reshaped buffer in place
        query, key = (jnp.repeat(x, R, axis=2) for x in (query, key))
        by_key = by_value = (H,)  # type: ignore[assignment]

    def cut(x: jax.Array | None, heads: tuple[int, ...]) -> jax.Array | None:
        """Chunks, [N, B, heads, C, last], of an array [B, T, ..., last]; zeros at the end."""
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, count * C - T), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, count, C, *heads, x.shape[-1]), (1, 2), (0, -2))

    given = (
        cut(query, by_key), cut(key, by_key), cut(value, by_value), cut(decay, by_value),
        cut(None if beta is None else beta[..., None], by_value),
        cut(None if starts is None else starts[..., None], (1,) * len(by_key)),
    )  # fmt: skip
    given, state = equally_varying((given, state))
    chunk = jax.checkpoint(_token if C == 1 else _chunk)
    last, outputs = lax.scan(chunk, state.reshape(B, *by_value, D, Dv), given)
    outputs = jnp.moveaxis(outputs, (0, -2), (1, 2)).reshape(B, count * C, H, Dv)
    return outputs[:, :T], last.reshape(B, H, D, Dv)


_Given = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def _token(state: jax.Array, given: _Given) -> tuple[jax.Array, jax.Array]:
    """The definition, for a chunk of one token."""
    query, key, value, decay, beta, starts = given
    if starts is not None:  # a document's first token keeps nothing, whatever its decay
        state, decay = jnp.where(starts, 0.0, state), jnp.where(starts, 0.0, decay)
    kept = jnp.exp(decay)
    # The state is read in one product and written in one pass, in place if its buffer is donated.
    rows = query if beta is None else jnp.concatenate([query, key], axis=-2)
    past = (rows * kept) @ state
    if beta is not None:
        value = beta * (value - past[..., 1:, :])
    outputs = past[..., :1, :] + (query * key).sum(axis=-1, keepdims=True) * value
    return state * jnp.swapaxes(kept, -1, -2) + jnp.swapaxes(key, -1, -2) * value, outputs


def _chunk(state: jax.Array, given: _Given) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, [B, K, R, D, Dv], and the chunk's outputs [B, K, R, C, Dv]."""
    query, key, value, decay, beta, starts = given
    C = key.shape[-2]
    sums = cumulative(decay, starts)
    start = before(sums, 0)
    # The delta rule asks the state for the keys' values too: one product for both.
    rows = query if beta is None else jnp.concatenate([query, key], axis=-2)
    parts = rows.shape[-2] // C
    scores = _scores(rows, key, sums)
    kept = jnp.tile(product(sums, start), (parts, 1))
    past = (rows @ state) * kept if kept.shape[-1] == 1 else (rows * kept) @ state
    if beta is not None:
        strict = jnp.tril(scores[..., C:, :], -1) * beta
        value = inverse(strict) @ (beta * (value - past[..., C:, :]))
    outputs = past[..., :C, :] + scores[..., :C, :] @ value
    end = sums.tokens(C - 1, C)
    keys = key * product(end, sums)
    state = jnp.swapaxes(product(end, start), -1, -2) * state + jnp.swapaxes(keys, -1, -2) @ value
    return state, outputs


def _scores(rows: jax.Array, key: jax.Array, sums: Sums) -> jax.Array:
    """e(i, j) rows_i·k_j for j ≤ i, else 0; [B, K, R, n · C, C] for rows [B, K, 1, n · C, D], n times a chunk's."""
    C = key.shape[-2]
    if sums.coarse.shape[-1] == 1:
        flat = Sums(*(x[..., 0] for x in sums))
        lower = jnp.tril(jnp.ones((C, C), bool))
        decays = product(flat.spread(-1), flat.spread(-2), lower)
        return (rows @ jnp.swapaxes(key, -1, -2)) * jnp.tile(decays, (rows.shape[-2] // C, 1))
    # e(i, j) = e(i, middle) / e(j, middle), unless one of them overflows.
    logarithm = (sums.coarse + sums.fine) - (sums.coarse + sums.fine)[..., C // 2, None, :]
    mild = (_largest(logarithm) < _MILD) & (sums.resets[..., -1, :] == 0).all()
    mild = mild & (_largest(rows) < _ORDINARY) & (_largest(key) < _ORDINARY)
    # What reverse mode keeps of a branch, it keeps of both.
    branches = jax.checkpoint(_factored), jax.checkpoint(_by_pairs)
    scores: jax.Array = lax.cond(mild, *branches, rows, key, logarithm, sums)
    return scores


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max(initial=0.0)


def _factored(rows: jax.Array, key: jax.Array, logarithm: jax.Array, sums: Sums) -> jax.Array:
    """`_scores` by one product of matrices."""
    C, parts = key.shape[-2], rows.shape[-2] // key.shape[-2]
    # `jax.vmap` computes both branches: were other decays to overflow, gradients would be 0 times infinity.
    logarithm = jnp.clip(logarithm, -_MILD, _MILD)
    rows = rows * jnp.tile(jnp.exp(logarithm), (parts, 1))
    scores = rows @ jnp.swapaxes(key * jnp.exp(-logarithm), -1, -2)
    return jnp.where(jnp.tile(jnp.tril(jnp.ones((C, C), bool)), (parts, 1)), scores, 0.0)


def _by_pairs(rows: jax.Array, key: jax.Array, logarithm: jax.Array, sums: Sums) -> jax.Array:
    """`_scores`, whatever the decays."""
    C, D = key.shape[-2:]
    decays = product(sums.spread(-2), sums.spread(-3), jnp.tril(jnp.ones((C, C), bool))[..., None])  # [..., i, j, D]
    split = rows.reshape(*rows.shape[:-2], rows.shape[-2] // C, C, D)
    scores = jnp.einsum("...pid,...ijd->...pij", split, key[..., None, :, :] * decays)
    return scores.reshape(*scores.shape[:-3], rows.shape[-2], C)
